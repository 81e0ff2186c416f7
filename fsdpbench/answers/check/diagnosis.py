"""The likely cause of what became worse, by the pattern of a configuration's changed figures.

Counts say most: an all-gather, a copy or a prefetch is there or not. Where no count changed, the same work
takes longer, or holds more memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from fsdpbench.answers.check.compare import Change, Comparison, Verdict

_MEMORY = ("peak_allocated_bytes", "peak_active_bytes", "peak_reserved_bytes")
_COUNTS = ("all_gather_count", "reduce_scatter_count", "all_reduce_count", "kernels", "copies")

_WORTH_SAYING = 0.0005
"""Less than this would be shown as 0.0 %: the kernels' neighbours changed, not they."""

Changes = Mapping[str, Change]
Rule = Callable[[Changes], str | None]


@dataclass(frozen=True)
class Finding:
    """`cause`: a word for programs; `sentence`: for people; `configurations`: where it was found."""

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
    """Return a rule for a figure that rose (`sign` -1: fell); `words` say by how much: `MORE`."""

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
    """Return that a step takes longer, where no other figure says why (as on a real machine)."""
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
    "less_prefetch": _risen(
        "prefetched_all_gathers",
        "MORE fewer all-gathers of the trace were issued ahead of their unit's turn: prefetch is off or "
        "shallower",
        sign=-1,
    ),
    "limiter_off": _limiter,
    "more_retries": _retries,
    "more_copies": _risen("copies", "MORE more copies a step (kernels and memcpy that only move data)"),
    "more_kernels": _kernels,
    "slower_kernels": _slower_work,
    "more_memory": _memory,
}


def _rise(changes: Changes, metric: str) -> float:
    """Return by how much a figure rose; 0 where it did not change."""
    change = changes.get(metric)
    if change is None:
        return 0.0
    before, after = (v if isinstance(v, int | float) else 0 for v in (change.before, change.after))
    return after - before
