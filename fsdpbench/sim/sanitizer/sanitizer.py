"""The sanitizer: proves that every use of memory is ordered, or names the two uses that are not.

A simulated run shows one timing, a real GPU another every time. The sanitizer looks at neither: it follows
what the program *asked for*. Two uses of the same bytes, one of them a write, need a chain of launches,
events, waits and synchronisations between them; where there is none, some timing on some GPU breaks it.

    kernels, copies, collectives ─> Operation ─> device_memory.py, host_memory.py ─> findings.py
    events, waits, queries       ─> clocks.py         (who touched these bytes?)      (what to report)

`Simulation.start(…, sanitize=True)` makes one. Without it nothing of this is there: timeline and allocator
are the plain classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fsdpbench.sim.allocator.follower import Region, Use
from fsdpbench.sim.sanitizer.clocks import HOST, Clocks
from fsdpbench.sim.sanitizer.collective_order import CollectiveOrder
from fsdpbench.sim.sanitizer.device_memory import DeviceMemory, at
from fsdpbench.sim.sanitizer.findings import Findings
from fsdpbench.sim.sanitizer.forward_stacks import ForwardStacks
from fsdpbench.sim.sanitizer.host_memory import HostMemory
from fsdpbench.sim.sanitizer.operation import Operation, Stacks
from fsdpbench.sim.sanitizer.regions import region_of
from fsdpbench.sim.sanitizer.roles import Roles
from fsdpbench.sim.sanitizer.stream_names import StreamNames
from fsdpbench.sim.sanitizer.synchronisations import Synchronisations
from fsdpbench.sim.sanitizer.uses import uses_of
from fsdpbench.sim.tensors.creation import is_on_device
from fsdpbench.sim.tensors.storage import Lent, record_of
from fsdpbench.sim.timing.timeline import Marker
from fsdpbench.torch_internals import current_graph_task_id, set_is_profiler_enabled


class Sanitizer:
    """Follows one simulation. ``findings`` and ``to_dict`` say what it found."""

    def __init__(self) -> None:
        self.clocks = Clocks()
        self.device_memory = DeviceMemory(self.clocks)
        self.stream_names = StreamNames()
        self.findings = Findings(self.stream_names)
        self.host_memory = HostMemory(self)
        self.step = 0
        """Steps of optimizers so far."""
        self.accesses = 0
        """Uses of memory that were followed."""
        self._stacks = Stacks()
        self._forward = ForwardStacks()
        self._scopes: tuple[str, ...] = ()
        self._synchronisations = Synchronisations(self._stacks)
        self._collectives = CollectiveOrder()
        self._newest: Operation | None = None
        self._roles = Roles()
        self._touched: torch.Tensor | None = None

    def begin(self) -> None:
        """Follow from now on. FSDP labels its work as for a profiler."""
        self.host_memory.mode.__enter__()
        set_is_profiler_enabled(True)

    def end(self) -> None:
        """Follow no more."""
        self.host_memory.mode.__exit__(None, None, None)
        set_is_profiler_enabled(False)

    # ------------------------------------------------------------------------------------------ what is done

    def uses_of(self, operator: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Use, ...]:
        """What a call reads and writes, found out once for each plan."""
        return uses_of(operator, args, kwargs)

    def operation(self, stream: int, name: str, skip: int = 1) -> Operation:
        """New work that is launched on a stream; ``skip``: frames between the caller and what launches."""
        stack = self._stacks.here(skip + 1)
        return self._placed(Operation(stream + 1, self.clocks.start(stream), name, stack))

    def host_operation(self, name: str, skip: int = 1) -> Operation:
        """The CPU touches memory itself."""
        stack = self._stacks.here(skip + 1)
        return self._placed(Operation(HOST, self.clocks.start_on_host(), name, stack))

    def _placed(self, operation: Operation) -> Operation:
        operation.scopes = self._scopes
        operation.step = self.step
        if current_graph_task_id() == -1:
            self._forward.note(operation.stack)
        else:
            operation.in_backward = True
            operation.node = self._forward.current_node(operation)
        return operation

    def kernel(
        self, stream: int, name: str, uses: Sequence[Use], tensors: list[Any], outputs: list[torch.Tensor]
    ) -> None:
        """An operator is about to be launched: its arguments, and new tensors that it returns."""
        operation = self._newest = self.operation(stream, name, skip=3)
        for index, region, writes in uses:
            self._touch(operation, tensors[index], region, writes)
        for output in outputs:
            self.use(operation, output, True)

    def workspaces(self, stream: int, blocks: Sequence[Any]) -> None:
        """The newest kernel writes memory of its own."""
        operation = self._newest
        if operation is None:
            return
        for block in blocks:
            shadow = self.device_memory.shadow_of(block.address, block.size)
            region = Region(block.address, block.address + block.size)
            shadow.access(region, operation, True, self.clocks.of_stream(stream), self._report)

    def collective(
        self,
        stream: int,
        kind: str,
        inputs: Sequence[Any],
        outputs: Sequence[Any],
        *,
        awaited: bool,
        group: Any,
    ) -> None:
        """A collective is about to be queued; ``awaited``: its caller has to wait for its work."""
        operation = self.operation(stream, kind, skip=3)
        operation.collective = awaited
        self._collectives.note(self.step, kind, group, inputs, outputs, operation.stack)
        written = {id(tensor) for tensor in outputs}
        for tensor in inputs:
            if id(tensor) not in written:
                self.use(operation, tensor, False)
        for tensor in outputs:
            self.use(operation, tensor, True)

    def host_copy(self, stream: int, kind: str, device: Any, host: Any, *, blocking: bool) -> None:
        """A copy over the host link is about to be queued; tensors that do not exist as such are None.
        ``blocking``: the CPU waits for it."""
        operation = self.operation(stream, f"copy {kind}", skip=3)
        to_host = kind == "DtoH"
        if device is not None:
            self.use(operation, device, not to_host)
        if host is not None:
            self.host_memory.touched_by_device(operation, host, writes=to_host, blocking=blocking)

    def use(self, operation: Operation, tensor: torch.Tensor, writes: bool) -> None:
        """An operation reads or writes a tensor of the device."""
        tensor = getattr(tensor, "_local_tensor", tensor)
        if not is_on_device(tensor):
            return
        region = region_of(tensor.shape, tensor.stride(), int(tensor.storage_offset()), tensor.element_size())
        if region is not None:
            self._touch(operation, tensor, region, writes)

    def _touch(self, operation: Operation, tensor: torch.Tensor, region: Region, writes: bool) -> None:
        record: Any = record_of(tensor.untyped_storage())
        block, offset = (None, 0) if record is None else (record.block, 0)
        while isinstance(block, Lent):
            offset += block.offset
            lender: Any = None if block.lender is None else record_of(block.lender)
            block = None if lender is None else lender.block
        if block is None:
            return
        self.accesses += 1
        self._touched = tensor
        shadow = self.device_memory.shadow_of(block.address, block.size)
        clock = self.clocks.of_stream(operation.agent - 1)
        shadow.access(at(block.address + offset, region), operation, writes, clock, self._report)
        self._touched = None  # one more reference would let autograd copy gradients

    def _report(
        self, old: Operation, wrote: bool, new: Operation, writes: bool, shared: int, freed: bool
    ) -> None:
        stacks = tuple(self._forward.stack_of(each.node) for each in (old, new))
        role = None if self._touched is None else self._roles.of(self._touched)
        self.findings.add(old, wrote, new, writes, shared, freed, stacks, role)

    def host_reads(self, tensor: torch.Tensor, name: str) -> None:
        """Python reads a tensor of the host past torch's operators (`numpy`, `tolist`, saving)."""
        if not self.host_memory.is_empty:
            self.host_memory.touched_by_host(tensor, name, writes=False)

    def report_on_host(self, old: Operation, wrote: bool, new: Operation, writes: bool, shared: int) -> None:
        """Two accesses to a tensor of the host, one of them by the device, are not ordered."""
        self._report(old, wrote, new, writes, shared, False)

    def stream_made(self, stream: int, what: str = "") -> None:
        """A stream was made: by the program, or for ``what``."""
        self.stream_names.made(stream, what or self._stacks.here(2))

    # ---------------------------------------------------------------------------------------- what orders it

    def collective_passed(self, tensors: Sequence[torch.Tensor], marker: Marker) -> None:
        """The process group has seen that a collective is done, and lets its tensors go: that orders their
        bytes, as the events that the allocator sees."""
        for tensor in tensors:
            record: Any = record_of(tensor.untyped_storage())
            block = None if record is None else record.block
            if block is not None and not isinstance(block, Lent):
                self.device_memory.shadow_of(block.address, block.size).forget_ordered(marker.clock)

    def stream_waits(self, stream: int, marker: Marker) -> None:
        """A stream waits for an event."""
        if marker.stream != stream:
            self._synchronisations.note("wait", self.clocks.wait(stream, marker.clock))

    def host_waits(self, marker: Marker) -> None:
        """The CPU waits for an event."""
        self._synchronisations.note("synchronize", self.clocks.wait_on_host(marker.clock))

    def host_waits_for_all(self) -> None:
        """The CPU waits for the device."""
        self._synchronisations.note("synchronize", self.clocks.wait_for_all())

    def query_was_true(self, marker: Marker) -> None:
        """The program asked whether an event has passed, and it had."""
        self._synchronisations.note("query", self.clocks.wait_on_host(marker.clock))

    # --------------------------------------------------------------------------------- where the program is

    def enter(self, scope: str) -> None:
        """A span of the profiler begins."""
        self._scopes = (*self._scopes, scope)

    def leave(self, scope: str) -> None:
        """A span of the profiler ends."""
        if scope in self._scopes:  # with those inside it that were never left
            last = len(self._scopes) - 1 - self._scopes[::-1].index(scope)
            self._scopes = self._scopes[:last]

    def step_ended(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer has made a step."""
        self.step += 1
        self._roles.note(optimizer)
        self._collectives.step_ended()

    def to_dict(self) -> dict[str, Any]:
        """What was found, as ``result.json`` holds it."""
        return {
            **self.findings.to_dict(),
            "hints": [*self._synchronisations.hints(), *self._collectives.hints()],
            "accesses": self.accesses,
            "queries_that_ordered": self._synchronisations.ordering_queries,
        }
