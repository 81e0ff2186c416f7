"""Looks up one cell of a built atlas by names as people write them; it runs nothing and needs no torch."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import msgspec

from fsdpbench.base.errors import UsageError, unknown
from fsdpbench.base.files.documents import converted, read_json_object

FILE = "atlas.json"


class Interval(msgspec.Struct, frozen=True):
    """The real figures in 9 of 10 cases; bytes, seconds."""

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
        raise UsageError(
            f"{path}: is not an atlas ({error}); build it again with `fsdpbench atlas build`"
        ) from None


def find(atlas: Atlas, model: str, hardware: str, gpus: int) -> AtlasCell:
    """Return the cell of these. Raises `UsageError` that names what the atlas has."""
    name = _named("model", model, list(atlas.models))
    chip = _named("hardware", hardware, atlas.hardware)
    row = {cell.gpus: cell for cell in atlas.row(name, chip)}
    if gpus not in row:
        counts = ", ".join(map(str, row))
        raise UsageError(
            f"the atlas has {name} on {chip} with {counts} GPUs, not {gpus}; "
            f"`fsdpbench tune --model {name} --hardware {chip} --gpus {gpus}` simulates it"
        )
    return row[gpus]


def _named(kind: str, given: str, known: Sequence[str]) -> str:
    """Return the name of the atlas that `given` means: spelt another way, or the beginning of one alone."""
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
