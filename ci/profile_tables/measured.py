"""Measured operators: CSV files of collectives, matrix products and attention, one measurement a row."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fsdpbench.base.errors import UsageError
from fsdpbench.base.files.documents import read_text
from fsdpbench.base.numbers import finite_number, whole_number

COLLECTIVE, PRODUCT, ATTENTION = "nccl", "gemm", "attention"
FILES = {COLLECTIVE: "nccl.csv", PRODUCT: "gemm.csv", ATTENTION: "attention_forward.csv"}
COLUMNS = {
    COLLECTIVE: ("gpu", "nccl", "op", "gpus", "bytes", "us"),
    PRODUCT: ("gpu", "measured_with", "dtype", "m", "n", "k", "us"),
    ATTENTION: ("gpu", "measured_with", "batch", "seq", "heads", "kv_heads", "head_dim", "us"),
}
_TEXT = ("gpu", "nccl", "measured_with", "op", "dtype")
_KNOWN = {
    "op": ("all_gather", "reduce_scatter", "all_reduce", "alltoall"),
    "dtype": ("bfloat16", "fp8", "nvfp4"),
}
_LARGEST = 1 << 40
# Far beyond any GPU's work; products of larger figures would overflow.
_FEWEST = {"gpus": 2}


@dataclass(frozen=True)
class Measured:
    """One row: its file's kind, its columns as numbers or text, and the microseconds that were measured."""

    kind: str
    columns: dict[str, str | int | float]

    @property
    def gpu(self) -> str:
        """Return the chip's name in the file."""
        return str(self.columns["gpu"])

    @property
    def measured_with(self) -> str:
        """Return the library and its version; NCCL's for a collective."""
        return (
            f"nccl {self.columns['nccl']}" if self.kind == COLLECTIVE else str(self.columns["measured_with"])
        )

    @property
    def library(self) -> str:
        """Return the library's name without its version."""
        return self.measured_with.split()[0]

    @property
    def dtype(self) -> str:
        """Return the operands' dtype; collectives are of half precision, attention of bfloat16."""
        if self.kind == PRODUCT:
            return str(self.columns["dtype"])
        return "half" if self.kind == COLLECTIVE else "bfloat16"

    @property
    def us(self) -> float:
        """Return the measured time in microseconds."""
        return float(self.columns["us"])

    def number(self, column: str) -> int:
        """Return a column that holds a whole number."""
        return int(self.columns[column])


def read_folder(folder: Path) -> list[Measured]:
    """Return all rows of the files in a folder, of which some may be missing.

    Raises:
        UsageError: a row is wrong; the message names file, line and column.
    """
    if not folder.is_dir():
        raise UsageError(
            f"{folder}: is not a folder; it should hold {', '.join(FILES.values())}, or some of them"
        )
    present = {kind: folder / name for kind, name in FILES.items() if (folder / name).exists()}
    if not present:
        raise UsageError(f"{folder}: holds none of {', '.join(FILES.values())}")
    rows = [row for kind, path in present.items() for row in _read(kind, path)]
    if not rows:
        raise UsageError(f"{folder}: its files hold no row")
    return rows


def _read(kind: str, path: Path) -> list[Measured]:
    reader = csv.DictReader(io.StringIO(read_text(path), newline=""))
    try:
        missing = [name for name in COLUMNS[kind] if name not in (reader.fieldnames or ())]
        if missing:
            raise UsageError(
                f"{path}, line 1: lacks the column{'s'[: len(missing) > 1]} {', '.join(missing)}"
            )
        return [_row(kind, path, reader.line_num, given) for given in reader]
    except csv.Error as error:
        raise UsageError(f"{path}, line {reader.line_num}: is not a CSV file ({error})") from None


def _row(kind: str, path: Path, line: int, given: dict[str, str | None]) -> Measured:
    columns: dict[str, str | int | float] = {}
    for name in COLUMNS[kind]:
        text = (given[name] or "").strip()
        if name in _TEXT:
            columns[name] = _text(path, line, name, text)
        else:
            columns[name] = _number(path, line, name, text)
    row = Measured(kind, columns)
    if kind == ATTENTION and row.number("kv_heads") > row.number("heads"):
        raise UsageError(
            f"{path}, line {line}: kv_heads is {row.number('kv_heads')}, "
            f"more than heads ({row.number('heads')})"
        )
    return row


def _text(path: Path, line: int, name: str, text: str) -> str:
    known: Sequence[str] = _KNOWN.get(name, ())
    if not text or (known and text not in known):
        wanted = f"one of {', '.join(known)}" if known else "a name"
        raise UsageError(f"{path}, line {line}: {name} is {text!r}, not {wanted}")
    return text


def _number(path: Path, line: int, name: str, text: str) -> int | float:
    least = _FEWEST.get(name, 1)
    try:
        if name != "us":
            return whole_number(text, least, _LARGEST)
        value = finite_number(text)
        if 0 < value <= _LARGEST:
            return value
    except ValueError:
        pass
    wanted = "a positive number" if name == "us" else f"a whole number of at least {least}"
    raise UsageError(f"{path}, line {line}: {name} is {text!r}, not {wanted}")
