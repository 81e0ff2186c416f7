"""What a CUDA graph cannot hold is found in a step, with its place."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from fsdpbench.sim.followers.graph import Entry, StandingTimeline, WatchedStep
from fsdpbench.sim.model.observed import observe
from fsdpbench.sim.model.timeline import Timeline, Work


class Step(WatchedStep):
    """A step on stream 0, beside streams 1 and 2, and the timeline that it observes."""

    def __init__(self, expected: list[Entry] | None = None) -> None:
        super().__init__(0, expected)
        self.timeline = Timeline()
        for _ in range(3):
            self.timeline.add_stream()
        self.early = self.timeline.record(1)
        observe(self.timeline, self)


def watched(expected: list[Entry] | None = None) -> Step:
    return Step(expected)


def forked_and_joined(step: Step) -> None:
    step.timeline.launch(0, Work.COMPUTE, 100)
    step.timeline.make_wait(1, step.timeline.record(0))
    step.timeline.launch(1, Work.COLLECTIVE, 100)
    step.timeline.make_wait(2, step.timeline.record(1))
    step.timeline.launch(2, Work.COPY, 100)
    step.timeline.make_wait(0, step.timeline.record(2))
    step.finish()


def test_a_step_that_forks_and_joins_is_legal_and_counted() -> None:
    step = watched()
    forked_and_joined(step)
    assert (step.violation, step.difference, step.kernels, step.streams) == (None, None, 3, 3)


def unjoined(step: Step) -> None:
    step.timeline.make_wait(1, step.timeline.record(0))
    step.timeline.launch(1, Work.COPY, 100)
    step.timeline.launch(0, Work.COMPUTE, 100)
    step.finish()


def joined_too_early(step: Step) -> None:
    step.timeline.make_wait(1, step.timeline.record(0))
    step.timeline.launch(1, Work.COPY, 100)
    step.timeline.make_wait(0, step.timeline.record(1))
    step.timeline.launch(1, Work.COPY, 100)
    step.finish()


@pytest.mark.parametrize(
    ("program", "told"),
    [
        (unjoined, "work on stream 1 is not awaited"),
        (joined_too_early, "work on stream 1 is not awaited"),
        (lambda step: step.timeline.launch(1, Work.COPY, 100), "stream 1 works without having followed"),
        (lambda step: step.timeline.make_wait(0, step.early), "an event from before the step"),
        (lambda step: step.timeline.wait_for(step.timeline.record(0)), "the CPU waits for the device"),
        (lambda step: step.timeline.wait_for_stream(0), "the CPU waits for the device"),
        (lambda step: step.timeline.wait_for_all(), "the CPU waits for the device"),
        (lambda step: step.timeline.has_passed(step.timeline.record(0)), "the CPU asks the device"),
        (lambda step: step.timeline.is_idle(0), "the CPU asks the device"),
    ],
)
def test_what_no_graph_can_hold_is_named(program: Callable[[Step], None], told: str) -> None:
    step = watched()
    program(step)
    assert step.violation is not None
    assert told in step.violation
    assert "test_watch.py" in step.violation


def test_another_launch_address_or_end_is_a_difference() -> None:
    first = watched()
    forked_and_joined(first)
    first.note((4096, 512), lambda: "512 bytes are at another address")

    again = watched(first.trail)
    forked_and_joined(again)
    assert "ends earlier" in str(again.difference)

    moved = watched(first.trail)
    for entry in first.trail[:-1]:
        moved.note(entry, lambda: "not this")
    moved.note((8192, 512), lambda: "512 bytes are at another address")
    assert "512 bytes are at another address, at " in str(moved.difference)

    longer = watched(first.trail[:2])
    forked_and_joined(longer)
    assert "other work is launched on stream" in str(longer.difference)


def test_the_cpus_clock_stands_in_a_replay_alone() -> None:
    timeline = Timeline()
    timeline.__class__ = StandingTimeline
    timeline.cpu += 50
    assert timeline.cpu == 0
    timeline.__class__ = Timeline
    timeline.cpu += 50
    assert timeline.cpu == 50
