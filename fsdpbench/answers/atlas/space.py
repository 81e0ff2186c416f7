"""A cell of the atlas and what is tried in it: each strategy, recomputation and batch that may fit.

arithmetic ──> does not fit: not simulated            (`least_bytes`)
what ran   ──> cannot fit or is slower: not simulated (`Known`)
the rest   ──> simulated, cells with most GPUs first: what runs out of memory there does so on fewer GPUs
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
"""Tokens a sample, or what the model was published with, if that is less."""
_STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP")
_BETWEEN_NODES = ("HYBRID_SHARD",)

Results = Mapping[str, Result]
"""Results by content key."""


@dataclass
class Walk:
    """Configurations of one strategy in one cell, in the order in which they are tried."""

    configs: dict[str, Config] = field(default_factory=dict)
    """By content key."""
    pruned: int = 0
    """Further ones that cannot fit by arithmetic."""

    def next(self, results: Results, known: "Known") -> Config | None:
        """Return the configuration to simulate next; None: nothing more."""
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
        """Return the number of configurations that arithmetic left."""
        return sum(len(walk.configs) for walk in self.walks)

    def found(self, results: Results) -> Iterator[tuple[Config, Result]]:
        """Yield what was simulated in it."""
        for walk in self.walks:
            for key, config in walk.configs.items():
                if key in results:
                    yield config, results[key]


def cells(extent: "Extent") -> list[Cell]:
    """Return all cells with what may be tried in them. Raises `UsageError` for unknown names."""
    most = max(extent.gpus)
    return [
        _cell(model, hardware, gpus, explores=gpus == most)
        for model in extent.models
        for hardware in extent.hardware
        for gpus in extent.gpus
    ]


def next_wave(found: Sequence[Cell], results: Results) -> list[Config]:
    """Return the configurations to simulate next, at most one a walk; empty: nothing more.

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
        ordered = sorted(row, key=lambda cell: -cell.gpus)
        # The strategy that holds least, then the others side by side.
        for step in (step for cell in ordered for step in (cell.walks[:1], cell.walks[1:])):
            if configs := [c for walk in step if (c := walk.next(results, known)) is not None]:
                wave += configs
                break
    return wave


def build(
    cells: Sequence[Cell], folder: Path, progress: Callable[[], Progress], jobs: int | None = None
) -> Results:
    """Simulate `cells` in `folder`, `jobs` at a time, wave by wave; return all results by content key.
    Interrupted, call it again to resume."""
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
    """Return pairs of recomputation and batch, in the order to try them. Where nothing is known yet, what
    needs least memory comes first at each batch, because its failure rules out the others; elsewhere the
    fastest, because its success does."""
    if explores:
        return [(how, batch) for batch in BATCHES for how in reversed(RECOMPUTED)]
    return [(how, batch) for how in RECOMPUTED for batch in BATCHES]


SYSTEM = "torch-fsdp2"
"""What most new scripts use."""


@dataclass(frozen=True)
class Extent:
    """Models, chips and numbers of GPUs; a cell is one of each."""

    models: tuple[str, ...]
    hardware: tuple[str, ...]
    gpus: tuple[int, ...]


_EXTENTS = table_beside(__file__, "extents.toml")
WHOLE, SMALL = (msgspec.convert(_EXTENTS[name], Extent) for name in ("whole", "small"))


# What cannot fit by arithmetic, so that it is not simulated. The bound is never above the truth.
# Two moments of a step are counted, each by what a rank surely holds then:
#     optimizer's step   parameters, gradients and AdamW's two states of its share       (`state_bytes`)
#     loss               parameters and states of its share, the input of every block, the logits, and, where
#                        nothing is resharded after forward, all gathered parameters; where nothing is
#                        recomputed, the inputs of a block's first products too

_SHARE_BEFORE_GRADIENTS = 12 / 16
"""AdamW's states and the parameters, of all that `state_bytes` counts."""
_HALF = 2
_FULL = 4
"""Logits are cast for the loss: both are there while they are."""
_KEEPS_GATHERED = ("SHARD_GRAD_OP", "_HYBRID_SHARD_ZERO2")
_KEPT_OF_A_BLOCK = 3
"""Of tensors as wide as the model: the block's input, what attention and feed-forward project at first."""
_BLOCKS = ("layers", "d_model", "vocab")


def least_bytes(config: Config) -> int | None:
    """Return a lower bound of the bytes that a step of `config` needs; None where that is not known."""
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


# The configurations that past simulations rule out: they cannot fit, or are slower than what fits.
# Two rules, for one model on one kind of GPU:
#     does not fit   another one with the same batch ran out of memory that recomputes as much, shares the
#                    state among as many ranks and has a strategy that holds no more
#     slower         in the same cell and with the same strategy, another one fits without risk that
#                    recomputes no more and has no smaller batch
# A smaller batch is no reason: near the limit, fragments can make batch 1 run out where batch 2 fits.

RECOMPUTED = ("none", "op", "full")
"""Activation checkpointing, from the fastest to what holds least."""
_HOLDS_LEAST = "FULL_SHARD"


class Known:
    """The configurations that were simulated so far, by model and chip."""

    def __init__(self) -> None:
        self._out_of_memory: dict[tuple[str, str | None], list[Config]] = defaultdict(list)
        self._safe: dict[tuple[str, str | None, int, str], list[Config]] = defaultdict(list)

    def add(self, config: Config, result: Result) -> None:
        """Remember how `config` ended."""
        if result.status is Status.OOM:
            self._out_of_memory[config.model, config.hardware].append(config)
        elif fits_safely(result):
            self._safe[_group_of(config)].append(config)

    def rules_out(self, config: Config) -> bool:
        """Return whether simulating `config` could change no answer of the atlas."""
        full = self._out_of_memory[config.model, config.hardware]
        return any(_asks_no_more(other, config) for other in full) or any(
            _recomputed(other) <= _recomputed(config) and other.settings.batch >= config.settings.batch
            for other in self._safe[_group_of(config)]
        )


def fits_safely(result: Result) -> bool:
    """Return whether it ran, and memory suffices at the upper end of its interval."""
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
