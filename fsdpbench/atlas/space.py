"""A cell of the atlas and what is tried in it: each strategy, recomputation and batch that may fit.

arithmetic ──> does not fit: not simulated            (pruning.py)
what ran   ──> cannot fit or is slower: not simulated (known.py)
the rest   ──> simulated, cells with most GPUs first: what runs out of memory there does so on fewer GPUs
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fsdpbench.atlas.known import RECOMPUTED, Known
from fsdpbench.atlas.names import SYSTEM, Extent
from fsdpbench.atlas.pruning import least_bytes
from fsdpbench.configuration.config import Config
from fsdpbench.configuration.settings import Settings
from fsdpbench.results.provenance import content_key
from fsdpbench.sim.hardware.profile import load_profile
from fsdpbench.sweep.planning import make_config, make_target, not_applicable, without_absent
from fsdpbench.sweep.simulated import UNTRACED

BATCHES = (16, 8, 4, 2, 1)
LONGEST = 4096
"""Tokens a sample, or what the model was published with, if that is less."""
_STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP")
_BETWEEN_NODES = ("HYBRID_SHARD",)

Results = Mapping[str, Mapping[str, Any]]
"""Results by content key."""


@dataclass
class Walk:
    """Configurations of one strategy in one cell, in the order in which they are tried."""

    configs: dict[str, Config] = field(default_factory=dict)
    """By content key."""
    pruned: int = 0
    """Further ones that cannot fit by arithmetic."""

    def next(self, results: Results, known: Known) -> Config | None:
        """What is to be simulated next; None: nothing more."""
        for key, config in self.configs.items():
            if key not in results and not known.rules_out(config):
                return config
        return None


@dataclass
class Cell:
    """One model on one kind and number of GPUs."""

    model: str
    hardware: str
    gpus: int
    walks: list[Walk] = field(default_factory=list)

    @property
    def pruned(self) -> int:
        return sum(walk.pruned for walk in self.walks)

    @property
    def simulable(self) -> int:
        """How many arithmetic left."""
        return sum(len(walk.configs) for walk in self.walks)

    def found(self, results: Results) -> Iterator[tuple[Config, Mapping[str, Any]]]:
        """What was simulated in it."""
        for walk in self.walks:
            for key, config in walk.configs.items():
                if key in results:
                    yield config, results[key]


def cells(extent: Extent) -> list[Cell]:
    """All cells with what may be tried in them. Raises `UsageError` for unknown names."""
    most = max(extent.gpus)
    return [
        _cell(model, hardware, gpus, explores=gpus == most)
        for model in extent.models
        for hardware in extent.hardware
        for gpus in extent.gpus
    ]


def next_wave(found: Sequence[Cell], results: Results) -> list[Config]:
    """What is to be simulated next, at most one configuration a walk; empty: nothing more.

    Of each model and chip, the cells with most GPUs come first, and in them the strategy that holds least.
    """
    known = Known()
    for cell in found:
        for config, result in cell.found(results):
            known.add(config, result)
    rows: dict[tuple[str, str], list[Cell]] = {}
    for cell in found:
        rows.setdefault((cell.model, cell.hardware), []).append(cell)
    wave: list[Config] = []
    for row in rows.values():
        steps = (step for cell in sorted(row, key=lambda cell: -cell.gpus) for step in _steps(cell))
        for step in steps:
            if configs := [c for walk in step if (c := walk.next(results, known)) is not None]:
                wave += configs
                break
    return wave


def _steps(cell: Cell) -> tuple[list[Walk], list[Walk]]:
    """The strategy that holds least, then the others side by side."""
    return cell.walks[:1], cell.walks[1:]


def _cell(model: str, hardware: str, gpus: int, explores: bool) -> Cell:
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
        walk = Walk()
        for checkpointing, batch in _order(explores and strategy == _STRATEGIES[0]):
            settings = Settings.of(
                strategy=strategy, activation_checkpointing=checkpointing, batch=batch, seq=seq
            )
            config = without_absent(make_config(target, SYSTEM, settings, workload))
            if not_applicable(config):
                continue
            needed = least_bytes(config)
            if needed is not None and needed > usable:
                walk.pruned += 1
            else:
                walk.configs[content_key(config)] = config
        cell.walks.append(walk)
    return cell


def _order(explores: bool) -> list[tuple[str, int]]:
    """Recomputation and batch. Where nothing is known yet, what needs least memory comes first at each batch,
    because its failure rules out the others; elsewhere the fastest, because its success does."""
    if explores:
        return [(how, batch) for batch in BATCHES for how in reversed(RECOMPUTED)]
    return [(how, batch) for how in RECOMPUTED for batch in BATCHES]
