"""Gains of settings by unit over the best of the uniform grid, in twelve cells whose memory is short.

    python ci/per_unit_cells.py ci/measured/per_unit.txt [CELL...]

Memory limits a cell, by one criterion for all: its sequences are of the model's published length, doubled
until one sample of them without recomputation does not fit on a GPU at the upper end of memory's interval.

The grid is batch (`BATCHES`, powers of two and others), recomputation (none, op, full) and offload
(nothing, or all that blocks save), each choice up to the largest batch that fits at the upper end of
memory's interval, unless it is a fifth slower than another at its first batch; of the two fastest also
strategy (resharded or not, hybrid ones between nodes) and size of units (1, 2 blocks), at that batch or the
next smaller one. The choice by unit has the same batches; of the first six each is tried at least once. A
row is added as soon as its cell is done.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from fsdpbench.answers.tune.front import Candidate, Goal, judge
from fsdpbench.answers.tune.per_unit import choose, is_safe
from fsdpbench.base.configuration.config import Config
from fsdpbench.base.settings.values import is_mixed, spread
from fsdpbench.engine.results.records import Status
from fsdpbench.sweep.planning import Target, configured, make_target, not_applicable
from fsdpbench.sweep.prediction import cannot_fit, usable_bytes
from fsdpbench.sweep.runner import UNTRACED
from fsdpbench.sweep.trials import simulate

CELLS = {
    "llama3-8b/h100-80gb/8": 8192,
    "llama3-8b/h100-80gb/64": 8192,
    "llama3-70b/h100-80gb/64": 8192,
    "llama3-70b/h100-80gb/256": 8192,
    "gpt-2.8b/a100-80gb/8": 2048,
    "qwen3-30b-a3b/h100-80gb/64": 4096,
    "t5-11b/a100-80gb/64": 512,
    "mistral-7b/a100-80gb/8": 4096,
    "llama2-13b/a100-80gb/16": 4096,
    "gpt-2.8b/a100-40gb/8": 2048,
    "qwen3-32b/h100-80gb/64": 4096,
    "llama3-8b/h200/16": 8192,
}
"""Model, chip and GPUs: tokens of a published sample."""
GOAL = Goal("tokens_per_s")
BATCHES = (1, 2, 3, 4, 5, 6, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 56, 64)
_VARIED, _SLOW, _SMALL = 2, 0.8, 6
_SAFE = 0.92
"""About the share of memory that fits at the upper end of its interval."""
GRID = (("none", False), ("op", False), ("full", False), ("full", True), ("op", True), ("none", True))
"""Recomputation and offload."""
_BY_BLOCK = ("activation_checkpointing", "activation_offload")
_FIRST = ("block", "FULL_SHARD")
KEPT = {"FULL_SHARD": "SHARD_GRAD_OP", "HYBRID_SHARD": "_HYBRID_SHARD_ZERO2"}


class Simulated:
    """Simulates configurations one by one, and counts them and their processor time in seconds."""

    def __init__(self) -> None:
        self.count, self.cpu_s = 0, 0.0

    def __call__(self, configs: Sequence[Config]) -> list[Candidate]:
        found = []
        for trial in simulate(list(configs), 1) if configs else []:
            self.count += 1
            self.cpu_s += (trial.result.bench.cpu_s or 0.0) if trial.result.bench else 0.0
            found.append(judge(trial.config, trial.result, GOAL))
        return found

    def uniform(self, target: Target, **settings: object) -> list[Candidate]:
        """Return the candidate of these settings; none where it cannot run or fit."""
        config = configured(target, "torch-fsdp2", **settings)
        return [] if not_applicable(config) or cannot_fit(config) else self([config])


def grid_of(target: Target, seq: int, run: Simulated) -> list[Candidate]:
    """Return what was tried of the uniform grid, up to the largest batch that fits with each choice of
    recomputation and offload; then other strategies and units with the fastest of these."""
    found: list[Candidate] = []
    best: list[Candidate] = []
    start = 0
    for how, moved in GRID:
        settings = {"seq": seq, "activation_checkpointing": how, "activation_offload": moved}
        tried, largest = _climbed(target, start, run, settings, _SLOW * max(map(_speed, best), default=0))
        start = max(largest, 0)
        found += tried
        best += [max((each for each in tried if is_safe(each)), key=_speed)] if largest >= 0 else []
    seen = {each.config.settings.batch for each in found}
    for batch in BATCHES[: _SMALL if best else 0]:
        if min(seen) < batch < max(seen) and batch not in seen:
            found += run.uniform(target, batch=batch, seq=seq, activation_checkpointing="full")
    strategies = list(KEPT.items())[: 2 if target.gpus > target.gpus_per_node else 1]
    for each in sorted(best, key=_speed, reverse=True)[:_VARIED]:
        own = each.config.settings
        place = BATCHES.index(own.batch)
        for wrap in ("block", "every-2"):
            for strategy in (name for pair in strategies for name in pair):
                for batch in reversed(BATCHES[max(0, place - 1) : place + 1]):
                    settings = {"seq": seq, "wrap": wrap, "strategy": strategy, "batch": batch}
                    settings |= {name: getattr(own, name) for name in _BY_BLOCK}
                    tried = run.uniform(target, **settings) if (wrap, strategy) != _FIRST else []
                    found += tried
                    if not tried or is_safe(tried[0]):
                        break
    return found


def _climbed(
    target: Target, start: int, run: Simulated, settings: Mapping[str, object], least: float
) -> tuple[list[Candidate], int]:
    """Return candidates at some of `BATCHES` and the place of the largest that fits safely, -1: none does, or
    the first is not as fast as `least`."""
    found: list[Candidate] = []
    low, high = -1, len(BATCHES)
    sizes: dict[int, float] = {}
    while high - low > 1:
        place = start if not found else low + 1 if low >= 0 else (low + high) // 2
        if len(sizes) > 1:  # memory is about linear in the batch
            (one, less), (other, more) = sorted(sizes.items())[-2:]
            batch = other + (_SAFE * (usable_bytes(found[0].config) or 0) - more) * (other - one) / (
                more - less
            )
            place = max(place, sum(each <= batch for each in BATCHES) - 1)
        place = min(place, high - 1)
        tried = run.uniform(target, batch=BATCHES[place], **settings)
        found += tried
        if tried and tried[0].status is Status.OK and tried[0].speed < least:
            break
        if tried and is_safe(tried[0]):
            low, sizes[BATCHES[place]] = place, tried[0].memory or 0
        else:
            high = place
    return found, low


def _speed(candidate: Candidate) -> float:
    return candidate.speed


def length_of(target: Target, published: int) -> int:
    """Return the tokens a sample at which memory limits, as the head of this file says."""
    found = Simulated().uniform(target, batch=1, seq=published, activation_checkpointing="none")
    return length_of(target, 2 * published) if found and is_safe(found[0]) else published


def row_of(cell: str, published: int) -> str:
    """Return the line of a cell."""
    model, hardware, gpus = cell.split("/")
    target = make_target(model=model, hardware=hardware, gpus=int(gpus), measurement=UNTRACED)
    grid, chooser, seq = Simulated(), Simulated(), length_of(target, published)
    tried = grid_of(target, seq, grid)
    chosen = choose(tried, chooser, None)
    best, uniform = chosen.by_unit, chosen.uniform
    kept = [each for each in tried if is_safe(each) and not each.config.settings.activation_offload]
    gains = [
        f"{best.speed / other.speed - 1:+.1%}" if other else "only"
        for other in (uniform, max(kept, key=_speed, default=None))
    ]
    gib = [(each.memory or 0) / 2**30 if each else 0.0 for each in (uniform, best)]
    return (
        f"{cell:28} {seq:5} {gains[0]:>7} {gains[1]:>7} {gib[0]:5.1f} {gib[1]:5.1f} "
        f"{grid.count:3} {grid.cpu_s:4.0f} {chooser.count:3} {chooser.cpu_s:4.0f}  "
        f"{_words(uniform)} -> {_words(best)}"
    )


def _words(candidate: Candidate | None) -> str:
    if candidate is None:
        return "nothing"
    own = candidate.config.settings
    how = own.activation_checkpointing
    counts = Counter(spread(how)) if is_mixed(how) else {how: "all"}
    recomputed = " ".join(f"{name} {count}" for name, count in counts.items())
    words = [f"batch {own.batch} {own.wrap} {own.strategy}, {recomputed}"]
    words += [f"reshard {own.reshard_after_forward}"] if own.reshard_after_forward is not None else []
    if own.activation_offload:
        offload = own.activation_offload
        count = spread(offload).count("true") if isinstance(offload, str) else "all"
        words.append(f"offload {count}")
    return ", ".join(words)


HEAD = """\
# tokens a sample; gain over the best of the uniform grid, and of it without offload; GiB reserved uniform and
# by unit; simulations and processor seconds of the grid and of the choice; the best uniform one -> by unit
"""


def main() -> None:
    """Write the rows of the cells that are named, by default of all."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path, help="rows are written here")
    parser.add_argument("cells", nargs="*", default=[*CELLS], metavar="CELL", help=", ".join(CELLS))
    options = parser.parse_args()
    if unknown := set(options.cells) - set(CELLS):
        parser.error(f"no such cell: {', '.join(sorted(unknown))}; there are {', '.join(CELLS)}")
    torch.set_num_threads(1)
    with options.file.open("w") as out:
        out.write(HEAD)
        for cell in options.cells:
            out.write(row_of(cell, CELLS[cell]) + "\n")
            out.flush()


if __name__ == "__main__":
    main()
