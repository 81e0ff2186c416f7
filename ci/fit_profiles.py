"""Fits the library tables of hardware profiles to measured operators, and says how well they predict.

    python ci/fit_profiles.py FOLDER --write           the tables of all profiles, from all rows
    python ci/fit_profiles.py FOLDER --held-out 3      errors on rows that a fit has not seen, in 3 splits

FOLDER holds nccl.csv, gemm.csv and attention_forward.csv (`ci/operator_prices.py`). Held out is a
fifth of the rows, drawn with the split's number as the seed. Takes a minute a fit on one core.
"""

from __future__ import annotations

import argparse
import dataclasses
import random
import statistics
from collections.abc import Sequence
from pathlib import Path

from profile_tables.isolated import IsolatedPrices
from profile_tables.measured import ATTENTION, COLLECTIVE, PRODUCT, Measured, read_folder
from profile_tables.writing import FittedChip, fit_chips, with_tables

import fsdpbench.sim.model.profile as hardware
from fsdpbench.sim.model.chips import OPERATOR_CHIPS
from fsdpbench.sim.model.profile import load_profile

PROFILES = Path(hardware.__file__).parents[1] / "profiles"
SHARE = 0.2
LARGE = 1 << 20
Key = tuple[str, str, str, str]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--held-out", type=int, default=0, metavar="SPLITS")
    parser.add_argument("--output", type=Path, default=Path("ci/measured/operators.txt"))
    options = parser.parse_args()
    rows = read_folder(options.folder)
    if options.write:
        write(fit_chips(rows))
    if options.held_out:
        report(rows, options.held_out, options.output)


def write(fitted: dict[str, FittedChip]) -> None:
    for gpu, tables in fitted.items():
        chip = OPERATOR_CHIPS[gpu]
        path = PROFILES / f"{chip.profile}.toml"
        content = with_tables(path.read_text(), load_profile(chip.profile), chip, tables)
        hardware.parse_profile(content, path.name)
        path.write_text(content)


def report(rows: Sequence[Measured], splits: int, path: Path) -> None:
    """In-sample errors of the profiles as they are, of runs' prices, and held-out errors of new fits.

    The file is written again after each split.
    """
    inside: dict[Key, list[float]] = {}
    runs: dict[Key, list[float]] = {}
    held: dict[Key, list[float]] = {}
    known = OPERATOR_CHIPS.items()
    collect(
        inside,
        rows,
        {gpu: IsolatedPrices(load_profile(chip.profile)) for gpu, chip in known},
    )
    collect(
        runs,
        rows,
        {gpu: IsolatedPrices(load_profile(chip.profile), False) for gpu, chip in known},
    )
    for split in range(splits):
        draw = random.Random(split)
        out = [draw.random() < SHARE for _ in rows]
        fitted = fit_chips([row for row, is_out in zip(rows, out, strict=True) if not is_out])
        prices = {
            gpu: IsolatedPrices(
                dataclasses.replace(load_profile(OPERATOR_CHIPS[gpu].profile), libraries=tables.libraries)
            )
            for gpu, tables in fitted.items()
        }
        collect(held, [row for row, is_out in zip(rows, out, strict=True) if is_out], prices)
        path.write_text(as_text(inside, runs, held, split + 1) + "\n")


def as_text(
    inside: dict[Key, list[float]], runs: dict[Key, list[float]], held: dict[Key, list[float]], splits: int
) -> str:
    lines = [
        "Mean error of isolated operators' prices, as a share of the measured time (ci/fit_profiles.py).",
        f"held out: {splits} split{'s'[: splits > 1]}, fitted to four fifths, tried on the rest.",
        "in sample: the packaged profiles, fitted to all rows here. runs: by what prices training runs.",
        "",
        f"{'kind':<24}{'chip':<14}{'dtype':<10}{'library':<9}{'rows':>5}{'runs':>8}{'in sample':>11}"
        f"{'held out':>10}{'bias':>8}{'tried':>7}  bar",
    ]
    for key in sorted(inside):
        mean, tried = error(held.get(key)), held.get(key, [])
        bar = bar_of(key)
        verdict = "" if bar is None or mean is None else f"{bar:.0%} " + ("met" if mean <= bar else "NOT MET")
        in_sample = percent(error(inside[key]))
        bias = f"{statistics.fmean(tried):+.1%}" if tried else ""
        lines.append(
            f"{key[0]:<24}{key[1]:<14}{key[2]:<10}{key[3]:<9}{len(inside[key]):>5}{percent(error(runs[key])):>8}"
            f"{in_sample:>11}{percent(mean):>10}{bias:>8}{len(tried):>7}  {verdict}".rstrip()
        )
    return "\n".join(lines)


def collect(
    errors: dict[Key, list[float]], rows: Sequence[Measured], prices: dict[str, IsolatedPrices]
) -> None:
    for row in rows:
        if row.gpu in prices:
            off = prices[row.gpu].microseconds(row) / row.us - 1
            for gpu in (row.gpu, "all"):
                errors.setdefault((kind_of(row), gpu, row.dtype, row.library), []).append(off)


def kind_of(row: Measured) -> str:
    if row.kind == COLLECTIVE:
        return "nccl, 1 MiB and more" if row.number("bytes") >= LARGE else "nccl, less than 1 MiB"
    return row.kind


def bar_of(key: Key) -> float | None:
    kind, _, dtype, library = key
    if kind == "nccl, 1 MiB and more":
        return 0.05
    if kind == PRODUCT and dtype == "bfloat16":
        return 0.06
    return 0.08 if kind == ATTENTION and library == "trtllm" else None


def error(errors: list[float] | None) -> float | None:
    return statistics.fmean(map(abs, errors)) if errors else None


def percent(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"


if __name__ == "__main__":
    main()
