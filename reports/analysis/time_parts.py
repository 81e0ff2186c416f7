"""How time was spent: the parts of a span, which sum to it."""

from __future__ import annotations

from dataclasses import dataclass, fields

from fsdpbench.reports.analysis.device.time_units import seconds


@dataclass(frozen=True)
class TimeParts:
    """How a span of time was spent, ns; the four parts sum to the span exactly.

    compute_only: the device worked and no collective ran.  Copies and memory sets that run on their own count
        here, as work of the device; `memory_copy` says how much of it they are.
    overlapped: a collective ran beside computation.  exposed_communication: a collective ran and no
        computation did.  idle: nothing ran.
    """

    compute_only: int = 0
    overlapped: int = 0
    exposed_communication: int = 0
    idle: int = 0
    memory_copy: int = 0

    @property
    def total(self) -> int:
        """The whole span, ns."""
        return self.compute_only + self.overlapped + self.exposed_communication + self.idle

    @property
    def overlap_fraction(self) -> float | None:
        """Share of communication time hidden under computation; None where nothing was communicated."""
        communication = self.overlapped + self.exposed_communication
        return self.overlapped / communication if communication else None

    def __add__(self, other: TimeParts) -> TimeParts:
        return TimeParts(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    def per(self, count: int) -> TimeParts:
        """The mean of `count` such spans in whole ns; idle takes the rest, so that the parts still sum."""
        compute, overlapped, exposed = (
            part // count for part in (self.compute_only, self.overlapped, self.exposed_communication)
        )
        idle = self.total // count - compute - overlapped - exposed
        return TimeParts(compute, overlapped, exposed, idle, self.memory_copy // count)

    def to_dict(self) -> dict[str, float]:
        return {
            "compute_only": seconds(self.compute_only),
            "overlapped": seconds(self.overlapped),
            "exposed_communication": seconds(self.exposed_communication),
            "idle": seconds(self.idle),
        }
