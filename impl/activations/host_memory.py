"""Host memory for what is offloaded: allocated only where no buffer of that size is free."""

from __future__ import annotations

import torch


class HostBuffers:
    """Pinned buffers, where the device has a use for that, that are lent and given back.

    What was not taken during a whole iteration is let go when the next one starts: shapes have changed.
    """

    def __init__(self) -> None:
        self._free: dict[tuple[int, torch.dtype], list[torch.Tensor]] = {}
        self._unused: dict[tuple[int, torch.dtype], int] = {}
        self.nbytes = 0

    def take(self, like: torch.Tensor) -> torch.Tensor:
        """Memory of the host for the contents of ``like``, 1-D."""
        key = (like.numel(), like.dtype)
        free = self._free.get(key)
        if not free:
            self.nbytes += like.numel() * like.element_size()
            return torch.empty_like(like, device="cpu", pin_memory=like.device.type != "cpu")
        self._unused[key] = min(self._unused.get(key, 0), len(free) - 1)
        return free.pop()

    def give_back(self, buffer: torch.Tensor) -> None:
        """``buffer`` may be lent to others."""
        self._free.setdefault((buffer.numel(), buffer.dtype), []).append(buffer)

    def begin_iteration(self) -> None:
        """Let go what the last iteration had no use for."""
        for key, free in self._free.items():
            unused = self._unused.get(key, len(free))
            del free[:unused]
            self.nbytes -= unused * key[0] * key[1].itemsize
        self._free = {key: free for key, free in self._free.items() if free}
        self._unused = {key: len(free) for key, free in self._free.items()}
