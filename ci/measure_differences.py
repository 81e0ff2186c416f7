"""Fits how far the difference of two predicted steps may be off: `reports/pages/ranking.py`.

    python ci/measure_differences.py RUNS.csv [RUNS.csv ...] -o FOLDER     simulates, writes differences.csv
    python ci/measure_differences.py                                       fits, from differences.csv

Pairs are published runs of one source, chip, model, software and number of GPUs. FOLDER keeps the simulations,
which are traced: a step's time that the GPU works, and that it waits. `--most 3` takes three runs of each such
group, `--gpus` groups of these numbers of GPUs alone (of sources with many).
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import itertools
import math
import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

DATA = Path(__file__).parent / "measured" / "differences.csv"
LEVEL = 0.9
WAITS = [step / 100 for step in range(0, 201, 5)]
LEAST = [step / 1000 for step in range(0, 81)]


class Run(NamedTuple):
    """A published run: seconds of its predicted step for each 1,000 tokens of a GPU, those in which the GPU
    works and waits, half the width of the interval of its level and why it is so wide, ln(measured /
    predicted)."""

    source: str
    group: str
    run: str
    step_s: float
    works_s: float
    waits_s: float
    half: float
    because: str
    log_ratio: float


Pair = tuple[Run, Run]


def error_of(pair: Pair, waits: float, least: float) -> float:
    """Return the half width of a pair's difference, as `ranking` computes it, for two constants."""
    one, other = pair
    moved = min(one.half, other.half) * abs(one.works_s - other.works_s)
    moved += waits * abs(one.waits_s - other.waits_s)
    return math.hypot(least, abs(one.half - other.half) + moved / min(one.step_s, other.step_s))


def pairs_of(runs: Sequence[Run]) -> list[Pair]:
    """Return all pairs within groups of which the same is unknown."""
    groups: dict[str, list[Run]] = defaultdict(list)
    for run in runs:
        groups[run.group].append(run)
    pairs = [pair for found in groups.values() for pair in itertools.combinations(found, 2)]
    return [(one, other) for one, other in pairs if one.because == other.because]


def coverage(pairs: Sequence[Pair], waits: float, least: float) -> float:
    """Return the share of pairs inside, each source counting alike."""
    inside: dict[str, list[bool]] = defaultdict(list)
    for pair in pairs:
        gap = abs(pair[0].log_ratio - pair[1].log_ratio)
        inside[pair[0].source].append(gap <= error_of(pair, waits, least))
    return statistics.fmean(statistics.fmean(each) for each in inside.values())


def width(pairs: Sequence[Pair], waits: float, least: float) -> float:
    """Return the mean half width, each source counting alike."""
    sizes: dict[str, list[float]] = defaultdict(list)
    for pair in pairs:
        sizes[pair[0].source].append(error_of(pair, waits, least))
    return statistics.fmean(statistics.fmean(each) for each in sizes.values())


def fit(pairs: Sequence[Pair], level: float = LEVEL) -> tuple[float, float]:
    """Return the constants (waits, least) of the narrowest intervals that hold `level` of the pairs."""
    enough = [each for each in itertools.product(WAITS, LEAST) if coverage(pairs, *each) >= level]
    return min(enough, key=lambda each: width(pairs, *each))


def report(runs: Sequence[Run]) -> Iterator[str]:
    """Yield a line for each source held out, and the fit to all."""
    pairs = pairs_of(runs)
    yield f"{'source held out':<32}{'pairs':>6}{'waits':>7}{'least':>8}{'inside':>8}{'median half width':>19}"
    held: list[tuple[float, int]] = []
    for source in sorted({run.source for run in runs}):
        own = [pair for pair in pairs if pair[0].source == source]
        found = fit([pair for pair in pairs if pair[0].source != source])
        held.append((coverage(own, *found), len(own)))
        half = statistics.median(error_of(pair, *found) for pair in own)
        yield f"{source:<32}{len(own):>6}{found[0]:>7.2f}{found[1]:>8.1%}{held[-1][0]:>8.0%}{half:>19.1%}"
    whole = sum(share * count for share, count in held) / len(pairs)
    mean = statistics.fmean(share for share, _ in held)
    yield f"held out: {whole:.1%} of {len(pairs)} pairs inside, {mean:.1%} where each source counts alike"
    waits, least = fit(pairs)
    half = statistics.median(error_of(pair, waits, least) for pair in pairs)
    yield f"fitted to all: waits {waits:.2f}, least {least:.1%}: {coverage(pairs, waits, least):.1%} inside, "
    yield f"median half width {half:.1%}; with 0.50 and 0.1 %: {coverage(pairs, 0.5, 0.001):.1%} inside"


def measure(options: argparse.Namespace) -> list[Run]:
    """Simulate a sample of the published runs, traced."""
    from fsdpbench.cli.terminal.progress import make_progress
    from fsdpbench.engine.results.provenance import content_key
    from fsdpbench.lab.validation.paper_network import Prediction, config_of
    from fsdpbench.lab.validation.runs.case import Case
    from fsdpbench.lab.validation.runs.paper import known_cases
    from fsdpbench.lab.validation.runs.runs_file import cases_of_file
    from fsdpbench.launch import fork_server
    from fsdpbench.sweep.runner import UNTRACED, simulate

    fork_server.start("sim")
    cases = known_cases("gpt", "t5") + [case for path in options.runs for case in cases_of_file(path)]
    groups: dict[str, list[Case]] = defaultdict(list)
    for case in cases:
        if any(figure.is_time for figure in case.published):
            shape = " ".join([case.model, *(f"{name}={value}" for name, value in case.shape.items())])
            key = (case.source, case.profile, shape, case.software or case.system.split("@")[0], case.gpus)
            groups[" | ".join(map(str, key))].append(case)
    many = {case.source for case in cases if sum(each.source == case.source for each in cases) > 40}
    asked = options.gpus or []
    chosen = {
        key: found[:: max(1, len(found) // options.most)][: options.most]
        for key, found in groups.items()
        if len(found) > 1 and (not asked or found[0].source not in many or found[0].gpus in asked)
    }
    traced = dataclasses.replace(UNTRACED, traced_steps=1)
    flat = [(key, case) for key, found in chosen.items() for case in found]
    print(f"{len(flat)} runs of {len(chosen)} groups")
    configs = [config_of(case, None, traced) for _, case in flat]
    results = simulate(configs, options.output, make_progress(), options.jobs)
    runs = []
    for (key, case), config in zip(flat, configs, strict=True):
        prediction = Prediction(case, results[content_key(config)])
        error, result = prediction.step_time_error, prediction.result
        if error is None or result.time_s is None or result.interval is None:
            continue
        if result.alloc_retries_per_step or not result.step_time_s:
            continue
        each = 1e3 / (config.settings.batch * (config.settings.seq or 1) * config.settings.grad_accum)
        parts = result.time_s
        works, waits = parts.compute_only + parts.overlapped, parts.exposed_communication + parts.idle
        scale = result.step_time_s / (works + waits) * each
        half, log = result.interval.half_width, -math.log1p(error)
        step = result.step_time_s * each
        because = "; ".join(result.interval.because)
        runs.append(Run(case.source, key, case.name, step, works * scale, waits * scale, half, because, log))
    return runs


def write(runs: Sequence[Run]) -> None:
    """Write `DATA`."""
    with DATA.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(Run._fields)
        writer.writerows([f"{each:.5g}" if isinstance(each, float) else each for each in run] for run in runs)


def read() -> list[Run]:
    """Return the runs of `DATA`."""
    with DATA.open(newline="") as file:
        rows = list(csv.DictReader(file))
    texts = ("source", "group", "run", "because")
    return [Run(**{name: row[name] if name in texts else float(row[name]) for name in row}) for row in rows]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="*", type=Path)
    parser.add_argument("-o", "--output", type=Path, default=Path("runs/differences"))
    parser.add_argument("--most", type=int, default=3)
    parser.add_argument("--gpus", type=int, action="append")
    parser.add_argument("--jobs", type=int, default=None)
    options = parser.parse_args()
    if options.runs:
        write(measure(options))
    for line in report(read()):
        print(line)


if __name__ == "__main__":
    main()
