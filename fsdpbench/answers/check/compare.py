"""Compare two sides, configuration by configuration and figure by figure.

    statuses differ                                      the table in docs/gate.md
    a figure is known on only one side, or is invalid    cannot be judged
    exact (simulated, or equal in all runs of a side)    any difference counts, thresholds by metric
    otherwise                                            rank test and minimum effect, over runs

All tests of a comparison are corrected together. Figures that cannot be judged do not affect the others.

The likely cause of a regression follows from the pattern of a configuration's changed figures. Counts are the
best evidence: an all-gather, a copy or a prefetch exists or not. If no count changed, the same work takes
longer, or holds more memory.
"""

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from statistics import median

from fsdpbench.answers.check.metrics import METRICS, communicates
from fsdpbench.answers.check.records.entries import Entry
from fsdpbench.answers.check.thresholds import Thresholds, effect, holm, least_p_value, p_value, runs_needed
from fsdpbench.base.errors import error_text
from fsdpbench.engine.results.records import Status
from fsdpbench.reports.figures import Worse

Entries = Mapping[str, Entry]

_ROUNDING = 1e-12
"""The relative difference that another order of summation may cause."""


@dataclass(frozen=True)
class Change:
    """One figure that differs, or cannot be judged. `before`, `after`: medians over runs, None if unknown.

    chance: p-value of the rank test, adjusted for the number of tests; None for exact figures.
    runs: number on each side.  reason: why it cannot be judged, the cause of a failure, or a contradiction.
    """

    configuration: str
    metric: str
    before: float | str | None
    after: float | str | None
    verdict: "Verdict"
    relative: float | None = None
    chance: float | None = None
    runs: tuple[int, int] = (1, 1)
    reason: str | None = None


@dataclass(frozen=True)
class Comparison:
    """All changes, and configurations that only one side has; also which of the added ones failed.

    absent: configurations of a side without a usable result, with the reason.
    """

    changes: tuple[Change, ...]
    missing: tuple[str, ...]
    added: tuple[str, ...]
    compared: int
    absent: Mapping[str, str] = field(default_factory=dict)
    added_failed: tuple[str, ...] = ()

    @property
    def regressions(self) -> tuple[Change, ...]:
        return self.of(Verdict.WORSE)

    @property
    def unjudged(self) -> list[str]:
        """Return the changes that cannot be judged: configuration, figure, reason."""
        lines = [f"{c.configuration}: {c.metric} {c.reason}" for c in self.of(Verdict.UNKNOWN)]
        lines += [f"{name}: {reason}" for name, reason in self.absent.items()]
        lines += [f"{name}: missing from the newer side" for name in self.missing if name not in self.absent]
        return lines

    def of(self, verdict: "Verdict") -> tuple[Change, ...]:
        return tuple(change for change in self.changes if change.verdict is verdict)


def compare(
    before: Entries,
    after: Entries,
    thresholds: Thresholds,
    absent: Mapping[str, str] | None = None,
    left_out: Collection[str] = (),
) -> Comparison:
    """Return all changes from `before` to `after`, which are entries by configuration name. `left_out`:
    configurations that the older side excludes."""
    both = [name for name in before if name in after]
    found = [each for name in both for each in _changes(name, before[name], after[name], thresholds)]
    added = tuple(name for name in after if name not in before and name not in left_out)
    return Comparison(
        changes=tuple(_corrected(found, thresholds)),
        missing=tuple(name for name in before if name not in after),
        added=added,
        compared=len(both),
        absent={name: reason for name, reason in (absent or {}).items() if name not in left_out},
        added_failed=tuple(name for name in added if not after[name].status.is_answer),
    )


def _changes(name: str, before: Entry, after: Entry, thresholds: Thresholds) -> Iterator[Change]:
    verdict = outcome(before.status, after.status)
    if verdict is not None:
        ended = (before.status.value, after.status.value)
        reason = after.cause
        if verdict is Verdict.UNKNOWN:
            reason = f"was {ended[0]} and is {ended[1]}" + (f" ({reason})" if reason else "")
        yield Change(name, "status", *ended, verdict, reason=reason)
    if Status.OK in (before.status, after.status) and before.device != after.device:
        reason = f"is of {before.device} and of {after.device}"
        yield Change(name, "device", before.device, after.device, Verdict.UNKNOWN, reason=reason)
    elif before.status is after.status is Status.OK:
        for metric in METRICS:
            change = _change(name, metric, before, after, thresholds)
            if change is not None:
                yield change
        for side, flaws in (("older", before.flaws()), ("newer", after.flaws())):
            for figure in (figure for figure in flaws if figure not in METRICS):
                reason = f"{flaws[figure]} on the {side} side"
                yield Change(name, figure, None, None, Verdict.UNKNOWN, reason=reason)
    elif after.status is Status.OK:
        # Ending with OK is no improvement if its figures are invalid.
        for figure, why in after.flaws().items():
            yield Change(name, figure, None, None, Verdict.UNKNOWN, reason=why)


def _change(name: str, metric: str, before: Entry, after: Entry, thresholds: Thresholds) -> Change | None:
    old, new = before.values(metric), after.values(metric)
    problems = _of_sides(before.problem(metric) or before.doubt(metric), after.problem(metric))
    if not problems and bool(old) != bool(new):
        if metric == "overlap_fraction" and not all(communicates(r) for e in (before, after) for r in e.runs):
            # Without communication there is no overlap to judge; the figures of collectives show the change.
            return Change(name, metric, _median(old), _median(new), Verdict.CHANGED)
        problems = ["is known on the newer side alone" if new else "is unknown on the newer side"]
    if problems:
        known = f" (was {_median(old):g})" if old and not new else ""
        return Change(
            name, metric, _median(old), _median(new), Verdict.UNKNOWN, reason=" and ".join(problems) + known
        )
    if not old:
        return None
    doubt = next(iter(_of_sides(None, after.doubt(metric))), None)
    constant = len(set(old)) == len(set(new)) == 1 and len(old) + len(new) > 2
    if before.is_exact or constant:
        change = _exact(name, metric, old, new, thresholds)
        if doubt is None or (change is not None and change.verdict is Verdict.WORSE):
            return change if change is None else replace(change, reason=doubt)
        return Change(name, metric, old[0], new[0], Verdict.UNKNOWN, reason=doubt)
    return replace(_tested(name, metric, old, new), reason=doubt)


def _of_sides(older: str | None, newer: str | None) -> list[str]:
    return [f"{text} on the {side} side" for side, text in (("older", older), ("newer", newer)) if text]


def _exact(
    name: str, metric: str, before: list[float], after: list[float], thresholds: Thresholds
) -> Change | None:
    old, new = before[0], after[0]
    if math.isclose(old, new, rel_tol=_ROUNDING):
        return None
    relative = (new - old) / abs(old) if old else None
    verdict = _direction(metric, new - old)
    if thresholds.allows(metric, old, new):
        verdict = Verdict.ALLOWED
    return Change(name, metric, old, new, verdict, relative, runs=(len(before), len(after)))


def _tested(name: str, metric: str, before: list[float], after: list[float]) -> Change:
    """Return a change of a measured figure. Its verdict is preliminary, because `chance` is not yet adjusted
    for the number of tests."""
    change, runs = effect(before, after), (len(before), len(after))
    verdict, chance = _direction(metric, change), p_value(before, after)
    return Change(name, metric, median(before), median(after), verdict, change, chance, runs)


def _corrected(changes: list[Change], thresholds: Thresholds) -> Iterator[Change]:
    """Yield the changes, with the p-values of all rank tests corrected for their number."""
    tested = [change for change in changes if change.chance is not None]
    too_few = _too_few(tested, thresholds.measured.level)
    chances = iter(holm([change.chance or 0.0 for change in tested]))
    for change in changes:
        if change.chance is None:
            yield change
            continue
        chance = next(chances)
        if too_few:
            yield replace(change, chance=None, verdict=Verdict.UNKNOWN, reason=too_few)
        else:
            yield _judged(change, chance, thresholds)


def _judged(change: Change, chance: float, thresholds: Thresholds) -> Change:
    """Return a tested figure with its verdict. A contradicted figure may be worse, but not better."""
    size, tested = change.relative or 0.0, replace(change, chance=chance)
    certain = chance < thresholds.measured.level and abs(size) >= thresholds.least_effect(change.metric)
    assert isinstance(change.before, int | float)
    assert isinstance(change.after, int | float)
    if certain and (change.after - change.before) * size <= 0:
        reason = "has medians that say another thing than the ranks of its runs"
        return replace(tested, verdict=Verdict.UNKNOWN, reason=reason)
    if change.reason and not (certain and change.verdict is Verdict.WORSE):
        return replace(tested, verdict=Verdict.UNKNOWN)
    return tested if certain else replace(tested, verdict=Verdict.NOISE)


def _too_few(tested: list[Change], level: float) -> str | None:
    """Return why the rank tests have too few runs to reach `level`; None if they can reach it."""
    if not tested:
        return None
    fewest = min(tested, key=lambda change: min(change.runs))
    if least_p_value(*fewest.runs) * len(tested) <= level:
        return None
    needed = runs_needed(level / len(tested))
    return error_text("compare.few_runs", fewest.runs[0], fewest.runs[1], level, len(tested), needed, needed)


def _direction(metric: str, change: float) -> "Verdict":
    worse = METRICS[metric].worse
    if worse is Worse.NEITHER:
        return Verdict.CHANGED
    return Verdict.WORSE if (change > 0) == (worse is Worse.HIGHER) else Verdict.BETTER


def _median(values: list[float]) -> float | None:
    return median(values) if values else None


# The meaning of a changed status of a configuration: the table in docs/gate.md.


class Verdict(StrEnum):
    """The meaning of one change, most important first. UNKNOWN: it cannot be judged. NOISE: the runs show no
    significant change."""

    WORSE = "worse"
    UNKNOWN = "unknown"
    BETTER = "better"
    CHANGED = "changed"
    ALLOWED = "allowed"
    NOISE = "noise"


def outcome(before: Status, after: Status) -> "Verdict | None":
    """Return the verdict on the status of a configuration; None if it is unchanged and its figures decide."""
    if before is after and before.is_answer:
        return None
    if after is Status.OK:
        return Verdict.BETTER
    if before is Status.OK or (before.is_answer and not after.is_answer):
        return Verdict.WORSE
    return Verdict.UNKNOWN


_MEMORY = ("peak_allocated_bytes", "peak_active_bytes", "peak_reserved_bytes")
_COUNTS = ("all_gather_count", "reduce_scatter_count", "all_reduce_count", "kernels", "copies")

_WORTH_SAYING = 0.0005
"""A smaller change would be shown as 0.0 %, and does not come from the kernels themselves."""

Changes = Mapping[str, Change]
Rule = Callable[[Changes], str | None]


@dataclass(frozen=True)
class Finding:
    """A likely cause. `cause`: an identifier; `sentence`: its text; `configurations`: where it was found."""

    cause: str
    sentence: str
    configurations: tuple[str, ...]


def diagnose(comparison: Comparison) -> list[Finding]:
    """Return the likely causes of the regressions, each with its configurations, in the rules' order."""
    by_configuration: dict[str, dict[str, Change]] = {}
    for change in comparison.changes:
        if change.verdict not in (Verdict.NOISE, Verdict.UNKNOWN):
            by_configuration.setdefault(change.configuration, {})[change.metric] = change
    regressed = {
        name: changes
        for name, changes in by_configuration.items()
        if any(change.verdict is Verdict.WORSE for change in changes.values())
    }
    found = [each for cause, rule in _RULES.items() for each in _finding(cause, rule, regressed)]
    explained = {name for finding in found for name in finding.configurations}
    unexplained = {name: changes for name, changes in regressed.items() if name not in explained}
    return found + _finding("slower_step", _slower_step, unexplained)


def _finding(cause: str, rule: Rule, regressed: Mapping[str, Changes]) -> list[Finding]:
    sentences = {name: sentence for name, changes in regressed.items() if (sentence := rule(changes))}
    return [Finding(cause, next(iter(sentences.values())), tuple(sentences))] if sentences else []


def _outcome(changes: Changes) -> str | None:
    change = changes.get("status")
    if change is None:
        return None
    why = f" ({change.reason})" if change.reason else ""
    return f"it ended with {change.after} and not with {change.before}{why}"


def _collective(kind: str, name: str) -> Rule:
    def rule(changes: Changes) -> str | None:
        more = _rise(changes, f"{kind}_count")
        if more > 0:
            return f"{more:g} more {name}s a step: something is communicated again, or by more units"
        if _rise(changes, f"{kind}_bytes") and f"{kind}_count" not in changes:
            return f"as many {name}s move more bytes: a wider dtype, or more padding"
        return None

    return rule


def _risen(metric: str, words: str, sign: int = 1) -> Rule:
    """Return a rule for a figure that rose (`sign` -1: fell); `MORE` in `words` becomes the difference."""

    def rule(changes: Changes) -> str | None:
        more = sign * _rise(changes, metric)
        return words.replace("MORE", f"{more:g}") if more > 0 else None

    return rule


def _limiter(changes: Changes) -> str | None:
    change = changes.get("limiter_waits")
    if change is None or not isinstance(change.after, int | float) or _rise(changes, "limiter_waits") >= 0:
        return None
    done = "no longer waits" if change.after == 0 else "waits less often"
    return f"the rate limiter {done}: the CPU runs ahead, and gathered parameters pile up"


def _kernels(changes: Changes) -> str | None:
    more = _rise(changes, "kernels")
    return f"{more:g} more kernels a step" if more > 0 and _rise(changes, "copies") <= 0 else None


def _slower_work(changes: Changes) -> str | None:
    change = changes.get("compute_s")
    if change is None or change.verdict is not Verdict.WORSE or (change.relative or 0.0) < _WORTH_SAYING:
        return None
    if not changes.keys().isdisjoint((*_COUNTS, "prefetched_all_gathers")):
        return None
    return f"the same kernels take {change.relative:.1%} more time"


def _memory(changes: Changes) -> str | None:
    worse = [name for name in _MEMORY if name in changes and changes[name].verdict is Verdict.WORSE]
    if not worse:
        return None
    shares = [f"{name[5:-6]} {changes[name].relative or 0.0:+.1%}" for name in worse]
    return f"more memory at the peak: {', '.join(shares)}"


def _retries(changes: Changes) -> str | None:
    more = _rise(changes, "alloc_retries_per_step")
    noun = "retry" if more == 1 else "retries"
    why = "memory is short, and each waits for the device and gives the cache back"
    return f"{more:g} more allocator {noun} a step: {why}" if more > 0 else None


def _slower_step(changes: Changes) -> str | None:
    """Report that a step takes longer, if no other figure explains it (as on a real machine)."""
    for name in ("step_time_s", "fastest_step_s"):
        change = changes.get(name)
        if change is not None and change.verdict is Verdict.WORSE and change.relative is not None:
            return f"a step takes {change.relative:.1%} more time"
    return None


_RULES: dict[str, Rule] = {
    "outcome": _outcome,
    "more_all_gathers": _collective("all_gather", "all-gather"),
    "more_reduce_scatters": _collective("reduce_scatter", "reduce-scatter"),
    "more_all_reduces": _collective("all_reduce", "all-reduce"),
    "less_prefetch": _risen("prefetched_all_gathers", error_text("compare.less_prefetch"), sign=-1),
    "limiter_off": _limiter,
    "more_retries": _retries,
    "more_copies": _risen("copies", "MORE more copies a step (kernels and memcpy that only move data)"),
    "more_kernels": _kernels,
    "slower_kernels": _slower_work,
    "more_memory": _memory,
}


def _rise(changes: Changes, metric: str) -> float:
    """Return by how much a figure rose; 0 if it did not change."""
    change = changes.get(metric)
    if change is None:
        return 0.0
    before, after = (v if isinstance(v, int | float) else 0 for v in (change.before, change.after))
    return after - before
