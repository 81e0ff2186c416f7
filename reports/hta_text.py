"""What HTA says about a trace, in a few lines; what it cannot do with a trace is reported and left out."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fsdpbench.reports.hta_check import (
    hta_critical_path,
    hta_idle_causes,
    hta_overlap,
    hta_queue_length,
    hta_trace_diff,
)

_MOST_NAMES = 8


def hta_opinion(trace: Path) -> dict[str, Any]:
    """Its overlap, the first step's critical path (s), idle causes (s) and mean queue length by stream; of a
    figure that it cannot find, the reason as text."""
    return {
        "trace": str(trace),
        "overlap_fraction": _tried(lambda: hta_overlap({0: trace})[0]),
        "critical_path_s": _tried(lambda: hta_critical_path(trace, 0)),
        "idle_causes_s": _tried(lambda: hta_idle_causes(trace)),
        "queue_length": _tried(lambda: hta_queue_length(trace)),
    }


def hta_changes(before: Path, after: Path) -> dict[str, Any]:
    """Its trace diff: kernels whose count or time changed, most first; or the reason why there is none."""
    found = _tried(lambda: hta_trace_diff(before, after))
    if isinstance(found, str):
        return {"kernels": found}
    changed = {name: row for name, row in found.items() if row[0] != row[1] or row[2] != row[3]}
    ordered = sorted(changed, key=lambda name: -abs(changed[name][3] - changed[name][2]))
    keys = ("count_before", "count_after", "time_before_s", "time_after_s")
    return {"kernels": {name: dict(zip(keys, changed[name], strict=True)) for name in ordered}}


def describe_opinion(opinion: Mapping[str, Any]) -> str:
    """`hta_opinion` for a terminal."""
    overlap = opinion["overlap_fraction"]
    lines = [
        f"HolisticTraceAnalysis on {opinion['trace']}",
        f"  overlap             {overlap if isinstance(overlap, str) else f'{100 * overlap:.2f} %'}",
        f"  critical path       {_times(opinion['critical_path_s'])}",
    ]
    for words, key, told in (
        ("idle, stream", "idle_causes_s", _times),
        ("queue, stream", "queue_length", lambda mean: f"{mean:.1f} kernels wait on average"),
    ):
        found = opinion[key]
        if isinstance(found, str):
            lines.append(f"  {words:<20}{found}")
        else:
            lines += [f"  {f'{words} {stream}':<20}{told(each)}" for stream, each in sorted(found.items())]
    return "\n".join(printable(line) for line in lines)


def describe_changes(changes: Mapping[str, Any]) -> str:
    """`hta_changes` for a terminal."""
    kernels = changes["kernels"]
    if isinstance(kernels, str):
        return f"HolisticTraceAnalysis, trace diff: {kernels}"
    lines = ["HolisticTraceAnalysis, trace diff: change of time, count before and after (all steps)"]
    for name in list(kernels)[:_MOST_NAMES]:
        row = kernels[name]
        change = 1e3 * (row["time_after_s"] - row["time_before_s"])
        lines.append(f"  {change:+12.3f} ms  {row['count_before']:g} -> {row['count_after']:g}  {name[:90]}")
    return "\n".join(printable(line) for line in lines)


def _tried(question: Callable[[], Any]) -> Any:
    """HTA's answer, or its error as a line: it fails in many ways on traces that lack what it expects."""
    from fsdpbench.reports.hta_check import HtaMissingError

    try:
        return question()
    except HtaMissingError:
        raise
    except Exception as error:
        return f"not found ({type(error).__name__}: {str(error).splitlines()[0][:120] if str(error) else ''})"


def _times(found: Any) -> str:
    if isinstance(found, str):
        return found
    return (
        ", ".join(f"{name.replace('_', ' ')} {1e3 * time:.3f} ms" for name, time in found.items()) or "none"
    )


# Text that comes from outside, made fit for one line of a terminal, a log or a Markdown table.
# Names, paths, causes and values may hold anything: escape sequences that a terminal obeys, line breaks that
# make one line two, a megabyte. What is shown of them is printable and bounded.

LONGEST_LINE = 1000
_NOT_PRINTABLE = re.compile(
    "[\x00-\x1f\x7f-\x9f\xad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\ud800-\udfff]"
)
"""C0 and C1 controls, line and paragraph separators, what is invisible or turns the direction of writing, and
halves of surrogate pairs (bytes of a path that are not UTF-8)."""


def printable(text: object) -> str:
    """`text` on one line: each control character is replaced by its escape, as in `\\x1b`."""
    return _NOT_PRINTABLE.sub(_escaped, str(text))


def printable_lines(text: object) -> str:
    """`printable` for what is made of lines: those stay."""
    return "\n".join(printable(line) for line in str(text).split("\n"))


def one_line(text: object, longest: int = LONGEST_LINE) -> str:
    """`printable`, and no longer than `longest`: of more, beginning and end are kept."""
    whole = str(text)
    if len(whole) <= longest:
        whole = printable(whole)
    if len(whole) <= longest:
        return whole
    # The beginning names the thing, the end says the way out.
    left_out = f" … {len(whole) - longest:,} characters … "
    head, tail = 2 * longest // 3, longest // 3 - len(left_out)
    return f"{printable(whole[:head])[:head]}{left_out}{printable(whole[-tail:])[-tail:]}"


def all_on_one_line(tree: Any, longest: int = 4 * LONGEST_LINE) -> Any:
    """What JSON holds, with `one_line` of each text in it. Raises `RecursionError` if it is too deep."""
    if isinstance(tree, str):
        return one_line(tree, longest)
    if isinstance(tree, list):
        return [all_on_one_line(item, longest) for item in tree]
    if isinstance(tree, dict):
        return {one_line(key, longest): all_on_one_line(item, longest) for key, item in tree.items()}
    return tree


def _escaped(found: re.Match[str]) -> str:
    code = ord(found[0])
    known = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}.get(found[0])
    return known or (f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}")
