"""How `compare` and `check` say what they found: four formats, and the exit code."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import click

from fsdpbench.base.errors import CannotJudgeError, ExitCode, SomeFailedError
from fsdpbench.base.reading import one_line
from fsdpbench.cli.output import show

if TYPE_CHECKING:
    from fsdpbench.answers.check.compare import Comparison
    from fsdpbench.answers.check.records.entries import Entry

F = TypeVar("F", bound=Callable[..., Any])

_TOLD = 3
_LONGEST = 500
_FORMATS = ("text", "md", "json", "github-benchmark")


def format_options(function: F) -> F:
    """`--format` and `--json`."""
    function = click.option("--json", "as_json", is_flag=True, help="Same as --format json.")(function)
    return click.option(
        "--format",
        "form",
        type=click.Choice(_FORMATS),
        default="text",
        help="Output: text, Markdown, JSON, or the figures of B for github-action-benchmark.",
    )(function)


def finish(comparison: Comparison, after: Mapping[str, Entry], form: str, notes: Sequence[str] = ()) -> None:
    """Print the comparison and end with its exit code: 0, 1 for a regression, 3 if something cannot be
    judged, 4 if a configuration failed that the older side does not have; of several the first."""
    from fsdpbench.answers.check.text import as_github_benchmark, as_json, as_markdown, as_text

    if form == "github-benchmark":
        show(as_github_benchmark(after))
    else:
        told = {"text": as_text, "md": as_markdown, "json": as_json}[form](comparison, notes)
        show(told)
    if comparison.regressions:
        raise click.exceptions.Exit(int(ExitCode.REGRESSION))
    unjudged = comparison.unjudged
    if unjudged or not comparison.compared:
        raise CannotJudgeError(
            f"cannot judge {_named(unjudged) or 'anything: no configuration is on both sides'}"
        )
    if comparison.added_failed:
        raise SomeFailedError(f"failed, and new on this side: {_named(comparison.added_failed)}")


def _named(lines: Sequence[str]) -> str:
    more = len(lines) - _TOLD
    return "; ".join(one_line(line, _LONGEST) for line in lines[:_TOLD]) + (
        f"; and {more} more" if more > 0 else ""
    )
