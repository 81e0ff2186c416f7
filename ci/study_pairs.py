"""FULL against HYBRID sharding, and slopes over GPUs, of a scaling study: published beside predicted.

    python ci/study_pairs.py RUNS.csv > ci/measured/study_pairs.txt

RUNS.csv has the study's rows with their `strategy`; the packaged predictions (`residuals.csv`, by `run`) have
both speeds. A pair is one shape on one number of GPUs, sharded both ways. A slope is the speed a GPU relative
to the fewest GPUs of its shape and strategy.
"""

from __future__ import annotations

import argparse
import csv
import math
import statistics
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

RESIDUALS = Path(__file__).resolve().parents[1] / "fsdpbench/engine/results/residuals/residuals.csv"
_SHAPE = ("model", "layers", "d_model", "seq", "microbatch", "grad_accum", "ac", "gpu")
_MATTERS = 0.05
"""Pairs that differ by less have no winner."""
_HEADER = f"{'model, seq, microbatch, strategy':44} GPUs  published  predicted  error"


class Speed(NamedTuple):
    """Tokens/s of a GPU."""

    published: float
    predicted: float

    def over(self, other: Speed) -> Speed:
        """Return both ratios."""
        return Speed(self.published / other.published, self.predicted / other.predicted)

    @property
    def error(self) -> float:
        """How much too high the prediction is: 0.1 for 10 %."""
        return self.predicted / self.published - 1


def read(runs: Path) -> dict[tuple[str, ...], dict[str, dict[int, Speed]]]:
    """Return the speeds by shape, strategy ("FULL" or "HYBRID") and GPUs: means of equal rows."""
    with runs.open(newline="") as file:
        about = {row["id"]: row for row in csv.DictReader(file)}
    found: dict[tuple[str, ...], dict[str, dict[int, list[Speed]]]] = defaultdict(
        lambda: defaultdict(lambda: defaultdict(list))
    )
    with RESIDUALS.open(newline="") as file:
        for row in csv.DictReader(file):
            run = about.get(row["run"])
            if run is None or row["quantity"] != "time":
                continue
            strategy = "HYBRID" if "hybrid" in run["strategy"].lower() else "FULL"
            speed = Speed(float(row["published"]), float(row["predicted"]))
            found[tuple(run[name] for name in _SHAPE)][strategy][int(run["gpus"])].append(speed)
    return {
        shape: {
            strategy: {gpus: _mean(speeds) for gpus, speeds in sorted(by_gpus.items())}
            for strategy, by_gpus in by_strategy.items()
        }
        for shape, by_strategy in found.items()
    }


def _mean(speeds: list[Speed]) -> Speed:
    return Speed(*(statistics.fmean(values) for values in zip(*speeds, strict=True)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", type=Path)
    found = read(parser.parse_args().runs)
    print("HYBRID's speed over FULL's")
    print(_HEADER)
    pairs: list[Speed] = []
    for shape, strategies in sorted(found.items()):
        full, hybrid = strategies.get("FULL", {}), strategies.get("HYBRID", {})
        for gpus in sorted(full.keys() & hybrid.keys()):
            pairs.append(hybrid[gpus].over(full[gpus]))
            print(_line(shape, "", gpus, pairs[-1]))
    differ = [pair for pair in pairs if abs(math.log(pair.published)) > _MATTERS]
    right = sum((pair.published > 1) == (pair.predicted > 1) for pair in differ)
    close = sum(abs(pair.error) <= 0.1 for pair in pairs)
    print(f"the right winner in {right} of {len(differ)} that differ by more than 5 %")
    print(f"the ratio within 10 % in {close} of {len(pairs)}")
    print("\nspeed relative to the fewest GPUs")
    print(_HEADER)
    slopes: list[tuple[int, Speed]] = []
    for shape, strategies in sorted(found.items()):
        for strategy, by_gpus in sorted(strategies.items()):
            (_, fewest), *more = by_gpus.items()
            for gpus, speed in more:
                slopes.append((gpus, speed.over(fewest)))
                print(_line(shape, strategy, gpus, slopes[-1][1]))
    for low, high in ((0, 512), (512, 4096)):
        errors = [abs(slope.error) for gpus, slope in slopes if low < gpus <= high]
        within = sum(error <= 0.1 for error in errors)
        print(f"{low} to {high} GPUs: within 10 % in {within} of {len(errors)}, worst {max(errors):.0%}")


def _line(shape: tuple[str, ...], strategy: str, gpus: int, ratio: Speed) -> str:
    named = dict(zip(_SHAPE, shape, strict=True))
    words = f"{named['model']}, {named['seq']}, {named['microbatch']} {strategy}"
    return f"{words:44}{gpus:5} {ratio.published:10.2f} {ratio.predicted:10.2f} {ratio.error:+7.1%}"


if __name__ == "__main__":
    main()
