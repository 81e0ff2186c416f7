"""Sanitizer that checks whether all uses of memory are ordered, and reports pairs of uses that are not.

A simulated run has one timing, a real GPU a different one each time. The sanitizer depends on neither: it
follows the synchronization that the program *requested*. If two operations use the same bytes and one writes,
launches, events, waits and synchronizations must order them; otherwise some timing breaks the program.

    kernels, copies, collectives ─> operations.py ─> shadow.py                 ─> findings.py
    events, waits, queries       ─> clocks           (who used these bytes?)      (what to report)

`Simulation.start(…, sanitize=True)` creates the sanitizer. Without it, none of this code runs.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch

from fsdpbench.base.torch_internals import set_is_profiler_enabled
from fsdpbench.sim.followers.sanitizer.findings import Findings, StreamNames, frames
from fsdpbench.sim.followers.sanitizer.operations import DeviceMemory, HostMemory, Operations
from fsdpbench.sim.followers.sanitizer.regions import uses_of
from fsdpbench.sim.followers.sanitizer.shadow import Clocks, Operation, Stack, Stacks
from fsdpbench.sim.model.allocator.types import AllocatorAction, AllocatorEvent, Block
from fsdpbench.sim.model.observed import Observer
from fsdpbench.sim.model.timeline import Marker
from fsdpbench.sim.torch_device.accelerator import Accelerator
from fsdpbench.sim.torch_device.followed import Region, Use
from fsdpbench.sim.torch_device.tensors import Lent, record_of


class _Order(Observer):
    """Observer that passes vector clocks along with markers, and follows bytes that change owners.

    Only guarantees that the program has count as order: recorded events, waits, synchronization, a query that
    returned True. The order of one communicator's kernels, a full launch queue, and blocks that the driver
    frees result from this timing alone and do not count (`tests/sim/sanitizer/test_order.py`).
    """

    def __init__(self, sanitizer: "Sanitizer") -> None:
        self._clocks = sanitizer.clocks
        self._memory = sanitizer.device_memory
        self._sanitizer = sanitizer
        self._note = sanitizer.synchronisations.note

    def stream_made(self, stream: int) -> None:
        self._sanitizer.stream_made(stream)

    def recorded(self, stream: int, marker: Marker) -> None:
        marker.clock = self._clocks.record(stream)

    def stream_waits(self, stream: int, marker: Marker, *, by_program: bool) -> None:
        if by_program and marker.stream != stream:
            self._note("wait", self._clocks.wait(stream, marker.clock))

    def asked(self, marker: Marker, passed: bool) -> None:
        if passed:
            self._note("query", self._clocks.wait_on_host(marker.clock))

    def host_waits(self, marker: Marker) -> None:
        self._note("synchronize", self._clocks.wait_on_host(marker.clock))

    def host_waits_for_all(self, *, by_program: bool) -> None:
        if by_program:
            self._note("synchronize", self._clocks.wait_for_all())

    def allocated(self, block: Block) -> None:
        self._memory.allocated(block.address, block.size)

    def frees(self, block: Block) -> None:
        self._memory.freed(block.address)
        if block.stream_uses:
            self._memory.events_recorded(block.address, block.size, block.stream_uses)

    def on_event(self, event: AllocatorEvent) -> None:
        """Order a freed block's bytes after its events have passed."""
        if event.action is AllocatorAction.FREE_COMPLETED:
            self._memory.events_passed(event.address)


class Sanitizer:
    """Sanitizer of one simulation, with `findings` and `to_dict`."""

    def __init__(self) -> None:
        self.clocks = Clocks()
        self.device_memory = DeviceMemory(self.clocks)
        self.stream_names = StreamNames()
        self.findings = Findings(self.stream_names)
        self.operations = Operations(self.clocks, self.device_memory, self.findings)
        self.host_memory = HostMemory(self.operations)
        self.synchronisations = Synchronisations(self.operations.stacks)
        self.order = _Order(self)
        self._collectives = CollectiveOrder()
        self._newest: Operation | None = None

    @property
    def accesses(self) -> int:
        """Return the number of recorded uses of memory."""
        return self.operations.count

    def begin(self, accelerator: Accelerator) -> None:
        """Start following. FSDP labels its work as if a profiler ran."""
        accelerator.listen(self.order.on_event)
        self.host_memory.mode.__enter__()
        set_is_profiler_enabled(True)

    def end(self) -> None:
        """Stop following."""
        self.host_memory.mode.__exit__(None, None, None)
        set_is_profiler_enabled(False)

    uses_of = staticmethod(uses_of)

    def kernel(
        self, stream: int, name: str, uses: Sequence[Use], tensors: list[Any], outputs: list[torch.Tensor]
    ) -> None:
        """Record an operator that is about to be launched: uses of its arguments, and its new outputs."""
        operation = self._newest = self.operations.launched(stream, name, skip=3)
        for index, region, writes in uses:
            self.operations.touch(operation, tensors[index], region, writes)
        for output in outputs:
            self.operations.use(operation, output, True)

    def workspaces(self, stream: int, blocks: Sequence[Any]) -> None:
        """Record that the newest kernel writes its workspaces."""
        operation = self._newest
        if operation is None:
            return
        for block in blocks:
            shadow = self.device_memory.shadow_of(block.address, block.size)
            region = Region(block.address, block.address + block.size)
            shadow.access(region, operation, True, self.clocks.of_stream(stream), self.operations.report)

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
        """Record a collective that is about to be queued. `awaited`: its caller must wait for its `Work`."""
        operation = self.operations.launched(stream, kind, skip=3)
        operation.collective = awaited
        self._collectives.note(self.operations.step, kind, group, inputs, outputs, operation.stack)
        written = {id(tensor) for tensor in outputs}
        for tensor in inputs:
            if id(tensor) not in written:
                self.operations.use(operation, tensor, False)
        for tensor in outputs:
            self.operations.use(operation, tensor, True)

    def host_copy(self, stream: int, kind: str, device: Any, host: Any, *, blocking: bool) -> None:
        """Record a host-link copy that is about to be queued. `blocking`: the CPU waits for the copy.

        `device` or `host` is None if there is no such tensor.
        """
        operation = self.operations.launched(stream, f"copy {kind}", skip=3)
        to_host = kind == "DtoH"
        if device is not None:
            self.operations.use(operation, device, not to_host)
        if host is not None:
            self.host_memory.touched_by_device(operation, host, writes=to_host, blocking=blocking)

    def host_reads(self, tensor: torch.Tensor, name: str) -> None:
        """Record a read of a host tensor without an operator of torch (`numpy`, `tolist`, saving)."""
        if not self.host_memory.is_empty:
            self.host_memory.touched_by_host(tensor, name, writes=False)

    def stream_made(self, stream: int, what: str = "") -> None:
        """Record a new stream, which the program created, or fsdpbench for the purpose `what`."""
        self.stream_names.made(stream, what or self.operations.stacks.here(2))

    def collective_passed(self, tensors: Sequence[torch.Tensor], marker: Marker) -> None:
        """Record that the process group found a collective complete and released its tensors. This orders
        their bytes, like the events of the allocator."""
        for tensor in tensors:
            record: Any = record_of(tensor.untyped_storage())
            block = None if record is None else record.block
            if block is not None and not isinstance(block, Lent):
                self.device_memory.shadow_of(block.address, block.size).forget_ordered(marker.clock)

    def host_waits_for_all(self) -> None:
        """Record that the CPU waits for the device."""
        self.synchronisations.note("synchronize", self.clocks.wait_for_all())

    def enter(self, scope: str) -> None:
        """Enter a profiler span."""
        self.operations.scopes = (*self.operations.scopes, scope)

    def leave(self, scope: str) -> None:
        """Leave a profiler span."""
        scopes = self.operations.scopes
        if scope in scopes:  # also remove inner spans that were never left
            self.operations.scopes = scopes[: len(scopes) - 1 - scopes[::-1].index(scope)]

    def step_ended(self, optimizer: torch.optim.Optimizer) -> None:
        """Record an optimizer's step."""
        self.operations.step += 1
        self.operations.roles.note(optimizer)
        self._collectives.step_ended()

    def to_dict(self) -> dict[str, object]:
        """Return the findings as the entry of `result.json`."""
        return {
            **self.findings.to_dict(),
            "hints": [*self.synchronisations.hints(), *self._collectives.hints()],
            "accesses": self.accesses,
            "queries_that_ordered": self.synchronisations.ordering_queries,
        }


_Call = tuple[str, str, int, int]


class CollectiveOrder:
    """Sequence of collectives in the running step, compared with the last similar step.

    Ranks that call collectives in different orders hang. One rank cannot show that, but if the order changes
    between steps of one rank (iteration over a set, hooks that fire as gradients arrive), it will some day
    differ between ranks.
    """

    def __init__(self) -> None:
        self._calls: list[_Call] = []
        self._stacks: list[Stack] = []
        # By multiset of calls: the order in which they were first called.
        self._known: dict[frozenset[tuple[_Call, int]], list[_Call]] = {}
        self._changes: list[dict[str, object]] = []

    def note(
        self, step: int, kind: str, group: Any, inputs: Sequence[Any], outputs: Sequence[Any], stack: Stack
    ) -> None:
        """Record a collective of the current `step`, called at `stack`."""
        sizes = (sum(t.numel() for t in inputs), sum(t.numel() for t in outputs))
        self._calls.append((kind, str(group), *sizes))
        self._stacks.append(stack)

    def step_ended(self) -> None:
        """End the step and compare its collectives."""
        calls, stacks = self._calls, self._stacks
        self._calls, self._stacks = [], []
        like = frozenset(Counter(calls).items())
        known = self._known.setdefault(like, calls)
        if known == calls or len(self._changes) >= 5:
            return
        index = next(i for i, (before, now) in enumerate(zip(known, calls, strict=True)) if before != now)
        self._changes.append(
            {
                "kind": "collective_order",
                "count": 1,
                "stack": frames(stacks[index]),
                "hint": f"call {index + 1} of the step is {_shown(calls[index])}, in an earlier step that "
                f"calls the same collectives it was {_shown(known[index])}: ranks whose orders differ hang",
            }
        )

    def hints(self) -> list[dict[str, object]]:
        """Return the differences in order, at most 5."""
        return list(self._changes)


def _shown(call: _Call) -> str:
    return f"{call[0]} of {call[2]} elements in group {call[1]}"


_MOST_HINTS = 20


class Synchronisations:
    """Counts of synchronizations by place, and of those that ordered any work."""

    def __init__(self, stacks: Stacks) -> None:
        self._stacks = stacks
        # By place: number of calls, and number of calls that ordered work.
        self._host: dict[Stack, list[int]] = {}
        self.ordering_queries = 0

    def note(self, kind: str, ordered: bool) -> None:
        """Record that a stream (`wait`) or the CPU (`synchronize`) waits, or that a `query` returned True."""
        if kind == "query":
            self.ordering_queries += ordered
        elif kind == "synchronize":
            counts = self._host.setdefault(self._stacks.here(3), [0, 0])
            counts[0] += 1
            counts[1] += ordered

    def hints(self) -> list[dict[str, object]]:
        """Return the places where the CPU waits without ordering anything, most frequent first."""
        useless = [(counts[0], stack) for stack, counts in self._host.items() if not counts[1]]
        useless.sort(key=lambda each: -each[0])
        return [
            {
                "kind": "needless_synchronisation",
                "count": count,
                "stack": frames(stack),
                "hint": "the CPU waits here for work that it already knows to be done; remove the call",
            }
            for count, stack in useless[:_MOST_HINTS]
        ]
