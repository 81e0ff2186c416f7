"""Lines below the figures of `fsdpbench run`: ranks, decisions, files, data races, buffers, a soak."""

import json
import re
import textwrap
from pathlib import Path

import msgspec

from fsdpbench.base.files.documents import rendered_beside
from fsdpbench.reports.result import Result

_GIB = 2**30
_SETTINGS = re.compile(r" \([a-z_]+=[^()]*\)")
_COSTS = {
    "exposed_communication": "communication that nothing hides",
    "idle": "an idle GPU",
}


def describe_script(result: Result) -> list[str]:
    """Return lines on a measured script: memory, MFU, its largest cost. Empty without figures."""
    if not result.script or not result.step_time_s:
        return []
    parts = []
    if result.reserved:
        capacity = result.machine.get("memory_bytes")
        of = f" of {capacity / _GIB:.1f}" if capacity else ""
        parts.append(f"{result.reserved / _GIB:.1f}{of} GiB reserved at the peak")
    if result.mfu:
        parts.append(f"MFU {result.mfu:.1%}")
    lines = [", ".join(parts)] if parts else []
    largest = _largest_cost(result)
    return [*lines, largest] if largest else lines


def _largest_cost(result: Result) -> str | None:
    """Return a sentence on the largest cost of a step beside computing; None without a trace."""
    if (parts := result.time_s) is None or not (total := sum(msgspec.structs.astuple(parts))):
        return None
    name = max(_COSTS, key=lambda each: float(getattr(parts, each)))
    seconds, computing = getattr(parts, name), (parts.compute_only + parts.overlapped) / total
    cost = f"{_COSTS[name]}, {seconds / total:.1%}"
    text = f"{computing:.0%} of a step computes; the largest cost beside it: {cost}"
    verdict = (result.verdict or {}).get("sentence")
    # Without the settings of the bench that it names: a script has none of them.
    return f"{text}. {_SETTINGS.sub('', verdict)}" if verdict else text


def script_notes(result: Result) -> list[str]:
    """Return notes on a script: comparison of ranks (of a difference both stacks, the script's own lines
    first), decided values, redirected files."""
    files = result.redirected_files if isinstance(result.redirected_files, dict) else {}
    return _section(
        "script",
        check=result.rank_check,
        cause=str(result.message),
        gpus=int((result.config or {})["gpus"]),
        decisions=sorted(result.placeholder_decisions or [], key=lambda each: -each.count),
        json=json.dumps,
        files=files,
        folder=Path(result.folder or "") / files.get("folder", ""),
    )


def _section(name: str, **values: object) -> list[str]:
    """Return the lines of a section of the template."""
    return rendered_beside(__file__, "notes.jinja", section=name, **values).splitlines()


def buffer_notes(result: Result) -> list[str]:
    """Return a line about dropped rows and empty places; none without a capacity."""
    rows = result.buffer_rows
    if not rows:
        return []
    sent, dropped, empty = rows["sent"], rows["dropped"], rows["empty"]
    return [
        f"note: the experts' capacity drops {dropped / max(sent, 1):.1%} of their rows ({dropped:,.0f} of "
        f"{sent:,.0f} a step), and {empty / max(sent - dropped + empty, 1):.1%} of what they compute are "
        "empty places, which MFU does not count"
    ]


def sanitizer_notes(result: Result, width: int | None = None) -> list[str]:
    """Return the sanitizer's findings, folded at `width` columns; none where it did not run."""
    found = result.sanitizer
    if found is None:
        return []
    findings = sorted(found.findings, key=lambda each: -each.count)
    lines = _section("sanitizer", findings=findings, hints=found.hints, accesses=found.accesses)
    return [part for line in lines for part in _folded(line, width)]


def _folded(line: str, width: int | None) -> list[str]:
    if width is None or len(line) <= width:
        return [line]
    indent = " " * (len(line) - len(line.lstrip()) + 6)
    return textwrap.wrap(
        line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def soak_notes(result: Result) -> list[str]:
    """Return lines on a soak: steps, retries, memory. Empty without a soak."""
    soak = result.soak
    if soak is None:
        return []
    fragments = max((value or 0 for value in soak.over_steps.inactive_split), default=0)
    return _section("soak", soak=soak, fragments=fragments)
