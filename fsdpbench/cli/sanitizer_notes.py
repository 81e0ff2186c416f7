"""What the terminal says of the sanitizer's findings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_TOLD = 5
_WORDS = {
    "race": "race",
    "use_after_free": "use after free",
    "read_before_ready": "used before ready",
}


def sanitizer_notes(result: Mapping[str, Any]) -> list[str]:
    """Lines for a reader of `result`; none where the sanitizer did not run."""
    found = result.get("sanitizer")
    if found is None:
        return []
    findings = found["findings"]
    if not findings:
        hints = len(found.get("hints", ()))
        told = f"; {hints} {'hint' if hints == 1 else 'hints'} in result.json" if hints else ""
        return [f"sanitizer: no race in {found['accesses']:,} uses of memory{told}"]
    count = len(findings)
    lines = [f"sanitizer: {count} {'finding' if count == 1 else 'findings'}"]
    for finding in findings[:_TOLD]:
        times = "once" if finding["count"] == 1 else f"{finding['count']} times"
        lines.append(f"  {_WORDS[finding['kind']]}, {times}, {finding['bytes']:,} bytes ({finding['role']}):")
        lines += [f"    {_told(finding[side])}" for side in ("first", "second")]
        lines.append(f"    {finding['hint']}")
    if count > _TOLD:
        lines.append(f"  {count - _TOLD} more in result.json")
    return lines


def _told(access: Mapping[str, Any]) -> str:
    """One access in a line."""
    where = access["line"]
    if access.get("forward_line"):
        where += f", backward of {access['forward_line']}"
    unit = f", {access['unit']}" if access.get("unit") else ""
    what = f"{access['access']:5} {access['operation']} on {access['stream']}"
    return f"{what} in {access['phase']}{unit} at {where}"
