"""Units of one stage, one for each dtype and mesh, lend their memory together: computation does not wait for
the collective of one before the other is reduced, nor the next gather for what was just computed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from fsdpbench.impl.runtime.lent import LentMemory
from fsdpbench.impl.runtime.schedule import Schedule
from fsdpbench.impl.shared.settings import MemoryHandover


class Recorder:
    """A stream that knows which events it waited for."""

    def __init__(self) -> None:
        self.events = 0
        self.waited: list[Any] = []

    def record(self) -> int:
        self.events += 1
        return self.events

    def wait(self, event: Any) -> None:
        self.waited.append(event)


def lent(held: int, stages: int, units: int) -> tuple[list[int], LentMemory]:
    compute, reduce = Recorder(), Recorder()
    streams: Any = SimpleNamespace(compute=compute, has_streams=True)
    memory = LentMemory(streams, MemoryHandover.EVENTS)
    for _ in range(stages):
        memory.take_back(held - 1)
        for _ in range(units):
            memory.lend_gradients([torch.zeros(1)], reduce)  # type: ignore[arg-type]
    return compute.waited, memory


def test_nothing_of_a_stage_is_taken_back_before_the_next() -> None:
    waited, memory = lent(held=1, stages=1, units=3)
    assert waited == []
    memory.take_back(0)
    assert waited == [1, 2, 3]


def test_so_many_stages_are_held() -> None:
    waited, memory = lent(held=2, stages=3, units=2)
    assert waited == [1, 2]  # of the first stage, before the third; the second's are held
    memory.finish()
    assert waited == [1, 2, 3, 4, 5, 6]


def test_freed_buffers_of_all_units_stay_for_a_turn_in_forward() -> None:
    stage: Any = SimpleNamespace(units=[object(), object()])
    schedule = Schedule.__new__(Schedule)
    schedule._holds = True
    assert schedule.forward_hold(stage) == 2
    schedule._holds = False
    assert schedule.forward_hold(stage) == 0
