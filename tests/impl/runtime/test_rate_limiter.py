"""The rate limiter by itself: which mark the CPU waits for, and how an adapting limit moves."""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest

from fsdpbench.impl.runtime.context import UnitLabels
from fsdpbench.impl.runtime.schedule import RateLimiter
from fsdpbench.impl.runtime.streams import Stream
from fsdpbench.impl.shared.settings import ScheduleSettings

UNIT: Any = SimpleNamespace(labels=UnitLabels("unit"))


class RecordingStream(Stream):
    """Numbers its marks and notes for which ones the CPU waits."""

    def __init__(self) -> None:
        self.marks = 0
        self.waited: list[int] = []

    def record(self) -> Any:
        number = self.marks
        self.marks += 1
        return SimpleNamespace(synchronize=lambda: self.waited.append(number))


@pytest.mark.parametrize(("limit", "expected"), [(0, []), (1, [0, 1, 2, 3]), (2, [0, 1, 2]), (3, [0, 1])])
def test_waits_for_the_unit_freed_so_many_before(limit: int, expected: list[int]) -> None:
    limiter, stream = RateLimiter(limit), RecordingStream()
    limiter.wait(UNIT)
    for _ in range(4):
        limiter.freed(stream)
        limiter.wait(UNIT)
    assert stream.waited == expected


def limits(retries: Iterable[int]) -> list[int]:
    counts = iter(retries)
    limiter = RateLimiter(2, lambda: next(counts))
    found = []
    for _ in range(len(list(retries))):
        limiter.end_iteration()
        found.append(limiter.limit)
    return found


def test_retries_lower_the_limit_to_one_at_least() -> None:
    assert limits([5, 7, 9, 11]) == [2, 1, 1, 1]


def test_calm_raises_the_limit_and_retries_end_it_for_good() -> None:
    calm = [3] * 9
    assert limits([*calm, 4, *[4] * 20])[:11] == [2] * 8 + [3, 2, 2]
    assert limits([*calm, 4, *[4] * 20])[-1] == 2


def test_a_lower_limit_drains_the_marks_of_the_higher() -> None:
    counts = iter([0, 1])
    limiter, stream = RateLimiter(3, lambda: next(counts)), RecordingStream()
    for _ in range(2):
        limiter.freed(stream)
    limiter.end_iteration()
    limiter.end_iteration()
    assert limiter.limit == 2
    limiter.freed(stream)
    limiter.wait(UNIT)
    assert stream.waited == [1]


def test_settings_name_the_limit() -> None:
    def limit_of(value: Any) -> tuple[int, bool]:
        settings = ScheduleSettings.decide(
            backward_prefetch="pre",
            backward_prefetch_depth=1,
            forward_prefetch_depth=0,
            limit_all_gathers=value,
            memory_handover="events",
        )
        return settings.limit_all_gathers, settings.adapt_limit

    assert limit_of(True) == (2, False)
    assert limit_of(False) == (0, False)
    assert limit_of(3) == (3, False)
    assert limit_of("auto") == (2, True)
