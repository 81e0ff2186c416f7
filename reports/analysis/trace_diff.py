"""Changes from one trace to another: the mean step's parts, collectives, units, and names that ran.

    before  [compute 10 | exposed 2]         step +3 ms: exposed communication +2, compute only +1
    after   [compute 11 | exposed 4  ]       all-gather +2 ms; `gemm_128` +1 ms; `copy` is new, 4 a step

All figures are per mean step, so that traces of different lengths can be compared.  A name that only one
side has counts as 0 on the other."""

from collections.abc import Mapping
from dataclasses import dataclass

from fsdpbench.base.files.documents import rendered_beside
from fsdpbench.reports.analysis.figures import PARTS, CollectiveFigures
from fsdpbench.reports.analysis.model import Analysis, RankAnalysis
from fsdpbench.reports.analysis.records import seconds

_TIMES = ("time", "exposed")


@dataclass(frozen=True)
class Change:
    """A figure of the mean step on both sides: a time in ns, a count, or bytes."""

    name: str
    before: float
    after: float

    @property
    def by(self) -> float:
        """Return after minus before."""
        return self.after - self.before


@dataclass(frozen=True)
class NameChange:
    """Work under one name in a mean step: its count and its total ns."""

    name: str
    count: Change
    time: Change


@dataclass(frozen=True)
class TraceDiff:
    """Two ranks' traces compared. All times in ns of a mean step.

    collectives: by type: count, bytes (if both sides know them), time and exposed time.  names: all whose
    count or time changed, by the change of time.  host: how long the CPU is busy.
    """

    before: RankAnalysis
    after: RankAnalysis
    step: Change
    parts: tuple[Change, ...]
    phases: tuple[Change, ...]
    idle: tuple[Change, ...]
    collectives: dict[str, tuple[Change, ...]]
    units: tuple[Change, ...]
    memory: tuple[Change, ...]
    names: tuple[NameChange, ...]
    host: tuple[Change, ...]

    def to_dict(self) -> dict[str, object]:
        """Return plain values, with times in seconds."""
        sides = {"before": self.before, "after": self.after}
        return {
            **{side: {"trace": str(rank.path), "rank": rank.rank} for side, rank in sides.items()},
            "trusted": self.before.trusted and self.after.trusted,
            "step_time_s": _in_seconds(self.step),
            "time_s": {each.name: _in_seconds(each) for each in self.parts},
            "phases_s": {each.name: _in_seconds(each) for each in self.phases},
            "idle_causes_s": {each.name: _in_seconds(each) for each in self.idle},
            "communication": {
                kind: {
                    **{each.name: _as_it_is(each) for each in changes if each.name not in _TIMES},
                    **{f"{each.name}_s": _in_seconds(each) for each in changes if each.name in _TIMES},
                }
                for kind, changes in self.collectives.items()
            },
            "units_exposed_s": {each.name: _in_seconds(each) for each in self.units},
            "memory_bytes": {each.name: _as_it_is(each) for each in self.memory},
            "cpu_s": {each.name: _in_seconds(each) for each in self.host},
            "names": [
                {"name": each.name, "count": _as_it_is(each.count), "time_s": _in_seconds(each.time)}
                for each in self.names
            ],
        }


def diff_analyses(before: Analysis, after: Analysis) -> list[TraceDiff]:
    """Return comparisons of the ranks that both have; if they share none, of the first rank of each."""
    old = {rank.rank: rank for rank in reversed(before.ranks)}
    new = {rank.rank: rank for rank in reversed(after.ranks)}
    common = sorted(old.keys() & new.keys())
    if not common and old and new:
        return [diff_ranks(before.ranks[0], after.ranks[0])]
    return [diff_ranks(old[number], new[number]) for number in common]


def diff_ranks(before: RankAnalysis, after: RankAnalysis) -> TraceDiff:
    """Return a comparison of two traces of any origin."""
    old, new = before.mean_step, after.mean_step
    held, holds = _held(before), _held(after)
    return TraceDiff(
        before,
        after,
        step=Change("step", old.total, new.total),
        parts=tuple(Change(name, getattr(old, name), getattr(new, name)) for name in PARTS),
        phases=_matched(
            *(_per_step(rank, {n: part.total for n, part in rank.phases.items()}) for rank in (before, after))
        ),
        idle=_matched(*(_per_step(rank, rank.idle_causes.parts()) for rank in (before, after))),
        collectives=_collectives(before, after),
        units=_units(before, after),
        memory=tuple(Change(name, held[name], holds[name]) for name in held if name in holds),
        names=_names(before, after),
        host=_matched(*(_per_step(rank, {"operators": rank.cpu_time}) for rank in (before, after))),
    )


def _per_step(rank: RankAnalysis, figures: Mapping[str, int]) -> dict[str, float]:
    steps = max(len(rank.steps), 1)
    return {name: value / steps for name, value in figures.items()}


def _matched(before: Mapping[str, float], after: Mapping[str, float]) -> tuple[Change, ...]:
    """Return a change for every name on either side."""
    return tuple(Change(n, before.get(n, 0), after.get(n, 0)) for n in dict.fromkeys([*before, *after]))


def _units(before: RankAnalysis, after: RankAnalysis) -> tuple[Change, ...]:
    """Return changes of exposed time by unit, the largest change first."""
    old, new = ({unit.unit: unit.exposed for unit in rank.units} for rank in (before, after))
    changes = _matched(_per_step(before, old), _per_step(after, new))
    return tuple(sorted((each for each in changes if each.by), key=lambda each: -abs(each.by)))


def _collectives(before: RankAnalysis, after: RankAnalysis) -> dict[str, tuple[Change, ...]]:
    """Return changes by type of collective on either side; bytes only if both sides know them."""
    found: dict[str, tuple[Change, ...]] = {}
    for kind in dict.fromkeys([*before.communication, *after.communication]):
        old, new = (_of_kind(rank, kind) for rank in (before, after))
        found[kind] = tuple(Change(name, old[name], new[name]) for name in old if name in new)
    return found


def _of_kind(rank: RankAnalysis, kind: str) -> dict[str, float]:
    """Return a mean step's figures; times in ns."""
    figures = rank.communication.get(kind, CollectiveFigures(bytes=0))
    known = {"count": figures.count, "time": figures.time, "exposed": figures.exposed}
    if figures.bytes is not None:
        known["bytes"] = figures.bytes
    return _per_step(rank, known)


def _held(rank: RankAnalysis) -> dict[str, int]:
    names = ("peak_allocated", "peak_reserved", "unused_at_peak")
    known = {name: value for name in names if (value := getattr(rank.memory, name)) is not None}
    return known | {f"peak_in_{phase}": peak for phase, peak in rank.memory.peaks.items()}


def _names(before: RankAnalysis, after: RankAnalysis) -> tuple[NameChange, ...]:
    counts, times = (
        _matched(*(_per_step(rank, {n.name: getattr(n, of) for n in rank.names}) for rank in (before, after)))
        for of in ("count", "time")
    )
    both = zip(counts, times, strict=True)
    changes = [NameChange(count.name, count, time) for count, time in both if count.by or time.by]
    return tuple(sorted(changes, key=lambda each: (-abs(each.time.by), each.name)))


def _as_it_is(change: Change) -> dict[str, float]:
    return {"before": change.before, "after": change.after}


def _in_seconds(change: Change) -> dict[str, float]:
    return {"before": seconds(round(change.before)), "after": seconds(round(change.after))}


_MS = 1e6
_WORTH_NS = 1000
"""Changes of time below a microsecond per step are left out."""


def describe_diff(diff: TraceDiff) -> str:
    """Return lines about the changes (`trace_diff.jinja`): the step first, then its parts."""
    text = rendered_beside(
        __file__,
        "trace_diff.jinja",
        diff=diff,
        sentence=_sentence(diff),
        collectives=_collective_lines(diff),
        names=[each for each in diff.names if abs(each.time.by) >= _WORTH_NS or each.count.by],
        worth=_WORTH_NS,
    )
    return text.rstrip("\n")


def _sentence(diff: TraceDiff) -> str:
    step = diff.step
    if abs(step.by) < _WORTH_NS:
        return f"A step takes as long as before, {step.after / _MS:.3f} ms."
    share = f" ({100 * step.by / step.before:+.2f} %)" if step.before else ""
    mine = max(diff.parts, key=lambda part: part.by * (1 if step.by > 0 else -1))
    text = f"A step takes {abs(step.by) / _MS:.3f} ms{share} {'more' if step.by > 0 else 'less'}, "
    text += f"most of it {mine.name.replace('_', ' ')} ({mine.by / _MS:+.3f} ms)."
    return text


def _collective_lines(diff: TraceDiff) -> list[str]:
    lines = []
    for kind, changes in diff.collectives.items():
        parts = []
        for each in changes:
            if each.name == "count" and each.by:
                parts.append(f"{each.before:g} -> {each.after:g} a step")
            elif each.name == "bytes" and each.by:
                parts.append(f"{each.before / 1e6:.1f} -> {each.after / 1e6:.1f} MB")
            elif each.name in ("time", "exposed") and abs(each.by) >= _WORTH_NS:
                parts.append(f"{each.name} {each.by / _MS:+.3f} ms")
        if parts:
            lines.append(f"{kind.replace('_', '-')}: {', '.join(parts)}")
    return lines
