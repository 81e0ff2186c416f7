"""`fsdpbench check`, `compare` and `baseline`: the gate, and the baseline file that it compares with.

Exit code 0: no figure is worse; 1: a regression; 3: cannot judge; 4: a new configuration failed.
"""

import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec
from msgspec.structs import replace

from fsdpbench.answers.check import LEAVE_OUT
from fsdpbench.base import interruption
from fsdpbench.base.errors import CannotJudgeError, ExitCode, SomeFailedError, UsageError, error_text, written
from fsdpbench.base.files.documents import read_json_object
from fsdpbench.base.reading import one_line
from fsdpbench.cli.output import show, show_json, tell
from fsdpbench.cli.values import MOST_RUNS, PlaceForFile, PossiblePath, grouped, whole
from fsdpbench.launch import fork_server

if TYPE_CHECKING:
    from fsdpbench.answers.check.compare import Comparison
    from fsdpbench.answers.check.records.baseline import Baseline
    from fsdpbench.answers.check.records.entries import Entry
    from fsdpbench.answers.check.records.sides import Side
    from fsdpbench.reports.pages.history_page import History, StepGroup


_NOISE_RUNS = 20
_MOST_SHOWN = 3
_LONGEST = 500
_FORMATS = ("text", "md", "json", "github-benchmark")
Exports = Sequence[tuple[str, Path]]


_output_options = grouped(
    click.option("--thresholds", type=PossiblePath()),
    click.option("--format", "form", type=click.Choice(_FORMATS), default="text"),
    click.option("--json", "form", flag_value="json"),
    click.option(
        "--export",
        "exports",
        type=(click.Choice(["asv", "benchmark"]), PossiblePath()),
        multiple=True,
        metavar="asv|benchmark PATH",
    ),
)


def finish(
    comparison: "Comparison",
    after: "Mapping[str, Entry]",
    form: str,
    notes: Sequence[str] = (),
    export: Callable[[], None] = lambda: None,
) -> None:
    """Print the comparison in its `form`, if any, `export` it, and end with its exit code: 0, 1 for a
    regression, 3 if it cannot be judged, 4 if a configuration failed that the older side does not have. The
    first of these that applies counts."""
    from fsdpbench.answers.check.text import as_github_benchmark, as_json, as_markdown, as_text

    if form == "github-benchmark":
        show(as_github_benchmark(after))
    elif form:
        show({"text": as_text, "md": as_markdown, "json": as_json}[form](comparison, notes))
    export()
    if comparison.regressions:
        raise click.exceptions.Exit(int(ExitCode.REGRESSION))
    unjudged = comparison.unjudged
    if unjudged or not comparison.compared:
        what = _named(unjudged) or "anything: no configuration is on both sides"
        raise CannotJudgeError(f"cannot judge {what}")
    if comparison.added_failed:
        raise SomeFailedError(f"failed, and new on this side: {_named(comparison.added_failed)}")


def _named(lines: Sequence[str]) -> str:
    more = len(lines) - _MOST_SHOWN
    return "; ".join(one_line(line, _LONGEST) for line in lines[:_MOST_SHOWN]) + (
        f"; and {more} more" if more > 0 else ""
    )


@click.command("check")
@click.argument("folder", required=False, type=PossiblePath())
@click.option("--baseline", type=PossiblePath())
@click.option("--noise", is_flag=True)
@click.option("--history", is_flag=True)
@click.option("-o", "--output", type=PlaceForFile())
@click.option("--repeat", type=whole(most=MOST_RUNS))
@_output_options
def command(
    folder: Path | None,
    baseline: Path | None,
    thresholds: Path | None,
    noise: bool,
    history: bool,
    output: Path | None,
    repeat: int | None,
    form: str,
    exports: Exports,
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
    if exports and (history or noise):
        raise UsageError("--export writes what was compared; leave it out with --history and --noise")
    if history:
        from fsdpbench.answers.check.history import read_history
        from fsdpbench.answers.check.records.sides import stored_side

        if baseline is None or noise:
            raise UsageError("--history needs --baseline FILE, a committed one, and goes without --noise")
        show_history(read_history(baseline, stored_side(folder) if folder else None), form, output)
        return
    from fsdpbench.answers.check.compare import compare
    from fsdpbench.answers.check.history import export
    from fsdpbench.answers.check.records.baseline import Baseline, require_alike
    from fsdpbench.answers.check.records.sides import absent_of, baseline_side, stored_side
    from fsdpbench.answers.check.thresholds import read_thresholds

    loaded = Baseline.read(baseline) if baseline is not None else None
    if noise and folder is not None:
        _write_noise(stored_side(folder), thresholds)
        return
    if loaded is None or baseline is None:
        raise UsageError("check needs --baseline FILE (only --noise FOLDER does without)")
    if noise:
        if loaded.space.get("device") == "sim":
            raise CannotJudgeError(error_text("check.no_noise", baseline))
        _write_noise(swept_side(loaded, repeat or _NOISE_RUNS), thresholds)
        return
    allowed = read_thresholds(thresholds)
    expected = baseline_side(loaded, baseline)
    side = stored_side(folder) if folder else swept_side(loaded, repeat or loaded.repeat)
    require_alike(expected.surroundings, side.surroundings)
    absent = absent_of(expected, side)
    comparison = compare(expected.entries, side.entries, allowed, absent, expected.left_out)
    left_out = [f"left out of the baseline: {name}" for name in expected.left_out]
    finish(comparison, side.entries, form, left_out, partial(export, side, exports))


def _write_noise(side: "Side", path: Path | None) -> None:
    from fsdpbench.answers.check.thresholds import measure_noise, read_thresholds

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
    effects = {**known.measured.minimum_effect, **least}
    replace(known, measured=replace(known.measured, minimum_effect=effects)).write(path)
    tell(f"wrote {path}")


def swept_side(baseline: "Baseline", repeat: int) -> "Side":
    """Run the sweep of `baseline` in a temporary folder, without a report; return its figures."""
    compiles = True in (baseline.space.get("settings") or {}).get("compile", ())
    fork_server.start(baseline.space.get("device"), compiles)
    from fsdpbench.answers.check.records.sides import stored_side
    from fsdpbench.cli.requests.request import request_of_space
    from fsdpbench.cli.terminal.progress import make_progress
    from fsdpbench.engine.results.store import Store
    from fsdpbench.sweep.runner import run_sweep
    from fsdpbench.sweep.trials import jobs_for

    request = request_of_space(baseline.space)
    plan = request.plan()
    device = request.target.device
    runs = 1 if device == "sim" else repeat
    with interruption.unwinding(), tempfile.TemporaryDirectory(prefix="fsdpbench-check-") as temporary:
        folder = Path(temporary) / "sweep"
        store = Store.open_or_create(folder)
        with store.locked():
            store.write_space(request.to_space(), plan.points)
            run_sweep(store, plan.points, make_progress(), jobs=jobs_for(device), repeat=runs)
        return stored_side(folder)


def show_history(history: "History", form: str, output: Path | None) -> None:
    """Print `history` in `form` (text, json, md) and write its page to `output`. Raises `BenchError`."""
    from fsdpbench.reports.pages.history_page import step_groups, write_history_page

    groups = step_groups(history)
    if form == "json":
        show_json(msgspec.to_builtins(history))
    elif form == "md":
        show("\n".join(_markdown(groups)))
    else:
        commits = len(history.commits)
        show(f"{history.baseline}: {commits} commit{'s' if commits != 1 else ''}, {len(history.steps)} steps")
        show("\n".join(_lines(groups)) if groups else "no figure changed its level")
    for note in history.notes:
        tell(f"note: {note}")
    if output is not None:
        with written(output):
            write_history_page(history, output)
        tell(f"wrote {output}")


def _lines(groups: "list[StepGroup]") -> list[str]:
    """Return a line for each commit, the newest first, followed by a line for each figure."""
    lines: list[str] = []
    last: str | None = ""
    for group in groups:
        if group.revision != last:
            lines.append(f"{(group.revision or 'now')[:9]} {group.date} {group.subject}".rstrip())
            last = group.revision
        count = f"{group.configurations} configuration{'s' if group.configurations > 1 else ''}"
        lines.append(f"  {group.word:<8}{group.metric:<26}{group.change_words}, {count}")
    return lines


def _markdown(groups: "list[StepGroup]") -> list[str]:
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


@click.command("compare")
@click.argument("before", metavar="A", type=PossiblePath())
@click.argument("after", metavar="B", type=PossiblePath())
@_output_options
def compare_command(before: Path, after: Path, thresholds: Path | None, form: str, exports: Exports) -> None:
    """Say whether B is worse than A: run folders, configuration folders, result files or baselines.

    \b
    fsdpbench compare runs/before runs/after

    Simulated figures are exact: any worse figure is a regression. Measured figures are compared over the runs
    of `sweep --repeat N`: a change is a regression if a rank test finds it significant and it is large
    enough. Two configuration folders of one sweep are compared even if their settings differ.
    """
    from fsdpbench.answers.check.compare import compare
    from fsdpbench.answers.check.history import export
    from fsdpbench.answers.check.records.baseline import require_alike
    from fsdpbench.answers.check.records.sides import absent_of, notes_on, paired, read_side, require_common
    from fsdpbench.answers.check.thresholds import read_thresholds

    allowed = read_thresholds(thresholds)
    first, second = read_side(before), read_side(after)
    require_alike(first.surroundings, second.surroundings)
    old, new = paired(first, second)
    require_common(old, new)
    comparison = compare(old, new, allowed, absent_of(first, second), first.left_out)
    notes = notes_on(first, second)
    finish(comparison, second.entries, form, notes, partial(export, second, exports))


@click.group("baseline")
def baseline_command() -> None:
    """Create a baseline from a sweep's folder, or update one.

    \b
    fsdpbench baseline create runs/gate ci/baseline.json
    fsdpbench baseline update ci/baseline.json
    """


_baseline_options = grouped(
    click.option(LEAVE_OUT, "leave_out", metavar="NAME", multiple=True),
    click.option("--json", "as_json", is_flag=True),
)


@baseline_command.command("create")
@click.argument("folder", type=PossiblePath())
@click.argument("file", type=PlaceForFile())
@_baseline_options
def create(folder: Path, file: Path, leave_out: tuple[str, ...], as_json: bool) -> None:
    """Write the figures of the sweep in FOLDER to the file FILE, for the installed version of torch.

    A sweep with a configuration that failed, is not finished or has an impossible figure is refused, unless
    that configuration is left out.
    """
    from fsdpbench.answers.check.records.baseline import Baseline
    from fsdpbench.answers.check.records.sides import stored_side
    from fsdpbench.engine.results.store import SWEEP_FILE, Store
    from fsdpbench.sweep.spaces.space_file import read_space

    space = Store.open(folder).read_space()
    read_space(space, str(folder / SWEEP_FILE))  # refuse a space that could not be swept again
    space.pop("points", None)
    baseline = Baseline(space, Baseline.read(file).sets if file.exists() else {})
    _write(baseline, stored_side(folder), file, "create", leave_out)
    _show(file, as_json)


@baseline_command.command("update")
@click.argument("file", type=PossiblePath())
@click.option("--repeat", type=whole(most=MOST_RUNS))
@_baseline_options
def update(file: Path, repeat: int | None, leave_out: tuple[str, ...], as_json: bool) -> None:
    """Run FILE's own sweep again, --repeat times, and write its figures into FILE, for the installed torch.

    Refused like `create` if a configuration failed or has an impossible figure.
    """
    from fsdpbench.answers.check.records.baseline import Baseline

    baseline = Baseline.read(file)
    side = swept_side(baseline, repeat or baseline.repeat)
    _write(baseline, side, file, "update", leave_out)
    _show(file, as_json)


def _show(file: Path, as_json: bool) -> None:
    if as_json:
        show_json({"schema": 1, "file": str(file), "baseline": read_json_object(file)})


def _write(baseline: "Baseline", side: "Side", file: Path, verb: str, leave_out: tuple[str, ...]) -> None:
    from fsdpbench.answers.check.records.sides import whole

    kept = whole(side, leave_out)
    words = ["fsdpbench", "baseline", verb, *(f"{LEAVE_OUT} {name}" for name in leave_out)]
    baseline.updated(kept.entries, kept.surroundings, " ".join(words), leave_out).write(file)
    tell(f"wrote {len(kept.entries)} configurations to {file}")
