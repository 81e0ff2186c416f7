"""Results of the analysis: frozen records in integer nanoseconds and bytes, converted to JSON at the end.

All sums are over integers; `to_dict` divides by 1e9 once.  The shape of the dictionaries is the contract
of `fsdpbench analyze --json`."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from fsdpbench.base.settings import all_trades
from fsdpbench.reports.analysis.figures import CollectiveFigures, TimeParts, communication_dict
from fsdpbench.reports.analysis.idle import IdleCauses
from fsdpbench.reports.analysis.lateness import GatherTiming
from fsdpbench.reports.analysis.memory import MemoryAnalysis
from fsdpbench.reports.analysis.operators import WorkTables
from fsdpbench.reports.analysis.peaks import Links
from fsdpbench.reports.analysis.records import Record, seconds
from fsdpbench.reports.analysis.snapshots import SnapshotAnalysis
from fsdpbench.reports.analysis.stragglers import CollectiveDurations, Waiting
from fsdpbench.reports.analysis.tables import FusedGroup, NameTotal, WorkCounts, fused_groups


class Outcome(StrEnum):
    """FOUND: a setting may save time.  FINE: no loss is worth a setting.  CANNOT_TELL."""

    FOUND = "found"
    FINE = "fine"
    CANNOT_TELL = "cannot_tell"


@dataclass(frozen=True)
class Suggestion(Record):
    """A setting to try next, by its name in the bench, and its value."""

    setting: str
    value: str


@dataclass(frozen=True)
class Finding(Record, share="share_of_step", gain="predicted_gain", suggestions="try"):
    """A rule that applied.

    cause: the rule's name.  share: its cost as a share of the step (0 to 1).  gain: the most that the
    suggestions can save of the step (0 to 1), None if the trace does not show it.  text: a sentence.
    """

    cause: str
    share: float
    gain: float | None
    text: str
    suggestions: tuple[Suggestion, ...] = ()


@dataclass(frozen=True)
class Verdict(Record):
    """A summary sentence, and the findings by decreasing cost."""

    outcome: Outcome
    sentence: str
    findings: tuple[Finding, ...] = ()

    @property
    def texts(self) -> list[str]:
        """Return one sentence per cause by decreasing cost; without findings, the summary."""
        return [finding.text for finding in self.findings] or [self.sentence]


def remedies(cause: str) -> tuple[Suggestion, ...]:
    """Return the settings that help against `cause`, in the order of the table of settings."""
    if cause == "blocking":
        return (Suggestion("system", "impl-fsdp2"),)
    return tuple(
        Suggestion(setting.name, trade.written) for setting, trade in all_trades() if cause in trade.against
    )


def in_torch(verdict: Verdict) -> Iterator[str]:
    """Yield everything that a verdict suggests, written as a script with torch's FSDPs would, the most costly
    cause first, without repetition: for traces of programs that are not ours."""
    written = {
        (setting.name, trade.written): trade.script for setting, trade in all_trades() if trade.against
    }
    asked = ((each.setting, each.value) for finding in verdict.findings for each in finding.suggestions)
    yield from dict.fromkeys(words for each in asked if (words := written.get(each)))


def late_dict(gathers: Sequence[GatherTiming]) -> dict[str, object]:
    """Return how many all-gathers were late, by how much (s), and why, as plain values."""
    late = [gather for gather in gathers if gather.cause is not None]
    causes: dict[str, dict[str, float]] = {}
    for cause in sorted({str(gather.cause) for gather in late}):
        of_cause = [gather for gather in late if str(gather.cause) == cause]
        causes[cause] = {"count": len(of_cause), "time_s": seconds(sum(gather.late for gather in of_cause))}
    return {
        "count": len(gathers),
        "prefetched": sum(gather.prefetched for gather in gathers),
        "late": len(late),
        "late_s": seconds(sum(gather.late for gather in late)),
        "causes": causes,
    }


@dataclass(frozen=True)
class UnitAnalysis:
    """One FSDP unit's collectives over all steps of a rank, and its all-gathers one by one."""

    unit: str
    communication: dict[str, CollectiveFigures]
    gathers: tuple[GatherTiming, ...] = ()

    @property
    def exposed(self) -> int:
        """Return how long (ns) the unit's collectives ran without computation beside them."""
        return sum(figures.exposed for figures in self.communication.values())

    def to_dict(self, last_step: "StepAnalysis | None" = None) -> dict[str, object]:
        """Return plain values; with a step also its all-gathers one by one, in seconds after its start."""
        of_step = [each for each in self.gathers if last_step is not None and each.step == last_step.index]
        return {
            "unit": self.unit,
            "exposed_s": seconds(self.exposed),
            **{name: figures.to_dict() for name, figures in sorted(self.communication.items())},
            "late_all_gathers": late_dict(self.gathers),
            "last_step_all_gathers": [each.to_dict(last_step.start) for each in of_step] if last_step else [],
        }


@dataclass(frozen=True)
class StepAnalysis:
    """One training step: the number in `ProfilerStep#`, its window [start, end) in the trace's ns, and its
    figures. `phases` is empty if the trace does not mark them; otherwise the phases sum to the step."""

    index: int
    start: int
    end: int
    time: TimeParts
    communication: dict[str, CollectiveFigures]
    phases: dict[str, TimeParts]

    @property
    def duration(self) -> int:
        """Return the step's length, ns."""
        return self.end - self.start

    def to_dict(self) -> dict[str, object]:
        return {
            "step": self.index,
            "duration_s": seconds(self.duration),
            "overlap_fraction": self.time.overlap_fraction,
            "time_s": self.time.to_dict(),
            "memory_copy_s": seconds(self.time.memory_copy),
            "communication": communication_dict(self.communication),
            "phases": {name: parts.to_dict() for name, parts in self.phases.items()},
        }


@dataclass(frozen=True)
class RankAnalysis:
    """One trace: figures over all its steps. `kind`: "gpu" (kernels on streams) or "cpu" (operators).

    links: the links whose peak bandwidths are compared with; None: the best bandwidth in the trace itself.
    names: what ran within the steps, by name; tables: the same by kernel, operator, module and device.
    cpu_seen: whether the trace has launches or operators of a CPU; cpu_time: their ns within the steps.
    drawing: the return value of the `draw` function that the caller passed to `analyze`.
    """

    rank: int
    path: Path
    configuration: str | None
    kind: str
    simulated: dict[str, object] | None
    world_size: int | None
    trusted: bool
    warnings: tuple[str, ...]
    steps: "tuple[StepAnalysis, ...]"
    time: TimeParts
    communication: dict[str, CollectiveFigures]
    phases: dict[str, TimeParts]
    units: tuple[UnitAnalysis, ...]
    memory: MemoryAnalysis
    idle_causes: IdleCauses
    overlap_known: bool = True
    links: Links | None = None
    verdict: Verdict | None = None
    durations: CollectiveDurations | None = field(default=None, repr=False, compare=False)
    work: WorkCounts = field(default_factory=WorkCounts)
    names: tuple[NameTotal, ...] = field(default=(), repr=False)
    cpu_seen: bool = True
    cpu_time: int = 0
    tables: WorkTables = field(default_factory=WorkTables, repr=False)
    drawing: Any = field(default=None, repr=False, compare=False)

    @property
    def fused(self) -> tuple[FusedGroup, ...]:
        """Return the kernels that Inductor made, by the operators they fuse; empty for eager programs."""
        return fused_groups(self.names)

    @property
    def how(self) -> str:
        """Return `compiled` if kernels of Inductor ran, else `eager`."""
        return "compiled" if self.fused else "eager"

    @property
    def gathers(self) -> list[GatherTiming]:
        """Return all timed all-gathers in order of their issue."""
        return sorted((each for unit in self.units for each in unit.gathers), key=lambda each: each.issued)

    @property
    def overlap_fraction(self) -> float | None:
        """Return the overlap over all steps; None without communication, or if the trace does not show it."""
        return self.time.overlap_fraction if self.overlap_known else None

    @property
    def mean_step(self) -> TimeParts:
        """Return the mean step in whole ns; its parts sum to its total."""
        return self.time.per(max(len(self.steps), 1))

    def to_dict(self) -> dict[str, object]:
        return {
            "rank": self.rank,
            "trace": str(self.path),
            "configuration": self.configuration,
            "device": self.kind,
            "simulated": self.simulated,
            "trusted": self.trusted,
            "warnings": list(self.warnings),
            "verdict": self.verdict.to_dict() if self.verdict else None,
            "advice_in_torch": list(in_torch(self.verdict)) if self.verdict else [],
            "overlap_fraction": self.overlap_fraction,
            "duration_s": seconds(self.time.total),
            "step_time_s": seconds(self.mean_step.total),
            "time_s": self.time.to_dict(),
            "memory_copy_s": seconds(self.time.memory_copy),
            "communication": communication_dict(self.communication),
            "bandwidth_roof": self.links.name if self.links else None,
            "phases": {name: parts.to_dict() for name, parts in self.phases.items()},
            "steps": [step.to_dict() for step in self.steps],
            "units": [unit.to_dict(self.steps[-1]) for unit in self.units],
            "late_all_gathers": late_dict(self.gathers),
            "work": self.work.to_dict(),
            "compiled": bool(self.fused),
            "fused_kernels": [group.to_dict() for group in self.fused],
            "idle_causes_s": self.idle_causes.to_dict(),
            "memory": self.memory.to_dict(),
            **self.tables.to_dict(),
        }


@dataclass(frozen=True)
class Spread(Record, least="min", greatest="max", greatest_rank="max_rank"):
    """Mean, minimum and maximum of one figure over ranks, and the rank with the maximum."""

    mean: float
    least: float
    greatest: float
    greatest_rank: int


@dataclass(frozen=True)
class RanksSummary(Record, figures="", waiting="waiting_for_ranks"):
    """Figures across the ranks of one configuration."""

    ranks: tuple[int, ...]
    world_size: int | None
    missing_ranks: int
    slowest_rank: int | None
    figures: dict[str, Spread]
    warnings: tuple[str, ...]
    waiting: Waiting | None = None
    trusted: bool = True

    def to_dict(self) -> dict[str, object]:
        straggler = self.waiting.straggler if self.waiting else None
        figures = {name: spread.to_dict() for name, spread in self.figures.items()}
        return super().to_dict() | {"straggler": straggler} | figures


@dataclass(frozen=True)
class Problem(Record):
    """A file of a folder that could not be analyzed, and why."""

    path: Path
    reason: str


@dataclass(frozen=True)
class Analysis:
    """The result of `analyze`. `configurations`: a summary for each ("" for traces outside of one)."""

    ranks: tuple[RankAnalysis, ...]
    configurations: dict[str, RanksSummary]
    problems: tuple[Problem, ...] = ()
    snapshots: tuple[SnapshotAnalysis, ...] = ()

    @property
    def across_ranks(self) -> RanksSummary | None:
        """Return the summary over ranks if all traces belong to one configuration, else None."""
        return next(iter(self.configurations.values())) if len(self.configurations) == 1 else None

    def to_dict(self) -> dict[str, object]:
        summary = self.across_ranks
        if summary is not None:
            across = summary.to_dict()
        else:
            across = {"configurations": {name: each.to_dict() for name, each in self.configurations.items()}}
        return {
            "schema": 1,
            "ranks": [rank.to_dict() for rank in self.ranks],
            "across_ranks": across,
            "problems": [problem.to_dict() for problem in self.problems],
            "memory_snapshots": [snapshot.to_dict() for snapshot in self.snapshots],
        }
