"""Data races on the simulated device: two uses of the same memory, one of them a write, that nothing orders.

What a program *did* on one run of a real GPU says little about races; here the order that it *asked for* is
followed. Every stream, and the CPU, has a vector clock: how much of each other's work is done for certain
when its next work starts. Events and synchronisations pass clocks on::

    compute   [optimizer writes a] (e)
    gather                          wait(e) [all-gather reads a]      ordered: no race, whatever the times

Memory is followed by its address, so that a block which is handed out again while somebody still uses it is
found too.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

HOST = -1
"""The CPU, among the numbers of streams."""

_Clock = dict[int, int]


@dataclass
class _Access:
    start: int
    end: int
    agent: int
    count: int
    writes: bool
    what: str

    def __str__(self) -> str:
        return f"{self.what} ({'writes' if self.writes else 'reads'}, stream {self.agent})"


class RaceFinder(TorchDispatchMode):
    """Follows all work on the device and on the host; ``races`` tells what it found, one line each."""

    def __init__(self) -> None:
        super().__init__()
        self.races: list[str] = []
        self.seen = 0
        """How many uses of memory were followed."""
        self._in_communicator = False
        """Collectives of one communicator run one after another; nobody should rely on that."""
        self._clocks: dict[int, _Clock] = {HOST: {}}
        self._marks: dict[int, tuple[Any, _Clock]] = {}
        self._accesses: dict[str, list[_Access]] = {"cpu": [], "sim": []}

    # -- clocks ----------------------------------------------------------------------------------------------

    def clock(self, agent: int) -> _Clock:
        return self._clocks.setdefault(agent, {})

    def join(self, agent: int, other: _Clock) -> None:
        mine = self.clock(agent)
        for each, count in other.items():
            mine[each] = max(mine.get(each, 0), count)

    def advance(self, agent: int) -> None:
        """The agent starts new work; what the CPU knows to be done when it launches is done."""
        if agent != HOST:
            self.join(agent, self.clock(HOST))
        mine = self.clock(agent)
        mine[agent] = mine.get(agent, 0) + 1

    def at(self, marker: Any) -> _Clock:
        """The clock at a marker; one from before this finder orders nothing that it saw."""
        return self._marks[id(marker)][1] if id(marker) in self._marks else {}

    def follow(self, timeline: Any) -> None:
        """See everything that orders work on ``timeline``."""
        launch, record, make_wait = timeline.launch, timeline.record, timeline.make_wait
        wait_for, wait_for_all, has_passed = timeline.wait_for, timeline.wait_for_all, timeline.has_passed

        def on_launch(stream: int, *arguments: Any, **named: Any) -> None:
            self.advance(stream)
            launch(stream, *arguments, **named)

        def on_record(stream: int) -> Any:
            marker = record(stream)
            self.join(stream, self.clock(HOST))
            self._marks[id(marker)] = (marker, dict(self.clock(stream)))
            return marker

        def on_make_wait(stream: int, marker: Any, payload: Any = None) -> None:
            if not self._in_communicator:
                self.join(stream, self.at(marker))
            make_wait(stream, marker, payload)

        def on_wait_for(marker: Any) -> None:
            wait_for(marker)
            self.join(HOST, self.at(marker))

        def on_wait_for_all() -> None:
            wait_for_all()
            for clock in list(self._clocks.values()):
                self.join(HOST, clock)

        def on_has_passed(marker: Any) -> bool:
            if passed := has_passed(marker):
                self.join(HOST, self.at(marker))
            return passed

        timeline.launch, timeline.record, timeline.make_wait = on_launch, on_record, on_make_wait
        timeline.wait_for, timeline.wait_for_all = on_wait_for, on_wait_for_all
        timeline.has_passed = on_has_passed

    def follow_memory(self, allocator: Any) -> None:
        """See which streams ``record_stream`` keeps a block for: they are done when it is reused."""
        record_events, event_passed = allocator._record_events, allocator._event_passed
        kept_for: dict[int, set[int]] = {}

        def on_record_events(block: Any) -> None:
            kept_for[block.address] = set(block.stream_uses)
            record_events(block)

        def on_event_passed(block: Any) -> None:
            start, end = block.address, block.address + block.size
            event_passed(block)
            if block.event_count == 0:
                streams = kept_for.pop(start, set())
                self._accesses["sim"] = [
                    a
                    for a in self._accesses["sim"]
                    if not (a.agent in streams and start <= a.start and a.end <= end)
                ]

        allocator._record_events, allocator._event_passed = on_record_events, on_event_passed

    # -- memory ----------------------------------------------------------------------------------------------

    def use(self, agent: int, tensor: torch.Tensor, writes: bool, what: str) -> None:
        """``agent``'s newest work reads or writes ``tensor``."""
        from fsdpbench.sim.storage import address

        if tensor.numel() == 0 or tensor.device.type not in self._accesses:
            return
        storage = tensor.untyped_storage()
        base = address(storage)
        if base is None:
            base = storage.data_ptr()
        if not base:
            return
        self.seen += 1
        start = base + tensor.storage_offset() * tensor.itemsize
        extent = 1 + sum(
            (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
        )
        new = _Access(start, start + extent * tensor.itemsize, agent, self.clock(agent)[agent], writes, what)
        self._meet(self._accesses[tensor.device.type], new)

    def _meet(self, accesses: list[_Access], new: _Access) -> None:
        clock, kept = self.clock(new.agent), []
        for old in accesses:
            overlaps = old.start < new.end and new.start < old.end
            if not overlaps:
                kept.append(old)
                continue
            ordered = clock.get(old.agent, 0) >= old.count
            if not ordered and (old.writes or new.writes):
                self.races.append(f"{new} does not wait for {old}")
            if not (
                ordered and (new.writes or not old.writes) and new.start <= old.start and old.end <= new.end
            ):
                kept.append(old)
        kept.append(new)
        accesses[:] = kept

    # -- operators and collectives ---------------------------------------------------------------------------

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        from fsdpbench.sim.accelerator import ACCELERATOR

        kwargs = kwargs or {}
        stream = ACCELERATOR.stream
        before = self.clock(stream).get(stream, 0)
        result = function(*args, **kwargs)
        agent = stream if self.clock(stream).get(stream, 0) > before else HOST
        if agent == HOST:
            if function.is_view or any(t.device.type != "cpu" for t in _tensors((args, kwargs, result))):
                return result  # nothing was launched: a view, or a question about shapes
            self.advance(HOST)
        what = str(function)
        schema = function._schema.arguments
        given = [(info, kwargs[info.name]) for info in schema if info.name in kwargs]
        given += list(zip(schema, args, strict=False))
        passed = set()
        for info, value in given:
            writes = info.alias_info is not None and info.alias_info.is_write
            for tensor in _tensors(value):
                passed.add(id(tensor))
                self.use(agent, tensor, writes, what)
        for tensor in _tensors(result):
            if id(tensor) not in passed:
                self.use(agent, tensor, True, what)
        return result

    def collective(self, stream: int, kind: str, inputs: list[Any], outputs: list[Any]) -> None:
        """A collective was queued on ``stream``."""
        for tensor in inputs:
            self.use(stream, tensor, False, kind)
        for tensor in outputs:
            self.use(stream, tensor, True, kind)


def _tensors(value: Any) -> list[torch.Tensor]:
    found = [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
    return [tensor._local_tensor if isinstance(tensor, DTensor) else tensor for tensor in found]


@contextmanager
def races_found() -> Iterator[RaceFinder]:
    """Follow what is done inside, on a simulation that was started."""
    from fsdpbench.sim.accelerator import ACCELERATOR
    from fsdpbench.sim.process_group import SimProcessGroup

    torch.sim.synchronize()
    finder = RaceFinder()
    finder.follow(ACCELERATOR.timeline)
    finder.follow_memory(ACCELERATOR.allocator)
    queue = SimProcessGroup._queue

    def on_queue(
        self: Any, stream: int, kind: str, nbytes: int, inputs: Any, outputs: Any, *rest: Any
    ) -> None:
        finder._in_communicator = True
        queue(self, stream, kind, nbytes, inputs, outputs, *rest)
        finder._in_communicator = False
        finder.collective(stream, kind, inputs, outputs)

    SimProcessGroup._queue = on_queue  # type: ignore[method-assign]
    try:
        with finder:
            yield finder
            torch.sim.synchronize()
    finally:
        SimProcessGroup._queue = queue  # type: ignore[method-assign]
        for name in ("launch", "record", "make_wait", "wait_for", "wait_for_all", "has_passed"):
            delattr(ACCELERATOR.timeline, name)
        for name in ("_record_events", "_event_passed"):
            delattr(ACCELERATOR.allocator, name)
