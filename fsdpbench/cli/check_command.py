"""`fsdpbench check`: the gate. Exit 0 as good as the baseline, 1 worse, 3 cannot judge."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import click

from fsdpbench.errors import CannotJudgeError, ExitCode


@click.command("check")
@click.argument("folder", required=False, type=click.Path(path_type=Path))
@click.option("--baseline", required=True, type=click.Path(path_type=Path), help="The committed baseline.")
@click.option("--thresholds", type=click.Path(path_type=Path), help="TOML: relative change allowed a metric.")
@click.option("--format", "form", type=click.Choice(["text", "md", "json"]), default="text")
@click.option("--json", "as_json", is_flag=True, help="Same as --format json.")
def command(folder: Path | None, baseline: Path, thresholds: Path | None, form: str, as_json: bool) -> None:
    """Compare the sweep in FOLDER (none given: run the baseline's own sweep) with a baseline."""
    from fsdpbench.check.baseline import Baseline
    from fsdpbench.check.compare import compare
    from fsdpbench.check.metrics import read_thresholds
    from fsdpbench.check.text import as_json as to_json
    from fsdpbench.check.text import as_markdown, as_text

    allowed = read_thresholds(thresholds)
    loaded = Baseline.read(baseline)
    expected = loaded.configurations(baseline)
    current = stored_entries(folder) if folder else swept_entries(loaded.space)
    comparison = compare(expected, current, allowed)
    shown = {"text": as_text, "md": as_markdown, "json": to_json}["json" if as_json else form](comparison)
    click.echo(shown, nl=not shown.endswith("\n"))
    if comparison.regressions:
        raise click.exceptions.Exit(int(ExitCode.REGRESSION))
    if comparison.missing or not comparison.compared:
        raise CannotJudgeError(
            f"{len(comparison.missing)} configurations of the baseline are missing from the sweep: "
            f"{', '.join(comparison.missing[:3]) or 'nothing to compare'}"
        )


def stored_entries(folder: Path) -> dict[str, dict[str, Any]]:
    """The figures of the sweep in `folder` by configuration name."""
    from fsdpbench.check.baseline import entry_of
    from fsdpbench.store import Store

    points = Store.open(folder).current_points()
    return {point.config["name"]: entry_of(point.result) for point in points}


def swept_entries(space: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Run the sweep of `space` in a folder that is thrown away, and return its figures."""
    with tempfile.TemporaryDirectory(prefix="fsdpbench-check-") as temporary:
        folder = Path(temporary) / "sweep"
        sweep_space(space, folder)
        return stored_entries(folder)


def sweep_space(space: dict[str, Any], folder: Path) -> None:
    """Run the sweep that `space` (as in sweep.toml) describes into `folder`, without a report."""
    from fsdpbench.cli.progress import make_progress
    from fsdpbench.cli.request import request_of_space
    from fsdpbench.launch.pool import PointPool
    from fsdpbench.store import Store
    from fsdpbench.sweep.runner import jobs_for, run_sweep

    PointPool.warm_up()
    request = request_of_space(space)
    plan = request.plan()
    store = Store.open_or_create(folder)
    with store.locked():
        store.write_space(request.to_space(), plan.points)
        run_sweep(store, plan.points, make_progress(), jobs=jobs_for(request.target.device))
