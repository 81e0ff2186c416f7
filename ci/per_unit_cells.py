"""Gains of settings by unit over the best of the uniform grid, in twelve cells whose memory is short.

    python ci/per_unit_cells.py ci/measured/per_unit.txt [CELL...]

A cell's batch is the smallest power of two at which nothing fits without recomputation (at the upper end of
memory's interval). The grid is recomputation (none, op, full), strategy (resharded or not, hybrid ones
between nodes) and size of units (1, 2 blocks). A row is added as soon as its cell is done.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from fsdpbench.answers.tune.front import Candidate, Goal, judge
from fsdpbench.answers.tune.per_unit import choose, is_safe
from fsdpbench.base.configuration.config import Config
from fsdpbench.sweep.planning import Target, configured, make_target, not_applicable
from fsdpbench.sweep.prediction import cannot_fit
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
"""Model, chip and GPUs: tokens a sample."""
GOAL = Goal("tokens_per_s")
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


def grid_of(target: Target, batch: int, seq: int, run: Simulated) -> list[Candidate]:
    """Return the uniform grid at one batch. What recomputes less is not tried where that does not fit."""
    found = []
    strategies = list(KEPT.items())[: 2 if target.gpus > target.gpus_per_node else 1]
    for wrap in ("block", "every-2"):
        for strategy in (each for pair in strategies for each in pair):
            for how in ("full", "op", "none"):
                found += run.uniform(
                    target, batch=batch, seq=seq, wrap=wrap, strategy=strategy, activation_checkpointing=how
                )
                if not found or not is_safe(found[-1]):
                    break
    return found


def row_of(cell: str, seq: int) -> str:
    """Return the line of a cell."""
    model, hardware, gpus = cell.split("/")
    target = make_target(model=model, hardware=hardware, gpus=int(gpus), measurement=UNTRACED)
    walk, grid, chooser, batch, smaller = Simulated(), Simulated(), Simulated(), 1, 0.0
    while (first := walk.uniform(target, batch=batch, seq=seq)) and is_safe(first[0]):
        kept = walk.uniform(target, batch=batch, seq=seq, strategy="SHARD_GRAD_OP")
        smaller = max([smaller, *(each.speed for each in [*first, *kept] if is_safe(each))])
        batch *= 2
    tried = grid_of(target, batch, seq, grid)
    chosen = choose(tried, chooser, None)
    best, uniform = chosen.by_unit, chosen.uniform
    settings = best.config.settings
    gain = f"{best.speed / uniform.speed - 1:+.1%}" if uniform else "only"
    gib = f"{(uniform.memory or 0) / 2**30:.1f}" if uniform else "-"
    anywhere = max(smaller, uniform.speed if uniform else 0.0)
    of_any = f"{best.speed / anywhere - 1:+.1%}" if anywhere else "only"
    how = f"{settings.activation_checkpointing} {settings.reshard_after_forward} {settings.wrap}"
    return (
        f"{cell:28} {batch:3} {gain:>7} {of_any:>7} {gib:>6} {(best.memory or 0) / 2**30:6.1f} "
        f"{grid.count:3} {grid.cpu_s:5.0f} {chooser.count:3} {chooser.cpu_s:5.0f}  {how}"
    )


HEAD = (
    "# batch, gain over the grid at this batch, over it and smaller ones, GiB reserved uniform and by unit,\n"
    "# simulations and processor seconds of the grid and of the choice; recomputed, resharded, units\n"
)


def main(file: str, *cells: str) -> None:
    """Write the rows of these cells, by default all of them."""
    torch.set_num_threads(1)
    with Path(file).open("w") as out:
        out.write(HEAD)
        for cell in cells or CELLS:
            out.write(row_of(cell, CELLS[cell]) + "\n")
            out.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
