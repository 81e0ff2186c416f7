"""`fsdpbench compare`: is B worse than A? Exit 0 no, 1 yes, 3 cannot judge."""

from __future__ import annotations

from pathlib import Path

import click

from fsdpbench.cli.terminal.comparison_output import finish, format_options
from fsdpbench.cli.values import PossiblePath


@click.command("compare")
@click.argument("before", metavar="A", type=PossiblePath())
@click.argument("after", metavar="B", type=PossiblePath())
@click.option(
    "--thresholds",
    type=PossiblePath(),
    help="TOML file with the changes that are allowed (example: ci/thresholds.toml).",
)
@format_options
def command(before: Path, after: Path, thresholds: Path | None, form: str, as_json: bool) -> None:
    """Say whether B is worse than A: run folders, configuration folders, result files or baselines.

    \b
    fsdpbench compare runs/before runs/after

    Simulated figures are exact: any worse figure is a regression. Measured figures are compared over the runs
    of `sweep --repeat N`: a change is a regression if a rank test finds it significant and it is large
    enough. Two configuration folders of one sweep are compared even if their settings differ.
    """
    from fsdpbench.answers.check.compare import compare
    from fsdpbench.answers.check.records.sides import absent_of, notes_on, paired, read_side, require_common
    from fsdpbench.answers.check.records.surroundings import require_alike
    from fsdpbench.answers.check.thresholds import read_thresholds

    allowed = read_thresholds(thresholds)
    first, second = read_side(before), read_side(after)
    require_alike(first.surroundings, second.surroundings)
    old, new = paired(first, second)
    require_common(old, new)
    form = "json" if as_json else form
    comparison = compare(old, new, allowed, absent_of(first, second), first.left_out)
    finish(comparison, second.entries, form, notes_on(first, second))
