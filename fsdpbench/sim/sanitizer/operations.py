"""Operations that use memory: where the program launches them, and which bytes each of them touches."""

from __future__ import annotations

from typing import Any

import torch

from fsdpbench.sim.allocator.follower import Region
from fsdpbench.sim.sanitizer.clocks import HOST, Clocks
from fsdpbench.sim.sanitizer.device_memory import DeviceMemory, at
from fsdpbench.sim.sanitizer.forward_stacks import ForwardStacks
from fsdpbench.sim.sanitizer.operation import Operation, Stacks
from fsdpbench.sim.sanitizer.regions import region_of
from fsdpbench.sim.sanitizer.reporting.findings import Findings
from fsdpbench.sim.sanitizer.roles import Roles
from fsdpbench.sim.tensors.creation import is_on_device
from fsdpbench.sim.tensors.storage import Lent, record_of
from fsdpbench.torch_internals import current_graph_task_id


class Operations:
    """Makes operations and follows what they use.

    ``step``: steps of optimizers so far. ``scopes``: the profiler's spans that are open. ``count``: uses of
    memory that were followed.
    """

    def __init__(self, clocks: Clocks, device_memory: DeviceMemory, findings: Findings) -> None:
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
        """New work that is launched on a stream; ``skip``: frames between the caller and what launches."""
        stack = self.stacks.here(skip + 1)
        return self._placed(Operation(stream + 1, self.clocks.start(stream), name, stack))

    def on_host(self, name: str, skip: int = 1) -> Operation:
        """The CPU touches memory itself."""
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
        """An operation reads or writes a tensor of the device."""
        tensor = getattr(tensor, "_local_tensor", tensor)
        if not is_on_device(tensor):
            return
        region = region_of(tensor.shape, tensor.stride(), int(tensor.storage_offset()), tensor.element_size())
        if region is not None:
            self.touch(operation, tensor, region, writes)

    def touch(self, operation: Operation, tensor: torch.Tensor, region: Region, writes: bool) -> None:
        """An operation reads or writes a region of a tensor's."""
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
        self._touched = None  # one more reference would let autograd copy gradients

    def report(
        self, old: Operation, wrote: bool, new: Operation, writes: bool, shared: int, freed: bool
    ) -> None:
        """Two operations that share ``shared`` bytes are not ordered."""
        stacks = tuple(self._forward.stack_of(each.node) for each in (old, new))
        role = None if self._touched is None else self.roles.of(self._touched)
        self._findings.add(old, wrote, new, writes, shared, freed, stacks, role)
