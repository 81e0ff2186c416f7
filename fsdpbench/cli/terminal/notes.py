"""Notes printed below the figures of `fsdpbench run`: ranks, decisions, files, races, buffers, a soak."""

import json
import re
import textwrap
from pathlib import Path

from fsdpbench.base.files.documents import rendered_beside
from fsdpbench.reports.result import Result

_SETTINGS = re.compile(r" \([a-z_]+=[^()]*\)")
_COSTS = {"exposed_communication": "communication that nothing hides", "idle": "an idle GPU"}


def describe_script(result: Result) -> list[str]:
    """Return lines on a measured script: memory, MFU, its largest cost. Empty without figures."""
    if not result.script or not result.step_time_s:
        return []
    parts = result.time_s
    cost = max(_COSTS, key=lambda name: float(getattr(parts, name))) if parts else ""
    # Remove names of bench settings, which a script does not have.
    verdict = _SETTINGS.sub("", (result.verdict or {}).get("sentence") or "")
    capacity = (result.machine.get("memory_bytes") or 0) / 2**30
    return _section("figures", result=result, capacity=capacity, cost=cost, costs=_COSTS, verdict=verdict)


def script_notes(result: Result) -> list[str]:
    """Return notes on a script: comparison of ranks (both stacks of a difference, the script's own lines
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
    """Render a section of the template and return its lines."""
    return rendered_beside(__file__, "notes.jinja", section=name, **values).splitlines()


def buffer_notes(result: Result) -> list[str]:
    """Return a line about dropped and empty rows of expert buffers; none without a capacity."""
    return _section("buffers", **result.buffer_rows) if result.buffer_rows else []


def sanitizer_notes(result: Result, width: int | None = None) -> list[str]:
    """Return the sanitizer's findings, wrapped to `width` columns; none if it did not run."""
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
