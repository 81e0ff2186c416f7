"""What the terminal says of the sanitizer's findings."""

from __future__ import annotations

import textwrap

from fsdpbench.reports.result import Access, Result

_TOLD = 5


def sanitizer_notes(result: Result, width: int | None = None) -> list[str]:
    """Lines for a reader of `result`, folded at `width`; none where the sanitizer did not run."""
    found = result.sanitizer
    if found is None:
        return []
    findings = sorted(found.findings, key=lambda each: -each.count)
    count = len(findings)
    if count:
        lines = [f"sanitizer: {count} {'finding' if count == 1 else 'findings'}, the most frequent first"]
    else:
        lines = [f"sanitizer: no race in {found.accesses:,} uses of memory"]
    for finding in findings[:_TOLD]:
        kind = finding.kind.replace("_", " ")
        times = "once" if finding.count == 1 else f"{finding.count:,} times"
        lines.append(f"  {kind}, {times}, {finding.bytes:,} bytes ({finding.role}):")
        lines += [f"    {_told(side)}" for side in (finding.first, finding.second)]
        lines.append(f"    {finding.hint}")
    if count > _TOLD:
        lines.append(f"  {count - _TOLD} more in result.json and in the report")
    for hint in found.hints[:_TOLD]:
        times = "once" if hint.count == 1 else f"{hint.count:,} times"
        where = hint.stack[0].split(" ")[0] if hint.stack else "unknown"
        lines.append(f"  hint, {times}, at {where}: {hint.hint}")
    return [part for line in lines for part in _folded(line, width)]


def _told(access: Access) -> str:
    """One access in a line."""
    where = access.line
    if access.forward_line:
        where += f", backward of {access.forward_line}"
    unit = f", {access.unit}" if access.unit else ""
    return f"{access.access:5} {access.operation} at {where}; {access.stream}, {access.phase}{unit}"


def _folded(line: str, width: int | None) -> list[str]:
    if width is None or len(line) <= width:
        return [line]
    indent = " " * (len(line) - len(line.lstrip()) + 6)
    return textwrap.wrap(
        line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
