"""`fsdpbench baseline`: make a baseline from a sweep, or bring one up to date."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fsdpbench.cli.values import MOST_RUNS, PossiblePath, whole

if TYPE_CHECKING:
    from fsdpbench.check.baseline import Baseline
    from fsdpbench.check.sides import Side


@click.group("baseline")
def command() -> None:
    """Make a baseline from a sweep's folder, or bring one up to date."""


@command.command("create")
@click.argument("folder", type=PossiblePath())
@click.argument("file", type=PossiblePath())
def create(folder: Path, file: Path) -> None:
    """Write the figures of the sweep in FOLDER to FILE, as the set of the torch at hand."""
    from fsdpbench.check.baseline import Baseline
    from fsdpbench.check.sides import stored_side
    from fsdpbench.store import Store

    space: dict[str, Any] = Store.open(folder).read_space()
    space.pop("points", None)
    baseline = Baseline.read(file) if file.exists() else Baseline(space, {})
    baseline.space = space
    _write(baseline, stored_side(folder), file, "fsdpbench baseline create")


@command.command("update")
@click.argument("file", type=PossiblePath())
@click.option("--repeat", type=whole(most=MOST_RUNS), help="Runs of each configuration (measured devices).")
def update(file: Path, repeat: int | None) -> None:
    """Run FILE's own sweep again and write its figures into FILE, as the set of the torch at hand."""
    from fsdpbench.check.baseline import Baseline
    from fsdpbench.cli.check_command import swept_side

    baseline = Baseline.read(file)
    side = swept_side(baseline.space, repeat or baseline.repeat)
    _write(baseline, side, file, "fsdpbench baseline update")


def _write(baseline: Baseline, side: Side, file: Path, command_line: str) -> None:
    baseline.update(side, command_line)
    baseline.write(file)
    click.echo(f"wrote {len(side.entries)} configurations to {file}", err=True)
