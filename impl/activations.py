"""Activation offload: keep the tensors that a block saves for backward in host memory.

::

    compute    | forward 1 | forward 2 | forward 3 | backward 3 | backward 2 | backward 1 |
    to host                [ 1 ........][ 2 .......]
    from host                                      [ 2 ........][ 1 ........]

After a block's forward, its saved tensors are copied to pinned memory on a separate stream. Their device
memory is freed when the next block's forward ends. When backward reaches a block, the tensors of the block
before it are copied back. The last block keeps its tensors on the device because backward begins there.

`torch.autograd.graph.save_on_cpu` does the same on the compute stream; torchtune's and Megatron-LM's
activation offloading also use a side stream. Only events order the streams (`record_stream` would hold the
memory until the allocator polls again): the compute stream waits for the copy to the host before it reuses
the memory, and the copy back goes into memory that the compute stream allocated.

Not offloaded are parameters, buffers, arguments that need no gradient (masks, tables: all blocks share them),
small tensors and wrapper subclasses.
"""

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from .runtime.streams import Event, HostLink
from .shared import error_text
from .shared.pytree import map_tensors
from .shared.torch_internals import current_graph_task_id

# Host memory for offloaded tensors. A buffer is allocated only if none of that size is free.


class HostBuffers:
    """A pool of host buffers, pinned unless the device is the CPU.

    Buffers that a whole iteration did not use are freed when the next one starts: shapes have changed.
    """

    def __init__(self) -> None:
        self._free: dict[tuple[int, torch.dtype], list[torch.Tensor]] = {}
        self._unused: dict[tuple[int, torch.dtype], int] = {}
        self.nbytes = 0

    def take(self, like: torch.Tensor) -> torch.Tensor:
        """Return a host buffer with the size and dtype of ``like``, which is 1-D."""
        key = (like.numel(), like.dtype)
        free = self._free.get(key)
        if not free:
            self.nbytes += like.numel() * like.element_size()
            return torch.empty_like(like, device="cpu", pin_memory=like.device.type != "cpu")
        self._unused[key] = min(self._unused.get(key, 0), len(free) - 1)
        return free.pop()

    def give_back(self, buffer: torch.Tensor) -> None:
        """Return ``buffer`` to the pool."""
        self._free.setdefault((buffer.numel(), buffer.dtype), []).append(buffer)

    def begin_iteration(self) -> None:
        """Free the buffers that the last iteration did not use."""
        for key, free in self._free.items():
            unused = self._unused.get(key, len(free))
            del free[:unused]
            self.nbytes -= unused * key[0] * key[1].itemsize
        self._free = {key: free for key, free in self._free.items() if free}
        self._unused = {key: len(free) for key, free in self._free.items()}


# The tensors that one call of a block saved for backward: on the device, on the host, or being copied.
#
# ::
#
#     forward     on the device --store--> copied --let_go--> on the host
#     backward    on the host --fetch--> being copied --arrive--> on the device, until its last use
#
# A *piece* is one storage. Tensors that share a storage are saved as views of it, and it is copied once.


class Piece:
    """One storage as a 1-D tensor. ``device`` and ``host`` are its copies, ``None`` if absent."""

    def __init__(self, saved: torch.Tensor, buffers: HostBuffers) -> None:
        self.device: torch.Tensor | None = _flat(saved)
        self.host: torch.Tensor | None = None
        # Number of saved tensors that backward has not unpacked yet.
        self.uses = 0
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
        """Drop the copy on the device."""
        self._look()
        self.device = self._version = None

    def fetch(self) -> None:
        """Queue the copy from the host into ``device`` on the current stream."""
        assert self.device is not None
        assert self.host is not None
        self.device.copy_(self.host, non_blocking=True)

    def use(self, shape: torch.Size, stride: tuple[int, ...], offset: int) -> torch.Tensor:
        """Return a saved tensor. After the last one, only autograd holds the device memory.

        Raises RuntimeError if the tensor was modified in place after it was saved.
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
        """Detect in-place writes by the version counter, as autograd does for saved tensors."""
        if self._version is not None and self.device is not None and self.device._version != self._version:
            self._written = True


class Group:
    """The pieces of one call of a block. They are copied together."""

    def __init__(self, link: HostLink, device: torch.device, buffers: HostBuffers) -> None:
        self._link = link
        self._device = device
        self._buffers = buffers
        self._pieces: dict[tuple[int, torch.dtype], Piece] = {}
        self._stored: Event | None = None
        self._fetched: Event | None = None
        self._awaits_fetch = False
        # Whether backward has reached this call.
        self.entered = False

    def save(self, tensor: torch.Tensor) -> Piece:
        """Return the piece for the storage of ``tensor`` and count one more saved tensor of it."""
        key = (tensor.untyped_storage().data_ptr(), tensor.dtype)
        piece = self._pieces.get(key)
        if piece is None:
            piece = self._pieces[key] = Piece(tensor, self._buffers)
        piece.uses += 1
        return piece

    def store(self) -> None:
        """Copy all pieces to the host after the computation queued up to now."""
        link = self._link
        link.to_host.follow(link.compute)
        with link.to_host, torch.no_grad():
            for piece in self._pieces.values():
                piece.store()
            self._stored = link.to_host.record()

    def let_go(self) -> None:
        """Free the device memory. Later computation may reuse it, so it waits for the copies."""
        self._link.compute.wait(self._stored)
        for piece in self._pieces.values():
            if piece.host is not None:
                piece.let_go()

    def fetch(self) -> None:
        """Queue the copies back of pieces that are only on the host, into memory of the compute stream,
        after the computation queued up to now (which may have used that memory)."""
        link = self._link
        missing = [piece for piece in self._pieces.values() if piece.device is None and piece.uses > 0]
        if not missing:
            return
        with torch.no_grad():
            for piece in missing:
                assert piece.host is not None
                piece.device = torch.empty_like(piece.host, device=self._device, pin_memory=False)
            link.from_host.wait(self._stored)  # the copy to the host is done
            link.from_host.follow(link.compute)  # the compute stream allocated the memory and may use it
            with link.from_host:
                for piece in missing:
                    piece.fetch()
                self._fetched = link.from_host.record()
        self._awaits_fetch = True

    def arrive(self) -> None:
        """Make later computation wait until all pieces are on the device."""
        if self._awaits_fetch:
            self._link.compute.wait(self._fetched)
            self._awaits_fetch = False


class Saved:
    """The object that autograd saves instead of an offloaded tensor."""

    __slots__ = ("group", "offset", "piece", "shape", "stride")

    def __init__(self, group: Group, tensor: torch.Tensor) -> None:
        self.group = group
        self.piece = group.save(tensor)
        self.shape = tensor.shape
        self.stride = tensor.stride()
        self.offset = int(tensor.storage_offset())


class Kept:
    """A saved tensor that stays on the device; with hooks, autograd does not check versions itself."""

    __slots__ = ("tensor", "version")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.version = tensor._version

    def use(self) -> torch.Tensor:
        """Return the saved tensor. Raises RuntimeError if it was modified in place."""
        if self.tensor._version != self.version:
            raise _modified(self.tensor.shape)
        return self.tensor


def _modified(shape: torch.Size) -> RuntimeError:
    return RuntimeError(error_text("activations.modified", tuple(shape)))


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return the whole storage of ``tensor`` as a detached 1-D tensor."""
    with torch.no_grad():
        elements = tensor.untyped_storage().nbytes() // tensor.element_size()
        return tensor.detach().as_strided((elements,), (1,), 0)


# Smaller storages are not offloaded: launching the copy would take as long as the copy itself.
LEAST_BYTES = 2**16


def offload_activations(
    modules: Iterable[nn.Module], *, least_bytes: int = LEAST_BYTES
) -> "ActivationOffload":
    """Offload to the host the tensors that each of ``modules`` saves for backward.

    Call it once with all blocks of a model, before an FSDP (ours or torch's) wraps them. Each module must
    compute on one stream.

    Args:
        modules: the blocks; one schedule orders the copies of all of them.
        least_bytes: storages smaller than this stay on the device.

    Raises ValueError for a negative number of bytes.
    """
    if least_bytes < 0:
        raise ValueError(f"least_bytes must be 0 or more, not {least_bytes}")
    offload = ActivationOffload(least_bytes)
    for module in modules:
        module.register_forward_pre_hook(offload.enter, with_kwargs=True)
        module.register_forward_hook(offload.leave, always_call=True)
    return offload


class ActivationOffload:
    """The offloaded activations of all blocks of one call of ``offload_activations``."""

    def __init__(self, least_bytes: int) -> None:
        self.least_bytes = least_bytes
        self._buffers = HostBuffers()
        self._link: HostLink | None = None
        # Calls that have not returned; None for a call that offloads nothing.
        self._open: list[tuple[_Call, saved_tensors_hooks] | None] = []
        # Groups whose backward has not run, in order. The references die with the autograd graph.
        self._waiting: list[weakref.ref[Group]] = []
        self._stored: Group | None = None
        self._fetching: Group | None = None
        self._calls = 0
        self._turn: int | None = None

    @property
    def host_bytes(self) -> int:
        """Return the bytes of host memory in the pool, in use or free."""
        return self._buffers.nbytes

    # -- forward ---------------------------------------------------------------------------------------------

    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Run before a block's forward (forward pre-hook)."""
        if not torch.is_grad_enabled() or current_graph_task_id() != -1:  # saves nothing, or a recomputation
            self._open.append(None)
            return
        waiting = (ref() for ref in self._waiting)
        if not self._open and all(group is None or group.entered for group in waiting):
            self._begin_iteration()
        call = _Call(self, module, (args, kwargs))
        hooks = saved_tensors_hooks(call.pack, self.unpack)
        self._open.append((call, hooks))
        hooks.__enter__()

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        """Run after a block's forward (forward hook)."""
        opened = self._open.pop() if self._open else None
        if opened is None:
            return
        call, hooks = opened
        hooks.__exit__(None, None, None)
        before, self._stored = self._stored, None
        self._calls += 1
        if call.group is not None:
            self._waiting.append(weakref.ref(call.group))
            if self._calls != self._turn:
                call.group.store()
                self._stored = call.group
        if before is not None:
            before.let_go()

    def _begin_iteration(self) -> None:
        self._settle()
        self._waiting.clear()
        self._calls = 0
        self._buffers.begin_iteration()

    def new_group(self, device: torch.device) -> Group:
        """Return an empty group for tensors on ``device``."""
        if self._link is None:
            self._link = HostLink(device)
        return Group(self._link, device, self._buffers)

    # -- backward --------------------------------------------------------------------------------------------

    def unpack(self, saved: Saved | Kept) -> torch.Tensor:
        """Return a saved tensor, on the device (unpack hook)."""
        if isinstance(saved, Kept):
            return saved.use()
        group, piece = saved.group, saved.piece
        if not group.entered:
            self._enter_backward(group)
        elif piece.device is None:  # a second backward through a kept graph
            piece.uses += 1
            group.fetch()
            group.arrive()
        return piece.use(saved.shape, saved.stride, saved.offset)

    def _enter_backward(self, group: Group) -> None:
        """Wait for the tensors of the block that backward reaches, and start fetching the block before it."""
        group.entered = True
        if self._calls:
            self._turn, self._calls = self._calls, 0
        if self._fetching is not group:
            self._settle()
            group.fetch()
        group.arrive()
        self._fetching = None
        while self._waiting:
            before = self._waiting.pop()()
            if before is None or before is group or before.entered:
                continue
            before.fetch()
            self._fetching = before
            self._waiting.append(weakref.ref(before))
            break

    def _settle(self) -> None:
        """Finish copies that were started for a forward or backward that did not follow."""
        if self._stored is not None:
            self._stored.let_go()
        if self._fetching is not None:
            self._fetching.arrive()
        self._stored = self._fetching = None


class _Call:
    """One call of a block. It decides which of the saved tensors are offloaded."""

    def __init__(self, offload: "ActivationOffload", module: nn.Module, inputs: Any) -> None:
        self.group: Group | None = None
        self._offload = offload
        stay = [*module.parameters(), *module.buffers()]

        def note(tensor: torch.Tensor) -> torch.Tensor:
            if not tensor.requires_grad:
                stay.append(tensor)
            return tensor

        map_tensors(note, inputs)
        self._stay = {tensor.untyped_storage().data_ptr() for tensor in stay if type(tensor) in _PLAIN}

    def pack(self, tensor: torch.Tensor) -> Saved | Kept:
        """Return the object that autograd saves instead of ``tensor`` (pack hook)."""
        if not self._moves(tensor):
            return Kept(tensor)
        if self.group is None:
            self.group = self._offload.new_group(tensor.device)
        return Saved(self.group, tensor)

    def _moves(self, tensor: torch.Tensor) -> bool:
        if type(tensor) is not torch.Tensor or isinstance(tensor._base, nn.Parameter):
            return False
        storage = tensor.untyped_storage()
        nbytes = storage.nbytes()
        if nbytes < max(self._offload.least_bytes, 1) or nbytes % tensor.element_size():
            return False
        return storage.data_ptr() not in self._stay


_PLAIN = (torch.Tensor, nn.Parameter)
