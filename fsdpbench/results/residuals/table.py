"""The residuals of published runs: `residuals.csv`, which `ci/measure_residuals.py` writes.

A residual is ln(measured / predicted): of the step time (above 0: the run was slower than predicted), or of a
peak of memory. Rows of one `source` were made by the same people with the same software, and share errors;
what is held out is a whole source.
"""

from __future__ import annotations

import csv
import functools
import io
from collections.abc import Iterable
from dataclasses import dataclass, fields
from enum import StrEnum
from pathlib import Path

from fsdpbench.files.whole_files import write_whole

TABLE = Path(__file__).with_name("residuals.csv")


class Condition(StrEnum):
    """What was taken as unknown when a run was predicted (`fsdpbench/validation/conditions.py`)."""

    KNOWN = "known"
    CHIP = "chip"
    NETWORK = "network"
    SYSTEM = "system"
    SOFTWARE = "software"
    MODEL = "model"


class Quantity(StrEnum):
    """What a residual is of."""

    TIME = "time"
    ALLOCATED = "allocated"
    ACTIVE = "active"
    RESERVED = "reserved"


@dataclass(frozen=True)
class Residual:
    """One figure of one published run beside its prediction, in the publication's unit."""

    condition: Condition
    source: str
    chip: str
    run: str
    model: str
    """Its name, and the fields of its shape."""
    family: str
    system: str
    software: str
    fitted: bool
    """Constants were fitted to this source."""
    compiled: bool
    gpus: int
    nodes: int
    network: str
    retries: float
    """The allocator's retries a step, as predicted."""
    full: float
    """Predicted peak of reserved memory as a share of what the allocator can have."""
    quantity: Quantity
    unit: str
    published: float
    predicted: float
    log_ratio: float

    @property
    def group(self) -> tuple[str, str, str]:
        """Runs of one group share what is wrong with their prediction."""
        return (self.source, self.chip, self.family)


def write_table(residuals: Iterable[Residual], path: Path = TABLE) -> None:
    """One line a residual."""
    names = [spec.name for spec in fields(Residual)]
    text = io.StringIO(newline="")
    rows = ([_shown(getattr(residual, name)) for name in names] for residual in residuals)
    csv.writer(text, lineterminator="\n").writerows([names, *rows])
    write_whole(path, text.getvalue())


@functools.cache
def read_table(path: Path = TABLE) -> tuple[Residual, ...]:
    """Every residual of the file."""
    with path.open(newline="") as file:
        return tuple(_residual(row) for row in csv.DictReader(file))


def _residual(row: dict[str, str]) -> Residual:
    return Residual(
        condition=Condition(row["condition"]),
        source=row["source"],
        chip=row["chip"],
        run=row["run"],
        model=row["model"],
        family=row["family"],
        system=row["system"],
        software=row["software"],
        fitted=row["fitted"] == "yes",
        compiled=row["compiled"] == "yes",
        gpus=int(row["gpus"]),
        nodes=int(row["nodes"]),
        network=row["network"],
        retries=float(row["retries"]),
        full=float(row["full"]),
        quantity=Quantity(row["quantity"]),
        unit=row["unit"],
        published=float(row["published"]),
        predicted=float(row["predicted"]),
        log_ratio=float(row["log_ratio"]),
    )


def _shown(value: object) -> object:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.6g}" if isinstance(value, float) else value
