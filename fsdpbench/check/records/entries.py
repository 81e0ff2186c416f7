"""One configuration of one side: how it ended, and its figures, run by run.

A simulated configuration has one run, which is exact. A measured one has as many as were repeated; the run is
the replicate, since steps of one run share what that run happened to get.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fsdpbench.check.consistency import by_metric, checked, contradictions
from fsdpbench.check.figures import Figure, Unusable, figure_from
from fsdpbench.check.metrics import ALL, ALWAYS_KNOWN, METRICS, figures_of
from fsdpbench.reports import consistency
from fsdpbench.reports.consistency import Contradiction
from fsdpbench.results.records import Status

Figures = Mapping[str, Figure]

_WORST_FIRST = (
    Status.CRASH,
    Status.TIMEOUT,
    Status.ERROR,
    Status.RACE,
    Status.RANK_MISMATCH,
    Status.OOM,
    Status.NOT_APPLICABLE,
)


@dataclass(frozen=True)
class Entry:
    """`status`: the worst of all runs.  `runs`: the figures of each run that succeeded, by metric; of the
    only one where none did.  `cause`: why a configuration failed, where it is known.  `contradictions`: what other
    figures of a run say against each, by metric, or by the name in a result of what no metric reads."""

    status: Status
    device: str
    runs: tuple[Figures, ...]
    cause: str | None = field(default=None, compare=False)
    contradictions: tuple[Mapping[str, str], ...] = field(default=(), compare=False)

    def __post_init__(self) -> None:
        runs = tuple(checked(run) for run in self.runs)
        object.__setattr__(self, "runs", runs)
        found = self.contradictions or [{}] * len(runs)
        both = ({**contradictions(self.device, run), **own} for run, own in zip(runs, found, strict=True))
        object.__setattr__(self, "contradictions", tuple(both))

    @property
    def is_exact(self) -> bool:
        return self.device == "sim"

    def values(self, metric: str) -> list[float]:
        """The figure in every run that knows it."""
        return [value for run in self.runs if isinstance(value := run[metric], int | float)]

    def problem(self, metric: str) -> str | None:
        """Why the figure cannot be judged, if so: what is in its place in a run, or that only some runs
        know it."""
        for run in self.runs:
            if isinstance(broken := run.get(metric), Unusable):
                return f"is {broken}{self._in_one}"
        if metric not in METRICS:
            return None
        known = len(self.values(metric))
        if 0 < known < len(self.runs):
            return f"is unknown in {len(self.runs) - known} of {len(self.runs)} runs"
        if self.is_exact and len(set(self.values(metric))) > 1:
            return "differs between runs of a simulation, which is exact"
        if metric == ALWAYS_KNOWN and not known:
            return "is unknown"
        return None

    def doubt(self, metric: str) -> str | None:
        """What other figures of a run say against this one, which is a possible one alone."""
        for run, found in zip(self.runs, self.contradictions, strict=True):
            if metric in found:
                value = run.get(metric)
                known = f" {value:g}" if isinstance(value, int | float) else ""
                return f"cannot be{known}{self._in_one}: {found[metric]}"
        return None

    def flaws(self) -> dict[str, str]:
        """Why figures cannot be judged, by name; figures that no metric reads, too: others rest on them."""
        named = [*ALL, *(name for found in self.contradictions for name in found)]
        told = ((name, self.problem(name) or self.doubt(name)) for name in named)
        return {name: why for name, why in told if why is not None}

    @property
    def _in_one(self) -> str:
        return f" in one of {len(self.runs)} runs" if len(self.runs) > 1 else ""

    def to_dict(self) -> dict[str, Any]:
        """For a baseline's file; figures that are not known are left out."""
        runs = [{name: run[name] for name in ALL if run[name] is not None} for run in self.runs]
        return {"status": self.status.value, "device": self.device, "runs": runs}


def entry_of(results: Sequence[Mapping[str, Any]]) -> Entry:
    """From the results of all runs of a configuration, the first one first."""
    statuses = [Status(result["status"]) for result in results]
    worst = next((status for status in _WORST_FIRST if status in statuses), Status.OK)
    succeeded = [
        _own_figures(result, alone=len(results) == 1)
        for result, status in zip(results, statuses, strict=True)
        if status is Status.OK
    ]
    against = [
        by_metric(consistency.contradictions(result) + _other_run(results, number))
        for number, (result, status) in enumerate(zip(results, statuses, strict=True))
        if status is Status.OK
    ]
    return Entry(
        worst,
        results[0]["device"],
        tuple(succeeded) or (figures_of(results[0]),),
        _cause(results, statuses, worst),
        tuple(against),
    )


def _other_run(results: Sequence[Mapping[str, Any]], number: int) -> list[Contradiction]:
    """Where the first run's `repeats` has another step time of a further run than that run itself."""
    repeats = results[0].get("repeats")
    steps = repeats.get("step_time_s") if isinstance(repeats, Mapping) else None
    if not number or not isinstance(steps, list) or len(steps) != len(results):
        return []
    own, kept = results[number].get("step_time_s"), steps[number]
    if not isinstance(own, int | float) or not isinstance(kept, int | float) or math.isclose(own, kept):
        return []
    told = f"repeats.step_time_s[{number}] of run 1 is {kept:.9g}, and step_time_s of run {number + 1} is {own:.9g}"
    return [Contradiction(("step_time_s",), told)]


def _own_figures(result: Mapping[str, Any], alone: bool) -> Figures:
    """With the step time of its own run: that of a repeated first run is the median over all."""
    figures = figures_of(result)
    repeats = result.get("repeats")
    if repeats is None:
        return figures
    if not isinstance(repeats, Mapping):
        return {**figures, "step_time_s": Unusable.of(repeats, "repeats is not an object")}
    own, samples = _own_step(repeats, alone), repeats.get("samples_s")
    if isinstance(samples, list) and all(isinstance(run, list) for run in samples):
        broken = next((why for run in samples if (why := _broken_times(run))), None)
    else:
        broken = "no lists of samples"
    changes: dict[str, Figure] = {}
    if not isinstance(figures["step_time_s"], Unusable | None):
        changes["step_time_s"] = own
    if broken is not None and figures["fastest_step_s"] is not None:
        changes["fastest_step_s"] = Unusable.of(samples, f"of repeats.samples_s, {broken}")
    return {**figures, **changes}


def _own_step(repeats: Mapping[str, Any], alone: bool) -> Figure:
    """From what the store merged into the first run's result. `alone`: the other runs are not at hand."""
    steps = repeats.get("step_time_s")
    if not isinstance(steps, list) or not steps:
        return Unusable.of(steps, "repeats.step_time_s is not a list of times")
    broken = _broken_times(steps)
    if broken is not None:
        return Unusable.of(steps, f"of repeats.step_time_s, {broken}")
    failed = figure_from(repeats.get("failed", 0))
    if isinstance(failed, Unusable | None) or (alone and failed):
        return Unusable.of(failed, "runs failed, and how is not known here")
    if len(steps) + failed != repeats.get("runs"):
        return Unusable.of(steps, "repeats.step_time_s is not one of each run")
    return figure_from(steps[0])


def _broken_times(times: Sequence[object]) -> str | None:
    """The first one that is not a step time, if any."""
    for time in map(METRICS["step_time_s"].checked, times):
        if not isinstance(time, int | float):
            return str(time or "one is null")
    return None


def _cause(results: Sequence[Mapping[str, Any]], statuses: Sequence[Status], worst: Status) -> str | None:
    if worst is Status.OK:
        return None
    cause = results[statuses.index(worst)].get("cause")
    message = cause.get("message") if isinstance(cause, Mapping) else None
    where = f"in {statuses.count(worst)} of {len(results)} runs" if len(results) > 1 else None
    return ": ".join(str(part) for part in (where, message) if part) or None
