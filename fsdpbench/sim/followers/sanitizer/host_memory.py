"""Tensors of the host that the device copies to and from: who touches them before the copy is done.

Only pinned memory is in danger: copies of pageable memory hold the CPU. The CPU's own operators are seen by a
dispatch mode, which looks at tensors only once a copy has touched host memory; `numpy`, `tolist` and saving
are reported by their patches.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from fsdpbench.sim.followers.sanitizer.operations import Operations, at
from fsdpbench.sim.followers.sanitizer.regions import region_of
from fsdpbench.sim.followers.sanitizer.shadow import BlockShadow, Operation
from fsdpbench.sim.followers.sanitizer.uses import host_uses
from fsdpbench.sim.torch_device.pinned import with_memory
from fsdpbench.torch_internals import TorchDispatchMode, tree_leaves, tree_map_only


class HostMemory:
    """The shadow of host tensors that copies have touched."""

    def __init__(self, operations: Operations) -> None:
        self._operations = operations
        self._shadows: dict[int, BlockShadow] = {}
        self._watch: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self.mode = _HostAccesses(self)

    @property
    def is_empty(self) -> bool:
        """Whether no copy has touched memory of the host so far."""
        return not self._shadows

    def touched_by_device(
        self, operation: Operation, tensor: torch.Tensor, *, writes: bool, blocking: bool
    ) -> None:
        """A copy reads or writes a host tensor. One that the CPU waits for (``blocking``) endangers nothing
        that comes after it, but may not be ordered after copies before it."""
        storage = tensor.untyped_storage()
        base = storage.data_ptr()
        if not base or (blocking and base not in self._shadows):
            return
        if base not in self._shadows:
            self._shadows[base] = BlockShadow(base, base + storage.nbytes())
            self._watch[base] = weakref.ref(storage, lambda _: self._forget(base))
        self._access(operation, tensor, base, writes)

    def touched_by_host(self, tensor: torch.Tensor, name: str, *, writes: bool) -> None:
        """The CPU reads or writes a tensor, if copies have touched its memory."""
        for part in with_memory(tensor):
            if part.device.type != "cpu":
                continue
            base = part.untyped_storage().data_ptr()
            if base in self._shadows:
                self._access(self._operations.on_host(name, skip=3), part, base, writes)

    def _access(self, operation: Operation, tensor: torch.Tensor, base: int, writes: bool) -> None:
        region = region_of(tensor.shape, tensor.stride(), int(tensor.storage_offset()), tensor.element_size())
        if region is None:
            return
        clocks = self._operations.clocks
        clock = clocks.of_stream(operation.agent - 1) if operation.agent else clocks.host
        self._shadows[base].access(at(base, region), operation, writes, clock, self._operations.report)

    def _forget(self, base: int) -> None:
        self._shadows.pop(base, None)
        self._watch.pop(base, None)


class _HostAccesses(TorchDispatchMode):
    """Sees the CPU's own operators."""

    supports_higher_order_operators = True

    def __init__(self, memory: HostMemory) -> None:
        super().__init__()
        self._memory = memory

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        memory = self._memory
        if memory.is_empty or getattr(function, "is_view", True):
            return function(*args, **kwargs)
        seen, named = args, kwargs
        if any(issubclass(kind, DTensor) for kind in types):
            seen, named = tree_map_only(DTensor, lambda each: each._local_tensor, (args, kwargs))
        touched = list(host_uses(function, seen, named))
        if touched and not _crosses_the_link(seen, named):
            for tensor, writes in touched:
                memory.touched_by_host(tensor, function._schema.name, writes=writes)
        return function(*args, **kwargs)


def _crosses_the_link(args: Any, kwargs: dict[str, Any]) -> bool:
    """Copies between host and device are reported by the copy itself. One that waits and converts, converts
    on the host: that is a read of the CPU's."""
    if any(isinstance(each, torch.Tensor) and each.device.type != "cpu" for each in tree_leaves(args)):
        return True
    device = kwargs.get("device")
    converts = kwargs.get("dtype") is not None and not kwargs.get("non_blocking")
    return device is not None and torch.device(device).type != "cpu" and not converts
