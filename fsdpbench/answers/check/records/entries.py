"""One configuration of one side: its status, and the figures of each run.

A simulated configuration has one run, which is exact. A measured one has one for each repetition. Statistics
use runs as samples, not steps, because the steps of one run share its conditions.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fsdpbench.answers.check import metrics
from fsdpbench.answers.check.metrics import contradictions
from fsdpbench.base.reading import JsonObject
from fsdpbench.engine.results.records import Status
from fsdpbench.reports.consistency import broken_rules, values_of

Figures = Mapping[str, metrics.Figure]

_WORST_FIRST = (
    Status.CRASH, Status.TIMEOUT, Status.ERROR, Status.RACE, Status.RANK_MISMATCH, Status.OOM,
    Status.NOT_APPLICABLE,
)  # fmt: skip


@dataclass(frozen=True)
class Entry:
    """`status`: the worst of all runs. `runs`: the figures of each successful run, by metric; of the last run
    if none succeeded. `cause`: why a configuration failed, if known. `contradictions`: for each run, the
    reason against a figure, by metric, or by its name in the result if it is not a metric."""

    status: Status
    device: str
    runs: tuple[Figures, ...]
    cause: str | None = field(default=None, compare=False)
    contradictions: tuple[Mapping[str, str], ...] = field(default=(), compare=False)

    def __post_init__(self) -> None:
        runs = tuple(metrics.checked_run(run) for run in self.runs)
        object.__setattr__(self, "runs", runs)
        found: Sequence[Mapping[str, str]] = self.contradictions or [{}] * len(runs)
        both = ({**contradictions(self.device, run), **own} for run, own in zip(runs, found, strict=True))
        object.__setattr__(self, "contradictions", tuple(both))

    @property
    def is_exact(self) -> bool:
        return self.device == "sim"

    def values(self, metric: str) -> list[float]:
        """Return the figure of every run in which it is known."""
        return [value for run in self.runs if isinstance(value := run[metric], int | float)]

    def problem(self, metric: str) -> str | None:
        """Return why the figure cannot be judged: a run has an unusable value, or only some runs have it."""
        for run in self.runs:
            if isinstance(broken := run.get(metric), metrics.Unusable):
                return f"is {broken}{self._in_one}"
        if metric not in metrics.METRICS:
            return None
        known = len(self.values(metric))
        if 0 < known < len(self.runs):
            return f"is unknown in {len(self.runs) - known} of {len(self.runs)} runs"
        if self.is_exact and len(set(self.values(metric))) > 1:
            return "differs between runs of a simulation, which is exact"
        if metric == metrics.ALWAYS_KNOWN and not known:
            return "is unknown"
        return None

    def doubt(self, metric: str) -> str | None:
        """Return why this figure, valid by itself, contradicts others of its run; else None."""
        for run, found in zip(self.runs, self.contradictions, strict=True):
            if metric in found:
                value = run.get(metric)
                known = f" {value:g}" if isinstance(value, int | float) else ""
                return f"cannot be{known}{self._in_one}: {found[metric]}"
        return None

    def flaws(self) -> dict[str, str]:
        """Return why figures cannot be judged, by name; including figures on which others depend."""
        named = [*metrics.ALL, *(name for found in self.contradictions for name in found)]
        reasons = ((name, self.problem(name) or self.doubt(name)) for name in named)
        return {name: why for name, why in reasons if why is not None}

    @property
    def _in_one(self) -> str:
        return f" in one of {len(self.runs)} runs" if len(self.runs) > 1 else ""

    @property
    def known(self) -> list[JsonObject]:
        """Return the known figures of each run, in the format of a baseline file."""
        return [{name: run[name] for name in metrics.ALL if run[name] is not None} for run in self.runs]


def entry_of(results: Sequence[Mapping[str, Any]]) -> Entry:
    """Return the entry of a configuration from the results of all its runs, the first run first."""
    statuses = [Status(result["status"]) for result in results]
    worst = next((status for status in _WORST_FIRST if status in statuses), Status.OK)
    repeats = results[0].get("repeats")
    steps = repeats.get("step_time_s") if isinstance(repeats, Mapping) else None
    runs, against = [], []
    for number, (result, status) in enumerate(zip(results, statuses, strict=True)):
        values = values_of(result)
        if number and isinstance(steps, list) and len(steps) == len(results):
            values["step_time_s_in_repeats"] = steps[number]
        figures = metrics.figures_of(values)
        if result.get("repeats") is not None and isinstance(figures["step_time_s"], int | float):
            figures["step_time_s"] = _own_step(result["repeats"], alone=len(results) == 1)
        if status is Status.OK:
            runs.append(figures)
            against.append(metrics.by_metric(broken_rules(values)))
    cause = _cause(results, statuses, worst)
    return Entry(worst, results[0]["device"], tuple(runs) or (figures,), cause, tuple(against))


def _own_step(repeats: object, alone: bool) -> metrics.Figure:
    """Return the first run's own step time from its merged result. `alone`: there are no other results."""
    if not isinstance(repeats, Mapping):
        return metrics.Unusable.of(repeats, "repeats is not an object")
    steps, samples = repeats.get("step_time_s"), repeats.get("samples_s")
    if not isinstance(steps, list) or not steps:
        return metrics.Unusable.of(steps, "repeats.step_time_s is not a list of times")
    if not isinstance(samples, list) or not all(isinstance(run, list) for run in samples):
        return metrics.Unusable.of(samples, "repeats.samples_s is not a list of samples of each run")
    if alone and repeats.get("failed"):
        return metrics.Unusable.of(repeats["failed"], "runs failed, and how is not known here")
    return metrics.checked(metrics.METRICS["step_time_s"], steps[0])


def _cause(results: Sequence[Mapping[str, Any]], statuses: Sequence[Status], worst: Status) -> str | None:
    if worst is Status.OK:
        return None
    cause = results[statuses.index(worst)].get("cause")
    message = cause.get("message") if isinstance(cause, Mapping) else None
    where = f"in {statuses.count(worst)} of {len(results)} runs" if len(results) > 1 else None
    return ": ".join(str(part) for part in (where, message) if part) or None
