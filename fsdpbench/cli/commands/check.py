"""`fsdpbench check`: the gate. Exit 0 as good as the baseline, 1 worse, 3 cannot judge, 4 new ones failed."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fsdpbench.base import interruption
from fsdpbench.base.errors import CannotJudgeError, UsageError
from fsdpbench.cli.output import show, tell
from fsdpbench.cli.terminal.comparison_output import finish, format_options
from fsdpbench.cli.values import MOST_RUNS, PlaceForFile, PossiblePath, whole
from fsdpbench.launch import fork_server

if TYPE_CHECKING:
    from fsdpbench.answers.check.records.sides import Side

_NOISE_RUNS = 20


@click.command("check")
@click.argument("folder", required=False, type=PossiblePath())
@click.option("--baseline", type=PossiblePath(), help="Baseline file to compare with.")
@click.option(
    "--thresholds",
    type=PossiblePath(),
    help="TOML file with the changes that are allowed (example: ci/thresholds.toml).",
)
@click.option("--noise", is_flag=True, help="Measure this machine's noise and write it as --thresholds.")
@click.option(
    "--history", is_flag=True, help="Show the baseline's figures over its commits, and where they changed."
)
@click.option("-o", "--output", type=PlaceForFile(), help="With --history: write an HTML page of it.")
@click.option(
    "--repeat", type=whole(most=MOST_RUNS), help="Real devices: number of runs of each configuration."
)
@format_options
def command(
    folder: Path | None,
    baseline: Path | None,
    thresholds: Path | None,
    noise: bool,
    history: bool,
    output: Path | None,
    repeat: int | None,
    form: str,
    as_json: bool,
) -> None:
    """Compare a sweep with a baseline; without FOLDER the baseline's own sweep runs first.

    \b
    fsdpbench check --baseline ci/baseline.json

    With --noise: split repeated runs of the same code into two halves many times, and write the differences
    that occur as thresholds.

    With --history: show the baseline at each commit that changed it, FOLDER behind them, and every step.
    """
    if output is not None and not history:
        raise UsageError("-o is for --history; FOLDER's own page is `fsdpbench report FOLDER`")
    if history:
        _history(baseline, folder, output, noise, "json" if as_json else form)
        return
    from fsdpbench.answers.check.compare import compare
    from fsdpbench.answers.check.records.baseline import Baseline
    from fsdpbench.answers.check.records.sides import absent_of, baseline_side, stored_side
    from fsdpbench.answers.check.records.surroundings import require_alike
    from fsdpbench.answers.check.thresholds import read_thresholds

    if baseline is None and (folder is None or not noise):
        raise UsageError("check needs --baseline FILE (only --noise FOLDER does without)")
    loaded = Baseline.read(baseline) if baseline is not None else None
    if noise and folder is not None:
        _write_noise(stored_side(folder), thresholds)
        return
    assert loaded is not None
    assert baseline is not None
    if noise:
        if loaded.space.get("device") == "sim":
            raise CannotJudgeError(
                f"{baseline}: its sweep is simulated and exact: there is no noise to measure"
            )
        _write_noise(swept_side(loaded.space, repeat or _NOISE_RUNS), thresholds)
        return
    allowed = read_thresholds(thresholds)
    expected = baseline_side(loaded, baseline)
    side = stored_side(folder) if folder else swept_side(loaded.space, repeat or loaded.repeat)
    require_alike(expected.surroundings, side.surroundings)
    absent = absent_of(expected, side)
    comparison = compare(expected.entries, side.entries, allowed, absent, expected.left_out)
    left_out = [f"left out of the baseline: {name}" for name in expected.left_out]
    finish(comparison, side.entries, "json" if as_json else form, left_out)


def _history(baseline: Path | None, folder: Path | None, output: Path | None, noise: bool, form: str) -> None:
    from fsdpbench.answers.check.history import read_history
    from fsdpbench.answers.check.records.sides import stored_side
    from fsdpbench.cli.terminal.history_output import show_history

    if baseline is None or noise:
        raise UsageError("--history needs --baseline FILE, a committed one, and goes without --noise")
    show_history(read_history(baseline, stored_side(folder) if folder else None), form, output)


def _write_noise(side: Side, path: Path | None) -> None:
    from msgspec.structs import replace

    from fsdpbench.answers.check.noise import measure_noise
    from fsdpbench.answers.check.thresholds import read_thresholds

    known = read_thresholds(path if path is not None and path.exists() else None)
    if side.absent:
        name, reason = next(iter(side.absent.items()))
        raise CannotJudgeError(f"{side.label}: {name}: {reason}: the noise of a whole sweep is measured")
    noise = measure_noise(side.entries)
    least = noise.minimum_effects()
    show(f"A against A over {noise.runs} runs a configuration; 99 % of comparisons stay below:")
    for metric, value in noise.effects.items():
        show(f"  {metric}: {value:.2%}, so the gate asks for {least[metric]:.1%}")
    if path is None:
        tell("  (--thresholds FILE writes it down)")
        return
    replace(known, minimum_effect={**known.minimum_effect, **least}).write(path)
    tell(f"wrote {path}")


def swept_side(space: dict[str, Any], repeat: int) -> Side:
    """Run the sweep of `space` in a folder that is thrown away, and return its figures."""
    from fsdpbench.answers.check.records.sides import stored_side

    sweep = _prepared(space, repeat)
    with interruption.unwinding(), tempfile.TemporaryDirectory(prefix="fsdpbench-check-") as temporary:
        folder = Path(temporary) / "sweep"
        sweep(folder)
        return stored_side(folder)


def _prepared(space: dict[str, Any], repeat: int) -> Callable[[Path], None]:
    """The sweep that `space` (as in sweep.toml) describes, without a report, in a folder yet to be named.
    What takes long to import is imported, and its points are known."""
    fork_server.start(space.get("device"), True in (space.get("settings") or {}).get("compile", ()))
    from fsdpbench.cli.requests.request import request_of_space
    from fsdpbench.cli.terminal.progress import make_progress
    from fsdpbench.engine.results.store import Store
    from fsdpbench.sweep.runner import run_sweep
    from fsdpbench.sweep.trials import jobs_for

    request = request_of_space(space)
    plan = request.plan()
    device = request.target.device
    runs = 1 if device == "sim" else repeat

    def sweep(folder: Path) -> None:
        store = Store.open_or_create(folder)
        with store.locked():
            store.write_space(request.to_space(), plan.points)
            run_sweep(store, plan.points, make_progress(), jobs=jobs_for(device), repeat=runs)

    return sweep
