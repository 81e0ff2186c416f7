"""A clock with streams that tests move by hand."""

from __future__ import annotations

from collections.abc import Callable

import pytest


class HandClock:
    """An AllocatorClock: ``queue(stream, ns)`` puts work on a stream behind what is there."""

    def __init__(self) -> None:
        self.now = 0
        self.ready: dict[int, int] = {}
        self.device_synchronisations = 0

    def queue(self, stream: int, ns: int) -> None:
        self.ready[stream] = max(self.ready.get(stream, 0), self.now) + ns

    def cpu_ns(self) -> int:
        return self.now

    def stream_ready_ns(self, stream: int) -> int:
        return max(self.ready.get(stream, 0), self.now)

    def advance_cpu(self, ns: int) -> None:
        assert ns >= 0
        self.now += ns

    def wait_cpu_until(self, ns: int) -> None:
        self.now = max(self.now, ns)

    def synchronize_device(self) -> None:
        self.device_synchronisations += 1
        self.now = max([self.now, *self.ready.values()])


@pytest.fixture
def clock() -> HandClock:
    return HandClock()


@pytest.fixture(scope="session")
def make_clock() -> Callable[[], HandClock]:
    """For property tests, which need a fresh clock for each example."""
    return HandClock
