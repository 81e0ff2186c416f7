"""Drawn programs on streams, events and memory: something is found exactly where there is a race."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.simulated

STREAMS, SLOTS, EVENTS = 3, 3, 3
ROWS, COLUMNS = 8, 1 << 16  # 2 MiB: blocks of the large pool
PARTS = 4  # of the columns


class Program:
    """Runs drawn actions on the simulated device and tells the graph the same."""

    def __init__(self, seed: int) -> None:
        from happens_before import HappensBefore
        from sanitized import start

        self.sanitizer = start()
        self.draw = random.Random(seed)
        self.graph = HappensBefore()
        self.streams: list[Any] = [torch.sim.Stream() for _ in range(STREAMS)]
        self.scratch = [torch.zeros(ROWS, COLUMNS, device="sim") for _ in range(STREAMS)]
        torch.sim.synchronize()
        self.events: dict[int, tuple[Any, int]] = {}
        # By slot: the tensor, its owner, the streams of `record_stream`.
        self.slots: dict[int, tuple[torch.Tensor, int, set[int]]] = {}
        self.owners = 0
        self.allocated_on: dict[int, int] = {}
        self.told: list[str] = []

    def run(self, actions: int) -> None:
        for _ in range(actions):
            kind = self.draw.choices(
                ["use", "allocate", "free", "record", "wait", "wait_stream", "keep", "host", "query"],
                [14, 3, 2, 3, 3, 3, 1, 1, 1],
            )[0]
            getattr(self, kind)()

    def stream(self) -> int:
        return self.draw.randrange(STREAMS)

    def use(self) -> None:
        if not self.slots:
            return
        slot, stream, writes = self.draw.choice(sorted(self.slots)), self.stream(), self.draw.random() < 0.5
        tensor, owner, _ = self.slots[slot]
        top, left = self.draw.randrange(ROWS), self.draw.randrange(PARTS)
        bottom, right = self.draw.randint(top + 1, ROWS), self.draw.randint(left + 1, PARTS)
        width = COLUMNS // PARTS
        view = tensor[top:bottom, left * width : right * width]
        with torch.sim.stream(self.streams[stream]):
            if writes:
                view.zero_()
            else:
                rows, columns = view.shape
                torch.neg(view, out=self.scratch[stream][:rows, :columns])
        base, row = tensor.data_ptr(), COLUMNS * 4
        intervals = tuple(
            (base + index * row + left * width * 4, base + index * row + right * width * 4)
            for index in range(top, bottom)
        )
        self.graph.access(stream, intervals, writes, owner)
        self.told.append(
            f"{'write' if writes else 'read'} {owner}[{top}:{bottom}, {left}:{right}] on {stream}"
        )

    def allocate(self) -> None:
        free = [slot for slot in range(SLOTS) if slot not in self.slots]
        if free:
            stream = self.stream()
            with torch.sim.stream(self.streams[stream]):
                tensor = torch.empty(ROWS, COLUMNS, device="sim")
            self.owners += 1
            self.slots[free[0]] = (tensor, self.owners, set())
            self.allocated_on[self.owners] = stream
            self.told.append(f"allocate {self.owners} on {stream} at {tensor.data_ptr():x}")

    def free(self) -> None:
        if self.slots:
            _, owner, streams = self.slots.pop(self.draw.choice(sorted(self.slots)))
            self.graph.free(owner, streams - {self.allocated_on[owner]})
            self.told.append(f"free {owner}, kept for {streams}")

    def keep(self) -> None:
        if self.slots:
            slot, stream = self.draw.choice(sorted(self.slots)), self.stream()
            tensor, owner, streams = self.slots[slot]
            tensor.record_stream(self.streams[stream])
            streams.add(stream)
            self.told.append(f"record_stream {owner} {stream}")

    def record(self) -> None:
        name, stream = self.draw.randrange(EVENTS), self.stream()
        event = self.streams[stream].record_event(self.events[name][0] if name in self.events else None)
        self.events[name] = (event, self.graph.record(stream))
        self.told.append(f"record {name} on {stream}")

    def wait(self) -> None:
        name, stream = self.draw.randrange(EVENTS), self.stream()
        if name in self.events:
            self.streams[stream].wait_event(self.events[name][0])
            self.graph.wait(stream, self.events[name][1])
            self.told.append(f"{stream} waits for {name}")

    def wait_stream(self) -> None:
        waits, other = self.stream(), self.stream()
        self.streams[waits].wait_stream(self.streams[other])
        self.graph.wait(waits, self.graph.record(other))
        self.told.append(f"{waits} waits for stream {other}")

    def host(self) -> None:
        if self.draw.random() < 0.2:
            torch.sim.synchronize()
            self.graph.wait_on_host(*[self.graph.record(stream) for stream in range(STREAMS)])
            self.told.append("synchronize")
        elif self.draw.random() < 0.5:
            stream = self.stream()
            self.streams[stream].synchronize()
            self.graph.wait_on_host(self.graph.record(stream))
            self.told.append(f"synchronize {stream}")
        else:
            from fsdpbench.sim.torch_device.accelerator import ACCELERATOR

            ACCELERATOR.timeline.cpu += 10**8  # all is done by then; that orders nothing
            self.told.append("time passes")

    def query(self) -> None:
        name = self.draw.randrange(EVENTS)
        if name in self.events and self.events[name][0].query():
            self.graph.wait_on_host(self.events[name][1])
            self.told.append(f"{name} has passed")


def compare(seeds: range, actions: int) -> Counter[str]:
    """Run programs of both sides; how many raced, by kind."""
    seen: Counter[str] = Counter()
    for seed in seeds:
        program = Program(seed)
        program.run(actions)
        races = program.graph.races()
        found = [finding.kind.value for finding in program.sanitizer.findings]
        told = "\n".join(program.told)
        assert bool(found) == bool(races), f"seed {seed}: found {found}, truth {races[:2]}\n{told}"
        # Only the first race of a program is sure to be told; a kind that is told is true of some pair.
        same = {"race" if old.owner == new.owner else "use_after_free" for old, new in races}
        assert set(found) <= same, f"seed {seed}: found {found}, truth {same}\n{told}"
        seen.update(set(found) or {"none"})
    return seen


def test_drawn_programs() -> None:
    seen = compare(range(100), 14)
    assert min(seen["none"], seen["race"]) > 5, seen
    assert seen["use_after_free"] > 0, seen


@pytest.mark.campaign
@pytest.mark.parametrize("actions", [8, 14, 25, 60])
@pytest.mark.parametrize("start", range(10_000, 12_000, 250))
def test_many_drawn_programs(actions: int, start: int) -> None:
    compare(range(start, start + 250), actions)
