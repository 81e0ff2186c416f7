"""How `compare` and `check` say what they found: four formats, and the exit code."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import click

from fsdpbench.errors import CannotJudgeError, ExitCode

if TYPE_CHECKING:
    from fsdpbench.check.compare import Comparison
    from fsdpbench.check.entries import Entry

F = TypeVar("F", bound=Callable[..., Any])

_FORMATS = ("text", "md", "json", "github-benchmark")


def format_options(function: F) -> F:
    """`--format` and `--json`."""
    function = click.option("--json", "as_json", is_flag=True, help="Same as --format json.")(function)
    return click.option(
        "--format",
        "form",
        type=click.Choice(_FORMATS),
        default="text",
        help="text, Markdown, JSON, or the newer side's figures as github-action-benchmark reads them.",
    )(function)


def finish(comparison: Comparison, after: Mapping[str, Entry], form: str, notes: Sequence[str] = ()) -> None:
    """Print the comparison and end with its exit code: 0, 1 for a regression, 3 if it cannot be judged."""
    from fsdpbench.check.github import as_github_benchmark
    from fsdpbench.check.text import as_json, as_markdown, as_text

    if form == "github-benchmark":
        click.echo(as_github_benchmark(after))
    else:
        shown = {"text": as_text, "md": as_markdown, "json": as_json}[form](comparison, notes)
        click.echo(shown, nl=not shown.endswith("\n"))
    if comparison.regressions:
        raise click.exceptions.Exit(int(ExitCode.REGRESSION))
    if comparison.missing or not comparison.compared:
        raise CannotJudgeError(
            f"{len(comparison.missing)} configurations of the older side are missing from the newer: "
            f"{', '.join(comparison.missing[:3]) or 'nothing to compare'}"
        )
