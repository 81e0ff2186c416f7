"""The configurations that past simulations rule out: they cannot fit, or are slower than what fits.

Two rules, for one model on one kind of GPU:

    does not fit   another one with the same batch ran out of memory that recomputes as much, shares the
                   state among as many ranks and has a strategy that holds no more
    slower         in the same cell and with the same strategy, another one fits without risk that
                   recomputes no more and has no smaller batch

A smaller batch is no reason: near the limit, fragments can make batch 1 run out of memory where batch 2 fits.
"""

from __future__ import annotations

from collections import defaultdict

from fsdpbench.base.configuration.config import Config
from fsdpbench.engine.results.records import Status
from fsdpbench.reports.result import Result
from fsdpbench.systems.base import shard_size_of

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
            self._safe[_cell(config)].append(config)

    def rules_out(self, config: Config) -> bool:
        """Whether simulating `config` could change no answer of the atlas."""
        return any(
            _asks_no_more(other, config) for other in self._out_of_memory[config.model, config.hardware]
        ) or any(_is_no_slower(other, config) for other in self._safe[_cell(config)])


def fits_safely(result: Result) -> bool:
    """Whether it ran, and memory suffices at the upper end of its interval."""
    return result.status is Status.OK and not result.is_risky


def _cell(config: Config) -> tuple[str, str | None, int, str]:
    return config.model, config.hardware, config.gpus, config.settings.strategy


def _asks_no_more(one: Config, other: Config) -> bool:
    """Whether `one` needs at most the memory that `other` needs."""
    return (
        one.settings.strategy in (_HOLDS_LEAST, other.settings.strategy)
        and shard_size_of(one) >= shard_size_of(other)
        and one.settings.batch == other.settings.batch
        and _recomputed(one) >= _recomputed(other)
    )


def _is_no_slower(one: Config, other: Config) -> bool:
    return _recomputed(one) <= _recomputed(other) and one.settings.batch >= other.settings.batch


def _recomputed(config: Config) -> int:
    return RECOMPUTED.index(config.settings.activation_checkpointing)
