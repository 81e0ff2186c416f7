"""The cells of the atlas and their configurations: each strategy, recomputation and batch that may fit.

arithmetic   ──> does not fit: not simulated            (`least_bytes`)
past results ──> cannot fit or is slower: not simulated (`Known`)
the rest     ──> simulated, most GPUs first: if it runs out of memory there, it also does on fewer GPUs
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from fsdpbench.base.configuration.config import Config, shard_size_of
from fsdpbench.base.files.documents import table_beside
from fsdpbench.engine.results.provenance import content_key
from fsdpbench.engine.results.records import Status
from fsdpbench.reports.result import Result
from fsdpbench.sweep.planning import configured, make_target, not_applicable, workload_named
from fsdpbench.sweep.prediction import state_bytes, usable_bytes
from fsdpbench.sweep.runner import UNTRACED, simulate
from fsdpbench.sweep.trials import Progress

BATCHES = (16, 8, 4, 2, 1)
LONGEST = 4096
"""Maximum tokens per sample; a model's published sequence length is used if it is shorter."""
_STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP")
_BETWEEN_NODES = ("HYBRID_SHARD",)

Results = Mapping[str, Result]
"""Results by content key."""


@dataclass
class Walk:
    """The configurations of one strategy in one cell, in the order to try them."""

    configs: dict[str, Config] = field(default_factory=dict)
    """By content key."""
    pruned: int = 0
    """Number of other configurations that cannot fit by arithmetic."""

    def next(self, results: Results, known: "Known") -> Config | None:
        """Return the next configuration to simulate, or None."""
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
    parameters: int
    walks: list[Walk] = field(default_factory=list)

    @property
    def pruned(self) -> int:
        return sum(walk.pruned for walk in self.walks)

    @property
    def simulable(self) -> int:
        """Return the number of configurations that arithmetic does not exclude."""
        return sum(len(walk.configs) for walk in self.walks)

    def found(self, results: Results) -> Iterator[tuple[Config, Result]]:
        """Yield the simulated configurations of this cell with their results."""
        for walk in self.walks:
            for key, config in walk.configs.items():
                if key in results:
                    yield config, results[key]


def cells(extent: "Extent") -> list[Cell]:
    """Return all cells with their configurations. Raises `UsageError` for unknown names."""
    most = max(extent.gpus)
    return [
        _cell(model, hardware, gpus, explores=gpus == most)
        for model in extent.models
        for hardware in extent.hardware
        for gpus in extent.gpus
    ]


def next_wave(found: Sequence[Cell], results: Results) -> list[Config]:
    """Return the next configurations to simulate, at most one per walk; empty if none is left.

    For each model and chip, the cells with most GPUs come first, and there the strategy with least memory.
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
        ordered = sorted(row, key=lambda cell: -cell.gpus)
        # The strategy with least memory first, then the others together.
        for step in (step for cell in ordered for step in (cell.walks[:1], cell.walks[1:])):
            if configs := [c for walk in step if (c := walk.next(results, known)) is not None]:
                wave += configs
                break
    return wave


def build(
    cells: Sequence[Cell], folder: Path, progress: Callable[[], Progress], jobs: int | None = None
) -> Results:
    """Simulate `cells` in `folder`, `jobs` at a time, wave by wave; return all results by content key. Call
    it again to resume after an interruption."""
    results: Results = {}
    tried: list[Config] = []
    while wave := next_wave(cells, results):
        tried += wave
        results = simulate(tried, folder, progress(), jobs)
    return results


def _cell(model: str, hardware: str, gpus: int, explores: bool) -> Cell:
    target = make_target(model=model, hardware=hardware, gpus=gpus, measurement=UNTRACED)
    workload = target.workload()
    seq = min(LONGEST, workload.resolve_seq(None) or LONGEST)
    several = _BETWEEN_NODES if gpus > target.gpus_per_node else ()
    cell = Cell(model, hardware, gpus, workload.parameters)
    for strategy in (*_STRATEGIES, *several):
        walk = Walk()
        for checkpointing, batch in _order(explores and strategy == _STRATEGIES[0]):
            config = configured(
                target,
                SYSTEM,
                strategy=strategy,
                activation_checkpointing=checkpointing,
                batch=batch,
                seq=seq,
            )
            if not_applicable(config):
                continue
            if (least_bytes(config) or 0) > (usable_bytes(config) or 0):
                walk.pruned += 1
            else:
                walk.configs[content_key(config)] = config
        cell.walks.append(walk)
    return cell


def _order(explores: bool) -> list[tuple[str, int]]:
    """Return (recomputation, batch) in the order to try them. With `explores` nothing is known yet: at each
    batch the one with least memory comes first, because its failure rules out the others. Otherwise the
    fastest comes first, because its success does."""
    if explores:
        return [(how, batch) for batch in BATCHES for how in reversed(RECOMPUTED)]
    return [(how, batch) for how in RECOMPUTED for batch in BATCHES]


SYSTEM = "torch-fsdp2"
"""The system that most new scripts use."""


@dataclass(frozen=True)
class Extent:
    """Models, chips and numbers of GPUs. There is a cell for each combination."""

    models: tuple[str, ...]
    hardware: tuple[str, ...]
    gpus: tuple[int, ...]


_EXTENTS = table_beside(__file__, "extents.toml")
WHOLE, SMALL = (msgspec.convert(_EXTENTS[name], Extent) for name in ("whole", "small"))


# A lower bound of memory, to exclude configurations that cannot fit without a simulation.
# The bound is the maximum of two moments of a step, each with the memory that a rank surely holds then:
#     optimizer step     parameters, gradients and AdamW's two states of its shard       (`state_bytes`)
#     loss               parameters and states of its shard, the input of every block, the logits; without
#                        resharding after forward, all unsharded parameters; without recomputation, the
#                        inputs of a block's first matrix products too

_SHARE_BEFORE_GRADIENTS = 12 / 16
"""The share of AdamW's states and the parameters in `state_bytes`."""
_HALF = 2
_FULL = 4
"""Logits are cast for the loss, so both copies exist at the same time."""
_KEEPS_GATHERED = ("SHARD_GRAD_OP", "_HYBRID_SHARD_ZERO2")
_KEPT_OF_A_BLOCK = 3
"""Saved tensors of the model's width: the block's input, and the inputs of attention and feed-forward."""
_BLOCKS = ("layers", "d_model", "vocab")


def least_bytes(config: Config) -> int | None:
    """Return a lower bound of the bytes that a step of `config` needs; None if it is not known."""
    step = state_bytes(config)
    if step is None:
        return None
    settings = config.settings
    if settings.param_dtype not in ("bf16", "fp16") or settings.optimizer == "sgd":
        return step
    workload = workload_named(config)
    loss = int(step * _SHARE_BEFORE_GRADIENTS)
    if settings.strategy in _KEEPS_GATHERED and settings.reshard_after_forward is None:
        loss += _HALF * workload.parameters
    if all(name in workload.shape for name in _BLOCKS) and settings.seq:
        layers, width, vocab = (int(workload.shape[name]) for name in _BLOCKS)
        kept = _KEPT_OF_A_BLOCK if settings.activation_checkpointing == "none" else 1
        logit = _HALF + (_FULL if workload.shape.get("fp32_loss") else 0)
        loss += settings.batch * settings.seq * (_HALF * kept * layers * width + logit * vocab)
    return max(step, loss)


# The configurations that past simulations rule out: they cannot fit, or are slower than one that fits.
# Two rules, for one model on one kind of GPU:
#     does not fit   another configuration ran out of memory with the same batch, at least as much
#                    recomputation, at least as many ranks per shard group and a strategy with no more memory
#     slower         in the same cell and with the same strategy, another configuration fits without risk,
#                    with no more recomputation and no smaller batch
# A smaller batch proves nothing: near the limit, fragmentation can make batch 1 run out where batch 2 fits.

RECOMPUTED = ("none", "op", "full")
"""Activation checkpointing, from the fastest to the one with least memory."""
_HOLDS_LEAST = "FULL_SHARD"


class Known:
    """The simulated configurations, by model and chip."""

    def __init__(self) -> None:
        self._out_of_memory: dict[tuple[str, str | None], list[Config]] = defaultdict(list)
        self._safe: dict[tuple[str, str | None, int, str], list[Config]] = defaultdict(list)

    def add(self, config: Config, result: Result) -> None:
        """Add the result of `config`."""
        if result.status is Status.OOM:
            self._out_of_memory[config.model, config.hardware].append(config)
        elif fits_safely(result):
            self._safe[_group_of(config)].append(config)

    def rules_out(self, config: Config) -> bool:
        """Return whether simulating `config` cannot change any answer of the atlas."""
        full = self._out_of_memory[config.model, config.hardware]
        return any(_asks_no_more(other, config) for other in full) or any(
            _recomputed(other) <= _recomputed(config) and other.settings.batch >= config.settings.batch
            for other in self._safe[_group_of(config)]
        )


def fits_safely(result: Result) -> bool:
    """Return whether it ran, and fits at the upper end of its memory interval."""
    return result.status is Status.OK and not result.is_risky


def _group_of(config: Config) -> tuple[str, str | None, int, str]:
    return config.model, config.hardware, config.gpus, config.settings.strategy


def _asks_no_more(one: Config, other: Config) -> bool:
    """Return whether `one` needs at most the memory that `other` needs."""
    return (
        one.settings.strategy in (_HOLDS_LEAST, other.settings.strategy)
        and shard_size_of(one) >= shard_size_of(other)
        and one.settings.batch == other.settings.batch
        and _recomputed(one) >= _recomputed(other)
    )


def _recomputed(config: Config) -> int:
    return RECOMPUTED.index(config.settings.activation_checkpointing)
