"""Who takes part in a simulated process group, under torch's names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    # torch's stubs overload the collectives in ways that no Python class can repeat.
    class _ProcessGroup:
        def __init__(self, rank: int, size: int) -> None: ...

else:
    _ProcessGroup = dist.ProcessGroup


class Membership(_ProcessGroup):
    """One communicator. `ranks` are the global ranks of its members."""

    supports_splitting = False
    supports_coalescing = True
    backend_name: str

    def __init__(self, rank: int, size: int, ranks: Sequence[int], name: str) -> None:
        super().__init__(rank, size)
        self._rank_in_group = rank
        self._group_size = size
        self._ranks = as_range(ranks)
        self._name = name
        self._description = "default_pg" if name == "0" else "undefined"

    def rank(self) -> int:
        """Return the rank in this group."""
        return self._rank_in_group

    def size(self) -> int:
        """Return the number of members."""
        return self._group_size

    def name(self) -> str:
        """Return the name of the backend."""
        return self.backend_name

    getBackendName = name  # noqa: N815 (torch's name)

    @property
    def group_name(self) -> str:
        """Return torch's name of the group."""
        return self._name

    pg_name = group_name

    @property
    def group_desc(self) -> str:
        """Return the purpose of the group."""
        return self._description

    @property
    def ranks(self) -> Sequence[int]:
        """Return the global ranks of the members."""
        return self._ranks

    def _get_backend(self, device: Any) -> Membership:
        return self

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def _set_group_desc(self, description: str) -> None:
        self._description = description

    def _get_sequence_number_for_group(self) -> int:
        return 0

    def shutdown(self) -> None:
        """Do nothing: nothing runs."""

    abort = shutdown


def total_bytes(*tensors: torch.Tensor) -> int:
    """Return the bytes of all elements."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def as_range(ranks: Sequence[int]) -> Sequence[int]:
    """Return evenly spaced ranks as a range, so that later uses need not iterate over them."""
    if len(ranks) < 2:
        return range(ranks[0], ranks[0] + 1) if ranks else range(0)
    step = ranks[1] - ranks[0]
    candidate = range(ranks[0], ranks[-1] + (1 if step > 0 else -1), step or 1)
    return candidate if list(candidate) == list(ranks) else tuple(ranks)
