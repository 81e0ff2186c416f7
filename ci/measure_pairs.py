"""The gain of compiling: published pairs of eager and compiled runs beside the same pairs simulated.

    python ci/measure_pairs.py RUNS.csv -o FOLDER

RUNS.csv is a file that `fsdpbench validate --runs` takes, whose column `pair` names what belongs together: an
eager run and a compiled one. FOLDER keeps the simulations.
"""

from __future__ import annotations

import argparse
import csv
import statistics
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from fsdpbench.cli.terminal.progress import make_progress
from fsdpbench.lab.validation.paper_network import Prediction, predict
from fsdpbench.lab.validation.runs.case import Figure
from fsdpbench.lab.validation.runs.runs_file import cases_of_file
from fsdpbench.launch import fork_server


class Pair(NamedTuple):
    """Both runs of a pair."""

    eager: Prediction
    compiled: Prediction

    def gain(self, figure: Figure, published: bool) -> float | None:
        """How much more the compiled one has: 0.15 for 15 % more; None where one is not known."""
        values = [
            each.case.published.get(figure) if published else each.predicted(figure)
            for each in (self.eager, self.compiled)
        ]
        before, after = values
        return None if not before or not after else after / before - 1

    @property
    def stated(self) -> bool:
        """Whether the publication leaves no setting of either run open."""
        return not (self.eager.case.assumed or self.compiled.case.assumed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", type=Path)
    parser.add_argument("-o", "--output", type=Path, default=Path("runs/pairs"))
    parser.add_argument("--jobs", type=int, default=None)
    options = parser.parse_args()
    fork_server.start("sim", True)
    with options.runs.open(newline="") as file:
        names = [row["pair"].strip() for row in csv.DictReader(file)]
    chosen = [(name, case) for name, case in zip(names, cases_of_file(options.runs), strict=True) if name]
    found = predict([case for _, case in chosen], None, options.output, make_progress(), options.jobs)
    both: dict[str, dict[bool, Prediction]] = defaultdict(dict)
    for (name, case), prediction in zip(chosen, found, strict=True):
        both[name][case.compiled] = prediction
    print(table([Pair(of[False], of[True]) for of in both.values() if len(of) == 2]))


def table(pairs: Sequence[Pair]) -> str:
    """Each pair, then means and worst over all, and over those whose settings are stated."""
    lines = [
        "| pair | settings | gain published | simulated | points off | reserved published | simulated |",
        "|---|---|--:|--:|--:|--:|--:|",
    ]
    off: list[tuple[bool, float]] = []
    for pair in pairs:
        published, simulated = (pair.gain(Figure.TOKENS, side) for side in (True, False))
        memory = [_percent(pair.gain(Figure.RESERVED, side)) for side in (True, False)]
        points = ""
        if published is not None and simulated is not None:
            off.append((pair.stated, 100 * (simulated - published)))
            points = f"{off[-1][1]:+.1f}"
        case = pair.eager.case
        settings = "stated" if pair.stated else "partly assumed"
        cells = [f"{case.name}, {case.hardware}", settings, _percent(published), _percent(simulated), points]
        lines.append(f"| {' | '.join([*cells, *memory])} |")
    for words, part in (("all", off), ("stated", [each for each in off if each[0]])):
        sizes = [abs(points) for _, points in part]
        if sizes:
            mean = statistics.fmean(sizes)
            lines += [
                "",
                f"{words}: {len(sizes)} pairs, {mean:.1f} points off on average, {max(sizes):.1f} at worst",
            ]
    return "\n".join(lines)


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:+.1%}"


if __name__ == "__main__":
    main()
