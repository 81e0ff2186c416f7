"""Operations that access memory, with their place in the program and the bytes that they use."""

import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from fsdpbench.base.torch_internals import (
    TorchDispatchMode,
    current_autograd_node,
    current_graph_task_id,
    get_sequence_nr,
    tree_leaves,
    tree_map_only,
)
from fsdpbench.sim.followers.sanitizer.findings import Findings
from fsdpbench.sim.followers.sanitizer.regions import host_uses, region_of
from fsdpbench.sim.followers.sanitizer.shadow import (
    HOST,
    BlockShadow,
    Clock,
    Clocks,
    FreedMemory,
    Operation,
    Stack,
    Stacks,
    join,
)
from fsdpbench.sim.torch_device.followed import Region
from fsdpbench.sim.torch_device.tensors import Lent, is_on_device, record_of, with_memory


class Operations:
    """Factory of operations, and recorder of their memory uses.

    `step`: optimizer steps so far. `scopes`: open profiler spans. `count`: recorded uses of memory.
    """

    def __init__(self, clocks: Clocks, device_memory: "DeviceMemory", findings: Findings) -> None:
        self.stacks = Stacks()
        self.roles = Roles()
        self.scopes: tuple[str, ...] = ()
        self.step = self.count = 0
        self.clocks = clocks
        self._device_memory = device_memory
        self._findings = findings
        self._forward = ForwardStacks()
        self._touched: torch.Tensor | None = None

    def launched(self, stream: int, name: str, skip: int = 1) -> Operation:
        """Return new work launched on a stream. `skip`: frames between the caller and the launch."""
        stack = self.stacks.here(skip + 1)
        return self._placed(Operation(stream + 1, self.clocks.start(stream), name, stack))

    def on_host(self, name: str, skip: int = 1) -> Operation:
        """Return an access by the CPU."""
        stack = self.stacks.here(skip + 1)
        return self._placed(Operation(HOST, self.clocks.start_on_host(), name, stack))

    def _placed(self, operation: Operation) -> Operation:
        operation.scopes = self.scopes
        operation.step = self.step
        if current_graph_task_id() == -1:
            self._forward.note(operation.stack)
        else:
            operation.in_backward = True
            operation.node = self._forward.current_node(operation)
        return operation

    def use(self, operation: Operation, tensor: torch.Tensor, writes: bool) -> None:
        """Record that an operation reads or writes a tensor of the device."""
        tensor = getattr(tensor, "_local_tensor", tensor)
        if not is_on_device(tensor):
            return
        region = region_of(tensor.shape, tensor.stride(), int(tensor.storage_offset()), tensor.element_size())
        if region is not None:
            self.touch(operation, tensor, region, writes)

    def touch(self, operation: Operation, tensor: torch.Tensor, region: Region, writes: bool) -> None:
        """Record that an operation reads or writes a region of a tensor."""
        record: Any = record_of(tensor.untyped_storage())
        block, offset = (None, 0) if record is None else (record.block, 0)
        while isinstance(block, Lent):
            offset += block.offset
            lender: Any = None if block.lender is None else record_of(block.lender)
            block = None if lender is None else lender.block
        if block is None:
            return
        self.count += 1
        self._touched = tensor
        shadow = self._device_memory.shadow_of(block.address, block.size)
        clock = self.clocks.of_stream(operation.agent - 1)
        shadow.access(at(block.address + offset, region), operation, writes, clock, self.report)
        self._touched = None  # another reference would make autograd copy gradients

    def report(
        self, old: Operation, wrote: bool, new: Operation, writes: bool, shared: int, freed: bool
    ) -> None:
        """Report two unordered operations that share `shared` bytes."""
        stacks = tuple(self._forward.stack_of(each.node) for each in (old, new))
        role = None if self._touched is None else self.roles.of(self._touched)
        self._findings.add(old, wrote, new, writes, shared, freed, stacks, role)


class Roles:
    """Optimizers that have stepped, from which the role of a tensor's memory is looked up."""

    def __init__(self) -> None:
        self._optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()

    def note(self, optimizer: torch.optim.Optimizer) -> None:
        """Record that an optimizer stepped."""
        self._optimizers.add(optimizer)

    def of(self, tensor: torch.Tensor) -> str | None:
        """Return the role of a tensor's memory in an optimizer and the shape of the parameter, or None."""
        wanted = tensor.untyped_storage().data_ptr()
        if not wanted:
            return None
        for optimizer in self._optimizers:
            for parameter, name, value in _tensors(optimizer):
                if value.device == tensor.device and value.untyped_storage().data_ptr() == wanted:
                    return f"{name} ({' x '.join(map(str, parameter.shape)) or 'scalar'})"
        return None


def _tensors(optimizer: torch.optim.Optimizer) -> Iterator[tuple[torch.Tensor, str, torch.Tensor]]:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            named = [("parameter", parameter), ("gradient", parameter.grad)]
            named += [
                (f"optimizer state {name}", each) for name, each in optimizer.state.get(parameter, {}).items()
            ]
            for name, value in named:
                if isinstance(value, torch.Tensor):
                    for part in with_memory(value):
                        yield parameter, name, part


_MOST = 1 << 18
_ACCUMULATES = 1 << 62
"""Autograd nodes that accumulate gradients have numbers from here on."""


class ForwardStacks:
    """Stacks of the newest forward operators that created autograd nodes, by autograd's sequence number.

    A backward node has the number of its forward operator, whose Python stack is more informative.
    """

    def __init__(self) -> None:
        self._next = get_sequence_nr()
        self._stacks: dict[int, Stack] = {}

    def note(self, stack: Stack) -> None:
        """Assign `stack` to the nodes created since the last call."""
        following = get_sequence_nr()
        for number in range(max(self._next, following - 8), following):
            self._stacks[number] = stack
        self._next = following
        if len(self._stacks) > _MOST:
            for number in list(self._stacks)[: _MOST // 2]:
                del self._stacks[number]

    def current_node(self, operation: Operation) -> int:
        """Return the sequence number of the running backward node; -1 outside backward."""
        node = current_autograd_node()
        if node is None:
            return -1
        number: int = node._sequence_nr()
        if get_sequence_nr() != self._next:  # activation checkpointing ran a forward inside backward
            self.note(operation.stack)
        return number if number < _ACCUMULATES else -1

    def stack_of(self, node: int) -> Stack | None:
        """Return the stack of the forward operator that created a node, if known."""
        return self._stacks.get(node)


class DeviceMemory:
    """Access histories of the allocator's blocks. `clocks` decide what is ordered."""

    def __init__(self, clocks: Clocks) -> None:
        self._clocks = clocks
        self._blocks: dict[int, BlockShadow] = {}
        self._freed = FreedMemory()
        # Freed blocks whose events have not passed: size, and the clock that the events give.
        self._released: dict[int, tuple[int, Clock]] = {}

    def allocated(self, address: int, size: int) -> None:
        """Start a block's history: earlier uses of its bytes must be ordered before its first use."""
        self._blocks[address] = BlockShadow(
            address, address + size, self._freed.take(address, address + size)
        )

    def freed(self, address: int) -> None:
        """End a block's history; its bytes may be allocated again immediately."""
        shadow = self._blocks.pop(address, None)
        if shadow is not None and (shadow.cells or shadow.strided):
            self._freed.add(shadow.leave(self._clocks.host))

    def events_recorded(self, address: int, size: int, streams: Iterable[int]) -> None:
        """Record a freed block's events on other streams. They order only this block's bytes."""
        order: Clock = []
        for stream in streams:
            join(order, self._clocks.record(stream))
        self._released[address] = (size, order)

    def events_passed(self, address: int) -> None:
        """Record that the last of a freed block's events, if any, has passed."""
        released = self._released.pop(address, None)
        if released is not None:
            size, order = released
            self._freed.forget_ordered(address, address + size, order)

    def shadow_of(self, address: int, size: int) -> BlockShadow:
        """Return the history of an allocated block."""
        shadow = self._blocks.get(address)
        if shadow is None:
            shadow = self._blocks[address] = BlockShadow(address, address + size)
        return shadow


def at(address: int, region: Region) -> Region:
    """Return a region of a storage as a region of addresses."""
    return Region(address + region.start, address + region.end, region.runs)


class HostMemory:
    """Access histories of host tensors that copies read or write, to find uses before the copy has ended.

    Only pinned memory is at risk: copies of pageable memory block the CPU. Once a copy has used host memory,
    a dispatch mode observes the CPU's own operators; patches report `numpy`, `tolist` and saving.
    """

    def __init__(self, operations: Operations) -> None:
        self._operations = operations
        self._shadows: dict[int, BlockShadow] = {}
        self._watch: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self.mode = _HostAccesses(self)

    @property
    def is_empty(self) -> bool:
        """Return whether no copy has used host memory so far."""
        return not self._shadows

    def touched_by_device(
        self, operation: Operation, tensor: torch.Tensor, *, writes: bool, blocking: bool
    ) -> None:
        """Record that a copy reads or writes a host tensor.

        A `blocking` copy is ordered before all that follows, but not necessarily after earlier copies.
        """
        storage = tensor.untyped_storage()
        base = storage.data_ptr()
        if not base or (blocking and base not in self._shadows):
            return
        if base not in self._shadows:
            self._shadows[base] = BlockShadow(base, base + storage.nbytes())
            self._watch[base] = weakref.ref(storage, lambda _: self._forget(base))
        self._access(operation, tensor, base, writes)

    def touched_by_host(self, tensor: torch.Tensor, name: str, *, writes: bool) -> None:
        """Record that the CPU reads or writes a tensor, if a copy has used its memory."""
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
    """Dispatch mode that observes the CPU's own operators."""

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


def _crosses_the_link(args: Any, kwargs: Mapping[str, Any]) -> bool:
    """Return whether a call is a copy between host and device, which is reported elsewhere.

    A blocking copy that converts the dtype converts on the host, which is a read by the CPU.
    """
    if any(isinstance(each, torch.Tensor) and each.device.type != "cpu" for each in tree_leaves(args)):
        return True
    device = kwargs.get("device")
    converts = kwargs.get("dtype") is not None and not kwargs.get("non_blocking")
    return device is not None and torch.device(device).type != "cpu" and not converts
