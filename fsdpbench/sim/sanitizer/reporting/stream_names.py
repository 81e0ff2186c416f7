"""What streams are called in reports: by their number in traces, and by what they are."""

from __future__ import annotations

from fsdpbench.sim.sanitizer.clocks import HOST
from fsdpbench.sim.sanitizer.operation import Operation, Stack
from fsdpbench.sim.sanitizer.reporting.places import own_line
from fsdpbench.sim.trace.records import trace_stream


class StreamNames:
    """Knows where streams were made, or what made them for itself."""

    def __init__(self) -> None:
        self._made: dict[int, Stack | str] = {}

    def made(self, stream: int, by: Stack | str) -> None:
        """A stream was made: where, or what for."""
        self._made[stream] = by

    def of(self, operation: Operation) -> str:
        """``CPU``, ``stream 7 (default)``, ``stream 20 (made at train.py:9)``."""
        if operation.agent == HOST:
            return "CPU"
        number = operation.agent - 1
        by = self._made.get(number, "default" if number == 0 else "")
        what = by if isinstance(by, str) else f"made at {own_line(by)}"
        return f"stream {trace_stream(number)}{f' ({what})' if what else ''}"


def short_name(name: str) -> str:
    """``stream 20``: without what it is."""
    return name.partition(" (")[0]
