"""Look up a cell of a built atlas by approximate names, and format cells as text and pages. Runs nothing and
does not need torch."""

import re
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from fsdpbench.base.errors import UsageError, error_text, unknown
from fsdpbench.base.files.documents import converted, read_json_object, rendered_beside
from fsdpbench.reports.pages import display
from fsdpbench.reports.pages.display import GIB, percent
from fsdpbench.reports.pages.shell import write_page

FILE = "atlas.json"


class Interval(msgspec.Struct, frozen=True):
    """The 90 % intervals of the real figures, in seconds and bytes."""

    tokens_per_s_per_gpu: tuple[float, float] | None = None
    step_time_s: tuple[float, float] | None = None
    peak_reserved_bytes: tuple[float, float] | None = None
    because: list[str] | None = None


class Choice(msgspec.Struct, frozen=True):
    """Settings with their simulated figures."""

    settings: dict[str, str | int | bool | None]
    tokens_per_s_per_gpu: float
    step_time_s: float
    command: str
    interval: Interval
    mfu: float | None = None
    peak_reserved_bytes: float | None = None
    alloc_retries_per_step: float | None = None
    risky: bool = False


class AtlasCell(msgspec.Struct, frozen=True):
    """One model on one kind and number of GPUs; `status`: fits, does_not_fit or failed."""

    model: str
    hardware: str
    gpus: int
    status: str
    best: Choice | None = None
    alternatives: list[Choice] = []
    risky: list[Choice] = []
    simulated: int = 0
    pruned: int = 0
    failed: list[str] = []
    reason: str | None = None


class Model(msgspec.Struct, frozen=True):
    """A model of the atlas."""

    parameters: int


class Atlas(msgspec.Struct, frozen=True):
    """A built atlas."""

    schema: int
    system: str
    versions: dict[str, str]
    models: dict[str, Model]
    hardware: list[str]
    gpus: list[int]
    cells: list[AtlasCell]
    simulated: bool = True

    def row(self, model: str, hardware: str) -> list[AtlasCell]:
        """Return the cells of one model on one chip, by number of GPUs."""
        found = [cell for cell in self.cells if (cell.model, cell.hardware) == (model, hardware)]
        return sorted(found, key=lambda cell: cell.gpus)


def read_atlas(folder: Path) -> Atlas:
    """Return the atlas in `folder`. Raises `UsageError` if there is no atlas, or it cannot be read."""
    path = folder / FILE if folder.is_dir() else folder
    if not path.is_file():
        raise UsageError(f"{path}: no atlas there; `fsdpbench atlas build` makes one, --atlas names another")
    try:
        return converted(read_json_object(path), Atlas)
    except msgspec.ValidationError as error:
        raise UsageError(error_text("lookup.no_atlas", path, error)) from None


def find(atlas: Atlas, model: str, hardware: str, gpus: int) -> AtlasCell:
    """Return the cell of a model, chip and number of GPUs. Raises `UsageError` with the known ones."""
    name = _named("model", model, list(atlas.models))
    chip = _named("hardware", hardware, atlas.hardware)
    row = {cell.gpus: cell for cell in atlas.row(name, chip)}
    if gpus not in row:
        counts = ", ".join(map(str, row))
        raise UsageError(error_text("lookup.gpus", name, chip, counts, gpus, name, chip, gpus))
    return row[gpus]


def _named(kind: str, given: str, known: Sequence[str]) -> str:
    """Return the known name that `given` means: spelt differently, or a unique prefix."""
    wanted = _plain(given)
    same = [name for name in known if _plain(name) == wanted]
    begun = [name for name in known if wanted and _plain(name).startswith(wanted)]
    if same or len(begun) == 1:
        return (same or begun)[0]
    if begun:
        raise UsageError(f"{kind} {given!r} may be {' or '.join(begun)}: write it in full")
    raise unknown(kind, given, known, "fsdpbench atlas show")


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def settings_words(choice: Choice) -> str:
    """Return settings as text, such as `FULL_SHARD, no recomputation, batch 8, eager`."""
    recomputed = {"none": "no recomputation", "op": "selective recomputation", "full": "full recomputation"}
    checkpointing = str(choice.settings.get("activation_checkpointing"))
    recomputation = recomputed.get(checkpointing, checkpointing)
    how = "compiled" if choice.settings.get("compile") else "eager"
    return f"{choice.settings.get('strategy')}, {recomputation}, batch {choice.settings.get('batch')}, {how}"


def rate_words(choice: Choice) -> str:
    """Return the tokens per second and GPU with their interval, as text."""
    span = choice.interval.tokens_per_s_per_gpu
    text = f"{choice.tokens_per_s_per_gpu:,.0f}"
    return text if span is None else f"{text} ({span[0]:,.0f} to {span[1]:,.0f})"


def memory_words(choice: Choice) -> str:
    """Return the reserved GiB with their interval, as text."""
    if choice.peak_reserved_bytes is None:
        return "–"
    text, span = f"{choice.peak_reserved_bytes / GIB:.1f}", choice.interval.peak_reserved_bytes
    return text if span is None else f"{text} ({span[0] / GIB:.1f} to {span[1] / GIB:.1f})"


def status_words(atlas: Atlas, cell: AtlasCell) -> str:
    """Return the text for a cell without settings."""
    if cell.status == "failed":
        return f"not known: {cell.reason}"
    enough = [e.gpus for e in atlas.row(cell.model, cell.hardware) if e.best and e.gpus > cell.gpus]
    more = f"; it fits on {enough[0]}" if enough else ""
    return f"does not fit on {cell.gpus} GPUs{more}"


def lines(atlas: Atlas, cell: AtlasCell) -> list[str]:
    """Return the answer to `fsdpbench atlas show`."""
    named = {
        each.__name__: each for each in (memory_words, percent, rate_words, settings_words, status_words)
    }
    return rendered_beside(__file__, "text.jinja", atlas=atlas, cell=cell, **named).splitlines()


OVERVIEW = "index.html"


def write_pages(folder: Path, atlas: Atlas) -> Path:
    """Write the overview and a page for each model to `folder`; return the overview's path."""

    def write(name: str, **about: object) -> Path:
        template, scripts = "answers/atlas/page.html.jinja", ("answers/atlas/page.js",)
        names = {"words": sys.modules[__name__], "display": display, "page_of": page_of, "overview": OVERVIEW}
        return write_page(
            folder / name, template, scripts=scripts, draws=False, atlas=atlas, **names, **about
        )

    for name in atlas.models:
        write(page_of(name), model=name, cells=[cell for cell in atlas.cells if cell.model == name])
    return write(OVERVIEW, model=None, cells=atlas.cells)


def page_of(model: str) -> str:
    """Return the file name of a model's page."""
    return f"{re.sub(r'[^A-Za-z0-9._-]', '-', model)}.html"
