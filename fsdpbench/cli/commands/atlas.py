"""`fsdpbench atlas`: the best settings for models, chips and numbers of GPUs, built once and looked up."""

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

import click

from fsdpbench.base.errors import SomeFailedError, UsageError
from fsdpbench.base.files.documents import to_json
from fsdpbench.base.numbers import MOST_GPUS
from fsdpbench.cli.output import show_as, tell
from fsdpbench.cli.values import MOST_JOBS, PossiblePath, whole
from fsdpbench.launch import fork_server

if TYPE_CHECKING:
    from fsdpbench.answers.atlas.space import Extent

_FOLDER = Path("runs/atlas")
_RUNS = "runs"


@click.group("atlas")
def command() -> None:
    """The best FSDP settings for known models on known chips, simulated once and looked up.

    \b
    fsdpbench atlas build --small
    fsdpbench atlas show llama3-8b --gpus 64
    """


@command.command("build")
@click.option("--models")
@click.option("--hardware")
@click.option("--gpus")
@click.option("--small", is_flag=True)
@click.option("-o", "--output", type=PossiblePath(), default=_FOLDER)
@click.option("--jobs", type=whole(most=MOST_JOBS))
@click.option("--json", "as_json", is_flag=True)
def build_command(
    models: str | None,
    hardware: str | None,
    gpus: str | None,
    small: bool,
    output: Path,
    jobs: int | None,
    as_json: bool,
) -> None:
    """Simulate the settings of every model, chip and number of GPUs, and write pages and atlas.json.

    The same command again resumes where it stopped; --small builds a part.
    """
    import msgspec

    extent = _extent(models, hardware, gpus, small)
    fork_server.start("sim")
    from fsdpbench.answers.atlas.answers import answered
    from fsdpbench.answers.atlas.lookup import FILE, write_pages
    from fsdpbench.answers.atlas.space import build, cells
    from fsdpbench.base.writing import write_whole
    from fsdpbench.cli.terminal.progress import make_progress
    from fsdpbench.engine.results.store import disk_errors

    found = cells(extent)
    tell(f"{len(found)} cells; {sum(cell.pruned for cell in found)} configurations cannot fit by arithmetic")
    with disk_errors(output):
        output.mkdir(parents=True, exist_ok=True)
    atlas = answered(found, build(found, output / _RUNS, make_progress, jobs))
    content = msgspec.to_builtins(atlas)
    with disk_errors(output):
        write_whole(output / FILE, to_json(content, 1, allow_nan=False))
        page = write_pages(output, atlas)
    fit = sum(cell.status == "fits" for cell in atlas.cells)
    simulated = sum(cell.simulated for cell in atlas.cells)
    summary = f"{len(found)} cells, {fit} fit; {simulated} configurations simulated"
    show_as(content, summary, as_json=as_json)
    tell(f"Pages: {page}")
    failed = [cause for cell in atlas.cells for cause in cell.failed]
    if failed:
        raise SomeFailedError(f"{len(failed)} configurations failed, the first: {failed[0]}")


@command.command("show")
@click.argument("model")
@click.option("--hardware", default="h100-80gb")
@click.option("--gpus", type=whole(most=MOST_GPUS), default=8)
@click.option("--atlas", "place", type=PossiblePath(), default=_FOLDER)
@click.option("--json", "as_json", is_flag=True)
def show_command(model: str, hardware: str, gpus: int, place: Path, as_json: bool) -> None:
    """Show the best settings of a model on a number of GPUs, from a built atlas. Nothing is run."""
    import msgspec

    from fsdpbench.answers.atlas.lookup import find, lines, read_atlas

    atlas = read_atlas(place)
    cell = find(atlas, model, hardware, gpus)
    content = {"schema": atlas.schema, "system": atlas.system, **msgspec.to_builtins(cell)}
    show_as(content, "\n".join(filter(None, lines(atlas, cell))), as_json=as_json)


def _extent(models: str | None, hardware: str | None, gpus: str | None, small: bool) -> "Extent":
    """Return the models, chips and GPU counts to build. Raises `UsageError` for an empty list."""
    from fsdpbench.answers.atlas.space import SMALL, WHOLE
    from fsdpbench.cli.requests.request import gpu_counts

    extent = SMALL if small else WHOLE
    if models is not None:
        extent = dataclasses.replace(extent, models=_list("--models", models))
    if hardware is not None:
        extent = dataclasses.replace(extent, hardware=_list("--hardware", hardware))
    if gpus is not None:
        extent = dataclasses.replace(extent, gpus=tuple(gpu_counts(_list("--gpus", gpus))))
    return extent


def _list(flag: str, text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    if not names:
        raise UsageError(f"{flag} {text!r} names nothing")
    return names
