"""A cell of the atlas and what is tried in it: for each way of sharding and recomputing, the largest batch.

cell ── strategy x activation checkpointing ──> ladder: batches from the largest down
        pruned by arithmetic ─────────────────> not simulated
        the first that fits without risk ─────> the ladder ends: a smaller batch is slower
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from fsdpbench.atlas.names import SYSTEM, Extent
from fsdpbench.atlas.pruning import least_bytes
from fsdpbench.configuration.config import Config
from fsdpbench.configuration.settings import Settings
from fsdpbench.results.provenance import content_key
from fsdpbench.results.records import Status
from fsdpbench.sim.hardware.profile import load_profile
from fsdpbench.sweep.planning import make_config, make_target, not_applicable, without_absent
from fsdpbench.sweep.simulated import UNTRACED

BATCHES = (16, 8, 4, 2, 1)
LONGEST = 4096
"""Tokens a sample, or what the model was published with, if that is less."""
_CHECKPOINTING = ("none", "op", "full")
_STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP")
_BETWEEN_NODES = ("HYBRID_SHARD",)

Results = Mapping[str, Mapping[str, Any]]
"""Results by content key."""


@dataclass
class Ladder:
    """Configurations that differ in their batch, the largest first, and how many arithmetic took away."""

    configs: list[Config]
    pruned: int = 0

    def next(self, results: Results) -> Config | None:
        """What is to be simulated next; None: nothing more."""
        for config in self.configs:
            result = results.get(content_key(config))
            if result is None:
                return config
            if fits_safely(result):
                return None
        return None


@dataclass
class Cell:
    """One model on one kind and number of GPUs."""

    model: str
    hardware: str
    gpus: int
    ladders: list[Ladder] = field(default_factory=list)

    @property
    def pruned(self) -> int:
        return sum(ladder.pruned for ladder in self.ladders)

    def found(self, results: Results) -> Iterator[tuple[Config, Mapping[str, Any]]]:
        """What was simulated in it."""
        for ladder in self.ladders:
            for config in ladder.configs:
                result = results.get(content_key(config))
                if result is not None:
                    yield config, result


def fits_safely(result: Mapping[str, Any]) -> bool:
    """Whether it ran, and memory suffices at the upper end of its interval."""
    return Status(result["status"]) is Status.OK and not (result.get("interval") or {}).get("risky")


def cells(extent: Extent) -> list[Cell]:
    """All cells with their ladders. Raises `UsageError` for unknown names."""
    return [
        _cell(model, hardware, gpus)
        for model in extent.models
        for hardware in extent.hardware
        for gpus in extent.gpus
    ]


def _cell(model: str, hardware: str, gpus: int) -> Cell:
    target = make_target(
        model=model,
        shape={},
        device="sim",
        hardware=hardware,
        gpus=gpus,
        gpus_per_node=None,
        data=None,
        measurement=UNTRACED,
    )
    workload = target.workload()
    seq = min(LONGEST, workload.resolve_seq(None) or LONGEST)
    usable = load_profile(hardware).usable_memory_bytes
    several = _BETWEEN_NODES if gpus > target.gpus_per_node else ()
    cell = Cell(model, hardware, gpus)
    for strategy in (*_STRATEGIES, *several):
        for checkpointing in _CHECKPOINTING:
            ladder = Ladder([])
            for batch in BATCHES:
                settings = Settings.of(
                    strategy=strategy, activation_checkpointing=checkpointing, batch=batch, seq=seq
                )
                config = without_absent(make_config(target, SYSTEM, settings, workload))
                if not_applicable(config):
                    continue
                needed = least_bytes(config)
                if needed is not None and needed > usable:
                    ladder.pruned += 1
                else:
                    ladder.configs.append(config)
            cell.ladders.append(ladder)
    return cell
