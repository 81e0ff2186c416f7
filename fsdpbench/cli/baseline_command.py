"""`fsdpbench baseline`: make a baseline from a sweep, or bring one up to date."""

from __future__ import annotations

import tempfile
from pathlib import Path

import click


@click.group("baseline")
def command() -> None:
    """Make a baseline from a sweep's folder, or bring one up to date."""


@command.command("create")
@click.argument("folder", type=click.Path(path_type=Path))
@click.argument("file", type=click.Path(path_type=Path))
def create(folder: Path, file: Path) -> None:
    """Write the figures of the sweep in FOLDER to FILE, as the set of the torch at hand."""
    from fsdpbench.check.baseline import Baseline
    from fsdpbench.store import Store

    store = Store.open(folder)
    space = store.read_space()
    space.pop("points", None)
    baseline = Baseline.read(file) if file.exists() else Baseline(space, {})
    baseline.space = space
    points = store.current_points()
    baseline.update(points)
    baseline.write(file)
    click.echo(f"wrote {len(points)} configurations to {file}", err=True)


@command.command("update")
@click.argument("file", type=click.Path(path_type=Path))
def update(file: Path) -> None:
    """Run FILE's own sweep again and write its figures into FILE, as the set of the torch at hand."""
    from fsdpbench.check.baseline import Baseline
    from fsdpbench.cli.check_command import sweep_space
    from fsdpbench.store import Store

    baseline = Baseline.read(file)
    with tempfile.TemporaryDirectory(prefix="fsdpbench-baseline-") as temporary:
        folder = Path(temporary) / "sweep"
        sweep_space(baseline.space, folder)
        points = Store.open(folder).current_points()
        baseline.update(points)
    baseline.write(file)
    click.echo(f"wrote {len(points)} configurations to {file}", err=True)
