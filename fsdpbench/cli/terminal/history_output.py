"""What `check --history` prints, and its page."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from fsdpbench.base.errors import BenchError
from fsdpbench.cli.output import show, show_json, tell

if TYPE_CHECKING:
    from fsdpbench.answers.check.history import History
    from fsdpbench.reports.pages.history_page import StepGroup


def show_history(history: History, form: str, output: Path | None) -> None:
    """Text, `json` or `md` on stdout, the page at `output`. Raises `BenchError` if it cannot be written."""
    from fsdpbench.reports.pages.history_page import step_groups, write_history_page

    content = history.to_dict()
    groups = step_groups(content)
    if form == "json":
        show_json(content)
    elif form == "md":
        show("\n".join(_markdown(groups)))
    else:
        commits = len(history.commits)
        show(f"{history.path}: {commits} commit{'s' if commits != 1 else ''}, {len(history.steps)} steps")
        show("\n".join(_lines(groups)) if groups else "no figure changed its level")
    for note in history.notes:
        tell(f"note: {note}")
    if output is None:
        return
    try:
        write_history_page(content, output)
    except OSError as error:
        raise BenchError(f"{output}: cannot be written ({error.strerror})") from None
    tell(f"wrote {output}")


def _lines(groups: list[StepGroup]) -> list[str]:
    """Newest first: a line a commit, below it one a figure."""
    lines: list[str] = []
    last: str | None = ""
    for group in groups:
        if group.revision != last:
            lines.append(f"{(group.revision or 'now')[:9]} {group.date} {group.subject}".rstrip())
            last = group.revision
        count = f"{group.configurations} configuration{'s' if group.configurations > 1 else ''}"
        lines.append(f"  {group.word:<8}{group.metric:<26}{group.change_words}, {count}")
    return lines


def _markdown(groups: list[StepGroup]) -> list[str]:
    rows = [
        f"| {(group.revision or 'now')[:9]} | {group.subject.replace('|', '/')} | {group.metric} "
        f"| {group.configurations} | {group.change_words} | {group.word} |"
        for group in groups
    ]
    return [
        "| commit | subject | figure | configurations | change | for the |",
        "|---|---|---|---|---|---|",
        *rows,
    ]
