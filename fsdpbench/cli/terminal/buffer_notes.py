"""What a capacity of experts' buffers cost, in words."""

from __future__ import annotations

from fsdpbench.reports.result import Result


def buffer_notes(result: Result) -> list[str]:
    """A line about dropped rows and empty places of `result`; none without a capacity."""
    rows = result.buffer_rows
    if not rows:
        return []
    sent, dropped, empty = rows["sent"], rows["dropped"], rows["empty"]
    return [
        f"note: the experts' capacity drops {dropped / max(sent, 1):.1%} of their rows ({dropped:,.0f} of "
        f"{sent:,.0f} a step), and {empty / max(sent - dropped + empty, 1):.1%} of what they compute are "
        "empty places, which MFU does not count"
    ]
