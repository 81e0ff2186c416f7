"""A comparison of two traces as plain text."""

from __future__ import annotations

from collections.abc import Sequence

from fsdpbench.reports.analysis.words.trace_diff import Change, NameChange, TraceDiff
from fsdpbench.reports.hta_text import printable

_MS = 1e6
_MIB = 2**20
_MOST_NAMES = 12
_MOST_UNITS = 6
_WORTH_NS = 1000
"""Changes of time below a microsecond a step are not told."""


def describe_diff(diff: TraceDiff) -> str:
    """What changed, the step first, then what it is made of."""
    lines = [
        f"rank {diff.after.rank}: {diff.after.path}",
        f"  against rank {diff.before.rank}: {diff.before.path}",
    ]
    for side, rank in (("before", diff.before), ("after", diff.after)):
        if not rank.trusted:
            lines.append(f"  NOT trusted ({side}): {rank.warnings[0]}")
    lines.append(f"  {_sentence(diff)}")
    lines += _section("where", [diff.step, *diff.parts], worth=0)
    lines += _section("phase", diff.phases)
    lines += _section("idle because of", diff.idle)
    lines += _collectives(diff)
    lines += _section("unit, exposed", diff.units[:_MOST_UNITS])
    lines += [
        f"  {each.name.replace('_', ' '):<24}{each.before / _MIB:12.1f} {each.after / _MIB:12.1f} MiB "
        f"{_signed(each.by / _MIB, 1):>10}"
        for each in diff.memory
        if each.by
    ]
    lines += _names(diff.names)
    return "\n".join(printable(line) for line in lines)


def _sentence(diff: TraceDiff) -> str:
    step = diff.step
    if abs(step.by) < _WORTH_NS:
        return f"A step takes as long as before, {step.after / _MS:.3f} ms."
    share = f" ({100 * step.by / step.before:+.2f} %)" if step.before else ""
    longer = "longer" if step.by > 0 else "shorter"
    mine = max(diff.parts, key=lambda part: part.by * (1 if step.by > 0 else -1))
    told = f"A step takes {abs(step.by) / _MS:.3f} ms{share} {longer}, "
    told += f"most of it {mine.name.replace('_', ' ')} ({_signed(mine.by / _MS, 3)} ms)."
    return told


def _section(title: str, changes: Sequence[Change], worth: int = _WORTH_NS) -> list[str]:
    shown = [each for each in changes if abs(each.by) >= worth]
    if not shown:
        return []
    return [
        f"  {title + ', ms':<24}{'before':>12} {'after':>12} {'change':>12}",
        *(
            f"    {each.name.replace('_', ' ')[:21]:<22}{each.before / _MS:12.3f} {each.after / _MS:12.3f} "
            f"{_signed(each.by / _MS, 3):>12}"
            for each in shown
        ),
    ]


def _collectives(diff: TraceDiff) -> list[str]:
    lines = []
    for kind, changes in diff.collectives.items():
        told = []
        for each in changes:
            if each.name == "count" and each.by:
                told.append(f"{each.before:g} -> {each.after:g} a step")
            elif each.name == "bytes" and each.by:
                told.append(f"{each.before / 1e6:.1f} -> {each.after / 1e6:.1f} MB")
            elif each.name in ("time", "exposed") and abs(each.by) >= _WORTH_NS:
                told.append(f"{each.name} {_signed(each.by / _MS, 3)} ms")
        if told:
            lines.append(f"  {kind.replace('_', '-')}: {', '.join(told)}")
    return lines


def _names(names: Sequence[NameChange]) -> list[str]:
    shown = [each for each in names if abs(each.time.by) >= _WORTH_NS or each.count.by]
    if not shown:
        return ["  what ran is the same, by name, count and time"]
    lines = ["  what ran, a step: change of time, count before and after"]
    lines += [
        f"    {_signed(each.time.by / _MS, 3):>12} ms  {each.count.before:g} -> {each.count.after:g}"
        f"{_how(each)}  {each.name[:90]}"
        for each in shown[:_MOST_NAMES]
    ]
    if len(shown) > _MOST_NAMES:
        lines.append(f"    and {len(shown) - _MOST_NAMES} names more")
    return lines


def _how(each: NameChange) -> str:
    if not each.count.before:
        return " (new)"
    return " (gone)" if not each.count.after else ""


def _signed(value: float, digits: int) -> str:
    return f"{value:+.{digits}f}"
