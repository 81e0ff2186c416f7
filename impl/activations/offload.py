"""Activation offload: what a block saves for backward waits in host memory.

::

    compute    | forward 1 | forward 2 | forward 3 | backward 3 | backward 2 | backward 1 |
    to host                [ 1 ........][ 2 .......]
    from host                                      [ 2 ........][ 1 ........]

After a block's forward its saved tensors are copied to pinned memory on a stream of their own; their memory
is free when the next block's forward ends. When backward comes to a block, those of the block before it
start their way back. The last block keeps its own: backward begins there.

The idea is that of `torch.autograd.graph.save_on_cpu`, which copies on the compute stream, and of torchtune's
and Megatron-LM's activation offloading, which copy beside it. Memory passes between streams by events alone
(`record_stream` would keep it until the allocator looks again): computation waits for the copy out before it
gets the memory, and the copy in goes into memory of computation.

Parameters and buffers stay where they are, as do tensors that need no gradient and come as arguments (masks,
tables: all blocks share them), small tensors, and tensors that wrap others.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from ..runtime.streams import HostLink
from ..shared.pytree import map_tensors
from ..shared.torch_internals import current_graph_task_id
from .groups import Group, Kept, Saved
from .host_memory import HostBuffers

LEAST_BYTES = 2**16
"""Smaller storages stay: starting a copy takes as long as the copy itself."""


def offload_activations(modules: Iterable[nn.Module], *, least_bytes: int = LEAST_BYTES) -> ActivationOffload:
    """Keep on the host what each of ``modules`` saves between its forward and its backward.

    Call it before the modules are wrapped by an FSDP, ours or torch's, with all blocks of a model together.
    Each module is to compute on one stream.

    Args:
        modules: the blocks; those of one call take turns.
        least_bytes: smaller storages stay on the device.

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
    """The activations of all blocks that were given to one ``offload_activations``."""

    def __init__(self, least_bytes: int) -> None:
        self.least_bytes = least_bytes
        self._buffers = HostBuffers()
        self._link: HostLink | None = None
        # Calls that have not returned; None: of which nothing is offloaded.
        self._open: list[tuple[_Call, saved_tensors_hooks] | None] = []
        # Groups that await their backward, in order; those whose graph was dropped are gone.
        self._waiting: list[weakref.ref[Group]] = []
        self._stored: Group | None = None
        self._fetching: Group | None = None
        self._calls = 0
        self._turn: int | None = None

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory that are in use or ready."""
        return self._buffers.nbytes

    # -- forward ---------------------------------------------------------------------------------------------

    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Hook before a block's forward."""
        if not torch.is_grad_enabled() or current_graph_task_id() != -1:  # nothing is saved; recomputed
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
        """Hook after a block's forward."""
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
                call.group.store(self.link)
                self._stored = call.group
        if before is not None:
            before.let_go(self.link)

    def _begin_iteration(self) -> None:
        self._settle()
        self._waiting.clear()
        self._calls = 0
        self._buffers.begin_iteration()

    @property
    def link(self) -> HostLink:
        """The streams of the copies; there are none before something was saved."""
        assert self._link is not None
        return self._link

    def new_group(self, device: torch.device) -> Group:
        """A group of tensors on ``device``."""
        if self._link is None:
            self._link = HostLink(device)
        return Group(device, self._buffers)

    # -- backward --------------------------------------------------------------------------------------------

    def unpack(self, saved: Saved | Kept) -> torch.Tensor:
        """What autograd saved, on the device."""
        if isinstance(saved, Kept):
            return saved.use()
        group, piece = saved.group, saved.piece
        if not group.entered:
            self._enter_backward(group)
        elif piece.device is None:  # a second backward through a kept graph
            piece.uses += 1
            group.fetch(self.link)
            group.arrive(self.link)
        return piece.use(saved.shape, saved.stride, saved.offset)

    def _enter_backward(self, group: Group) -> None:
        """Backward comes to a block: have what it saved, start the way back for the block before."""
        group.entered = True
        if self._calls:
            self._turn, self._calls = self._calls, 0
        link = self.link
        if self._fetching is not group:
            self._settle()
            group.fetch(link)
        group.arrive(link)
        self._fetching = None
        while self._waiting:
            before = self._waiting.pop()()
            if before is None or before is group or before.entered:
                continue
            before.fetch(link)
            self._fetching = before
            self._waiting.append(weakref.ref(before))
            break

    def _settle(self) -> None:
        """End what was started for a backward, or a forward, that did not come."""
        if self._stored is not None:
            self._stored.let_go(self.link)
        if self._fetching is not None:
            self._fetching.arrive(self.link)
        self._stored = self._fetching = None


class _Call:
    """One call of a block: which of its saved tensors are offloaded."""

    def __init__(self, offload: ActivationOffload, module: nn.Module, inputs: Any) -> None:
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
        """What autograd is to save for ``tensor``."""
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
