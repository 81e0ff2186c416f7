"""What one call of a block has saved for backward: on the device, on the host, or on the way.

::

    forward     on the device --store--> copied --let_go--> on the host
    backward    on the host --fetch--> on the way --arrive--> on the device, until its last use

A *piece* is one storage; tensors that share it are saved as views of it, and it moves once.
"""

from __future__ import annotations

import torch

from ..runtime.streams import Event, HostLink
from .host_memory import HostBuffers


class Piece:
    """One storage, 1-D. ``device`` and ``host`` are its copies, ``None`` where it has none."""

    def __init__(self, saved: torch.Tensor, buffers: HostBuffers) -> None:
        self.device: torch.Tensor | None = _flat(saved)
        self.host: torch.Tensor | None = None
        self.uses = 0
        """Saved tensors that backward has yet to ask for."""
        self._buffers = buffers
        self._version: int | None = self.device._version
        self._written = False

    def __del__(self) -> None:
        if self.host is not None:
            self._buffers.give_back(self.host)

    def store(self) -> None:
        """Queue the copy to the host on the current stream."""
        assert self.device is not None
        self.host = self._buffers.take(self.device)
        self.host.copy_(self.device, non_blocking=True)

    def let_go(self) -> None:
        """Give up the device's memory."""
        self._look()
        self.device = self._version = None

    def fetch(self) -> None:
        """Queue the copy to the device, into ``device``, on the current stream."""
        assert self.device is not None
        assert self.host is not None
        self.device.copy_(self.host, non_blocking=True)

    def use(self, shape: torch.Size, stride: tuple[int, ...], offset: int) -> torch.Tensor:
        """The saved tensor. After the last one only autograd holds the device's memory.

        Raises RuntimeError if the program has written into it since.
        """
        self._look()
        if self._written:
            raise _modified(shape)
        assert self.device is not None
        with torch.no_grad():
            tensor = self.device.as_strided(shape, stride, offset)
        self.uses -= 1
        if not self.uses and self.host is not None:
            self.device = self._version = None
        return tensor

    def _look(self) -> None:
        """Notice writes into what was saved, as autograd's own count of them does."""
        if self._version is not None and self.device is not None and self.device._version != self._version:
            self._written = True


class Group:
    """The pieces of one call of a block, which move together."""

    def __init__(self, device: torch.device, buffers: HostBuffers) -> None:
        self._device = device
        self._buffers = buffers
        self._pieces: dict[tuple[int, torch.dtype], Piece] = {}
        self._stored: Event | None = None
        self._fetched: Event | None = None
        self._awaits_fetch = False
        self.entered = False
        """Whether backward has come here."""

    def save(self, tensor: torch.Tensor) -> Piece:
        """The piece that has the storage of ``tensor``, which is saved once more."""
        key = (tensor.untyped_storage().data_ptr(), tensor.dtype)
        piece = self._pieces.get(key)
        if piece is None:
            piece = self._pieces[key] = Piece(tensor, self._buffers)
        piece.uses += 1
        return piece

    def store(self, link: HostLink) -> None:
        """Copy everything to the host behind what was computed so far."""
        link.to_host.follow(link.compute)
        with link.to_host, torch.no_grad():
            for piece in self._pieces.values():
                piece.store()
            self._stored = link.to_host.record()

    def let_go(self, link: HostLink) -> None:
        """Free the device's memory: computation from now on, which may get it, waits for the copies."""
        link.compute.wait(self._stored)
        for piece in self._pieces.values():
            if piece.host is not None:
                piece.let_go()

    def fetch(self, link: HostLink) -> None:
        """Queue the way back of what is on the host alone, into memory of computation, behind what was
        computed so far (which may have used that memory)."""
        missing = [piece for piece in self._pieces.values() if piece.device is None and piece.uses > 0]
        if not missing:
            return
        with torch.no_grad():
            for piece in missing:
                assert piece.host is not None
                piece.device = torch.empty_like(piece.host, device=self._device, pin_memory=False)
            link.from_host.wait(self._stored)
            link.from_host.follow(link.compute)
            with link.from_host:
                for piece in missing:
                    piece.fetch()
                self._fetched = link.from_host.record()
        self._awaits_fetch = True

    def arrive(self, link: HostLink) -> None:
        """Let computation from now on wait until everything is on the device."""
        if self._awaits_fetch:
            link.compute.wait(self._fetched)
            self._awaits_fetch = False


class Saved:
    """What autograd keeps instead of a saved tensor."""

    __slots__ = ("group", "offset", "piece", "shape", "stride")

    def __init__(self, group: Group, tensor: torch.Tensor) -> None:
        self.group = group
        self.piece = group.save(tensor)
        self.shape = tensor.shape
        self.stride = tensor.stride()
        self.offset = int(tensor.storage_offset())


class Kept:
    """What autograd keeps instead of a saved tensor that stays: with hooks it counts no writes itself."""

    __slots__ = ("tensor", "version")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.version = tensor._version

    def use(self) -> torch.Tensor:
        """The saved tensor. Raises RuntimeError if the program has written into it since."""
        if self.tensor._version != self.version:
            raise _modified(self.tensor.shape)
        return self.tensor


def _modified(shape: torch.Size) -> RuntimeError:
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"a saved tensor of shape {tuple(shape)}, in a block whose activations are offloaded"
    )


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """All of the storage of ``tensor`` as one dimension; it holds no part of autograd's graph."""
    with torch.no_grad():
        elements = tensor.untyped_storage().nbytes() // tensor.element_size()
        return tensor.detach().as_strided((elements,), (1,), 0)
