"""`fsdpbench baseline`: make a baseline from a sweep, or bring one up to date."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from fsdpbench.answers.check import LEAVE_OUT as FLAG
from fsdpbench.base.files.documents import read_json_object
from fsdpbench.cli.output import show_json, tell
from fsdpbench.cli.values import MOST_RUNS, PlaceForFile, PossiblePath, whole

F = TypeVar("F", bound=Callable[..., Any])

if TYPE_CHECKING:
    from fsdpbench.answers.check.records.baseline import Baseline
    from fsdpbench.answers.check.records.sides import Side


@click.group("baseline")
def command() -> None:
    """Create a baseline from a sweep's folder, or update one.

    \b
    fsdpbench baseline create runs/gate ci/baseline.json
    fsdpbench baseline update ci/baseline.json
    """


def json_option(function: F) -> F:
    """`--json`."""
    return click.option("--json", "as_json", is_flag=True, help="Print the baseline as one JSON object.")(
        function
    )


def leave_out_option(function: F) -> F:
    """`--leave-out`, any number of times."""
    return click.option(
        FLAG,
        "leave_out",
        metavar="NAME",
        multiple=True,
        help="Configuration to leave out of the baseline, for example one that failed; may be repeated.",
    )(function)


@command.command("create")
@click.argument("folder", type=PossiblePath())
@click.argument("file", type=PlaceForFile())
@leave_out_option
@json_option
def create(folder: Path, file: Path, leave_out: tuple[str, ...], as_json: bool) -> None:
    """Write the figures of the sweep in FOLDER to FILE, for the installed version of torch.

    A sweep with a configuration that failed, is not finished or has an impossible figure is refused, unless
    that configuration is left out.
    """
    from fsdpbench.answers.check.records.baseline import Baseline
    from fsdpbench.answers.check.records.sides import stored_side
    from fsdpbench.engine.results.store import SWEEP_FILE, Store
    from fsdpbench.sweep.spaces.space_file import read_space

    space: dict[str, Any] = Store.open(folder).read_space()
    read_space(space, str(folder / SWEEP_FILE))  # what could not be swept again is no baseline's space
    space.pop("points", None)
    baseline = Baseline.read(file) if file.exists() else Baseline(space, {})
    _write(baseline, space, stored_side(folder), file, "create", leave_out)
    _show(file, as_json)


@command.command("update")
@click.argument("file", type=PossiblePath())
@click.option(
    "--repeat", type=whole(most=MOST_RUNS), help="Real devices: number of runs of each configuration."
)
@leave_out_option
@json_option
def update(file: Path, repeat: int | None, leave_out: tuple[str, ...], as_json: bool) -> None:
    """Run FILE's own sweep again and write its figures into FILE, for the installed version of torch.

    Refused like `create` if a configuration failed or has an impossible figure.
    """
    from fsdpbench.answers.check.records.baseline import Baseline
    from fsdpbench.cli.commands.check import swept_side

    baseline = Baseline.read(file)
    side = swept_side(baseline.space, repeat or baseline.repeat)
    _write(baseline, baseline.space, side, file, "update", leave_out)
    _show(file, as_json)


def _show(file: Path, as_json: bool) -> None:
    if as_json:
        show_json({"schema": 1, "file": str(file), "baseline": read_json_object(file)})


def _write(
    baseline: Baseline, space: dict[str, Any], side: Side, file: Path, verb: str, leave_out: tuple[str, ...]
) -> None:
    from fsdpbench.answers.check.records.sides import whole

    kept = whole(side, leave_out)
    words = ["fsdpbench", "baseline", verb, *(f"{FLAG} {name}" for name in leave_out)]
    baseline.updated(space, kept.entries, kept.surroundings, " ".join(words), leave_out).write(file)
    tell(f"wrote {len(kept.entries)} configurations to {file}")
