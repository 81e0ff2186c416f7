"""Prices of isolated operators against measured tables: `python ci/operator_prices.py FOLDER`.

FOLDER holds some of nccl.csv, gemm.csv and attention_forward.csv. Exits with 1 if a target is missed.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import click
from profile_tables.isolated import IsolatedPrices, profile_of
from profile_tables.measured import ATTENTION, COLLECTIVE, PRODUCT, Measured, read_folder

from fsdpbench.lab.validation.coverage import Bar, bar_lines

LARGE_BYTES = 1 << 20
COLLECTIVES, PRODUCTS, FLASH = 0.05, 0.06, 0.08


@dataclass(frozen=True)
class Priced:
    """A measured operator and its price."""

    row: Measured
    predicted_us: float

    @property
    def error(self) -> float:
        """Return what the price is too much, as a share of the measured time."""
        return self.predicted_us / self.row.us - 1

    @property
    def operator(self) -> str:
        """The kind; a collective with its name."""
        return f"nccl {self.row.columns['op']}" if self.row.kind == COLLECTIVE else self.row.kind

    @property
    def size(self) -> str:
        """Its class: bytes of a collective, the measured time of a kernel."""
        if self.row.kind == COLLECTIVE:
            return "1 MiB and more" if self.row.number("bytes") >= LARGE_BYTES else "less than 1 MiB"
        limits = ((10.0, "less than 10 us"), (100.0, "10 to 100 us"), (1000.0, "100 us to 1 ms"))
        return next((name for limit, name in limits if self.row.us < limit), "1 ms and more")


@dataclass(frozen=True)
class Comparison:
    """All priced rows, and how many were skipped for each chip that has no profile."""

    priced: tuple[Priced, ...]
    skipped: dict[str, int]


def compare(folder: Path) -> Comparison:
    """Price every row of a folder's tables. Raises `UsageError` for a bad file."""
    prices: dict[str, IsolatedPrices | None] = {}
    priced, skipped = [], dict[str, int]()
    for row in read_folder(folder):
        if row.gpu not in prices:
            profile = profile_of(row.gpu)
            prices[row.gpu] = None if profile is None else IsolatedPrices(profile)
        own = prices[row.gpu]
        if own is None:
            skipped[row.gpu] = skipped.get(row.gpu, 0) + 1
        else:
            priced.append(Priced(row, own.microseconds(row)))
    return Comparison(tuple(priced), skipped)


def bars_of(comparison: Comparison) -> list[Bar]:
    """The targets that the rows can decide, over all chips together."""
    wanted: Sequence[tuple[str, float, Callable[[Priced], bool]]] = (
        (
            "collectives of 1 MiB and more",
            COLLECTIVES,
            lambda p: p.row.kind == COLLECTIVE and p.row.number("bytes") >= LARGE_BYTES,
        ),
        ("bf16 products", PRODUCTS, lambda p: p.row.kind == PRODUCT and p.row.dtype == "bfloat16"),
        (
            "attention by trtllm",
            FLASH,
            lambda p: p.row.kind == ATTENTION and p.row.library == "trtllm",
        ),
    )
    bars = []
    for name, most, belongs in wanted:
        errors = [abs(p.error) for p in comparison.priced if belongs(p)]
        if errors:
            mean = statistics.fmean(errors)
            bars.append(Bar(f"{name}, mean error", f"at most {most:.0%}", f"{mean:.1%}", mean <= most))
    return bars


def as_dict(comparison: Comparison) -> dict[str, object]:
    """Return plain values: every row with its price, and errors by kind, chip, type and library."""
    groups = _grouped(comparison.priced, lambda p: (p.row.kind, p.row.gpu, p.row.dtype, p.row.measured_with))
    return {
        "rows": [
            {**p.row.columns, "kind": p.row.kind, "predicted_us": p.predicted_us, "error": p.error}
            for p in comparison.priced
        ],
        "groups": [
            {
                "kind": kind,
                "gpu": gpu,
                "dtype": dtype,
                "measured_with": measured_with,
                "count": len(errors),
                "mean_error": statistics.fmean(map(abs, errors)),
                "median_error": statistics.median(map(abs, errors)),
                "bias": statistics.fmean(errors),
            }
            for (kind, gpu, dtype, measured_with), errors in groups
        ],
        "skipped": [{"gpu": gpu, "rows": count} for gpu, count in comparison.skipped.items()],
    }


def as_markdown(comparison: Comparison) -> str:
    """For a terminal: bars, then errors by chip, operator, type, library and size, then what was skipped."""
    lines = [f"{len(comparison.priced)} measured operators, priced as if they ran alone.", ""]
    lines += bar_lines(bars_of(comparison))
    lines += ["", "| gpu | kind | dtype | measured with | size | rows | mean error | median | bias |"]
    lines.append("|---|---|---|---|---|--:|--:|--:|--:|")
    groups = _grouped(
        comparison.priced,
        lambda p: (p.row.gpu, p.operator, p.row.dtype, p.row.measured_with, p.size),
    )
    for key, errors in groups:
        sizes = [abs(error) for error in errors]
        lines.append(
            f"| {' | '.join(key)} | {len(errors)} | {statistics.fmean(sizes):.1%} "
            f"| {statistics.median(sizes):.1%} | {statistics.fmean(errors):+.1%} |"
        )
    lines += [
        f"\nSkipped: {gpu}, {count} row{'s'[: count > 1]}: no hardware profile has this name."
        for gpu, count in comparison.skipped.items()
    ]
    return "\n".join(lines) + "\n"


def _grouped(
    priced: Iterable[Priced], key: Callable[[Priced], tuple[str, ...]]
) -> list[tuple[tuple[str, ...], list[float]]]:
    groups: dict[tuple[str, ...], list[float]] = {}
    for one in priced:
        groups.setdefault(key(one), []).append(one.error)
    return sorted(groups.items())


@click.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(folder: Path, as_json: bool) -> None:
    """Compare the prices of single operators with measured ones."""
    comparison = compare(folder)
    print(json.dumps(as_dict(comparison)) if as_json else as_markdown(comparison))
    if not all(bar.met for bar in bars_of(comparison)):
        raise SystemExit(1)


if __name__ == "__main__":
    command()
