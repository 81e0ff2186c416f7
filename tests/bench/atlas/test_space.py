"""Cells: what is tried first, and that what is ruled out changes no answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from fsdpbench.answers.atlas.answers import answered
from fsdpbench.answers.atlas.space import BATCHES, SMALL, WHOLE, Cell, Extent, cells, next_wave
from fsdpbench.base.configuration.config import Config, shard_size_of
from fsdpbench.base.errors import UsageError
from fsdpbench.engine.results.provenance import content_key
from fsdpbench.sim.model.profile import profile_names
from fsdpbench.workloads.registry import workload_names


def test_what_the_atlas_covers_is_there() -> None:
    assert (len(WHOLE.models), len(WHOLE.hardware)) == (10, 8)
    assert (len(SMALL.models), len(SMALL.hardware), len(SMALL.gpus)) == (3, 3, 4)
    assert (WHOLE.gpus[0], WHOLE.gpus[-1]) == (8, 1024)
    assert set(WHOLE.models) | set(SMALL.models) <= set(workload_names())
    assert set(WHOLE.hardware) | set(SMALL.hardware) <= set(profile_names())


def test_hybrid_sharding_is_tried_between_nodes_alone(two_cells: list[Cell]) -> None:
    tried = [
        {config.settings.strategy for walk in cell.walks for config in walk.configs.values()}
        for cell in two_cells
    ]
    assert tried == [
        {"FULL_SHARD", "SHARD_GRAD_OP"},
        {"FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD"},
    ]


def needed(config: Config) -> float:
    """Memory in a made-up unit: 1, 3 or 6 for a sample with more or less recomputation, and the state."""
    settings = config.settings
    state = 16 / shard_size_of(config) + (2 if settings.strategy == "SHARD_GRAD_OP" else 0)
    return settings.batch * {"none": 6, "op": 3, "full": 1}[settings.activation_checkpointing] + state


def rate(config: Config) -> float:
    """Faster with larger batches and without recomputation."""
    return (
        config.settings.batch + {"none": 0.9, "op": 0.5, "full": 0}[config.settings.activation_checkpointing]
    )


@pytest.mark.parametrize("memory", [0.5, 3.5, 4.5, 9.0, 14.0, 25.0, 50.0, 200.0])
@pytest.mark.parametrize("risky_from", [0.7, 1.0])
def test_what_is_ruled_out_changes_no_best(
    two_cells: list[Cell],
    worked_off: Callable[..., Any],
    ran: Callable[..., Any],
    out_of_memory: Callable[[], Any],
    memory: float,
    risky_from: float,
) -> None:
    """The atlas of few simulations names the same best as one that simulates everything."""

    def told(config: Config) -> Any:
        if needed(config) > memory:
            return out_of_memory()
        return ran(rate(config), risky=needed(config) > risky_from * memory)

    everything = {
        key: told(config) for cell in two_cells for walk in cell.walks for key, config in walk.configs.items()
    }
    few = worked_off(two_cells, told)
    assert few.items() <= everything.items()
    assert len(few) <= len(everything) / 2
    best = [
        [(cell.status, cell.best, cell.risky[:1]) for cell in answered(two_cells, results).cells]
        for results in (everything, few)
    ]
    assert best[0] == best[1]


def test_interrupted_anywhere_it_ends_the_same(
    two_cells: list[Cell], ran: Callable[..., Any], out_of_memory: Callable[[], Any]
) -> None:
    def told(config: Config) -> Any:
        return ran(rate(config)) if needed(config) <= 14 else out_of_memory()

    results: dict[str, Any] = {}
    while wave := next_wave(two_cells, results):
        results |= {content_key(config): told(config) for config in wave[:1]}  # killed after its first
    cells = answered(two_cells, results).cells
    assert [cell.status for cell in cells] == ["fits", "fits"]
    covered = [cell.simulated + cell.pruned for cell in cells]
    assert covered == [len(BATCHES) * 3 * strategies for strategies in (2, 3)]


def test_most_gpus_are_tried_first(two_cells: list[Cell]) -> None:
    (first,) = next_wave(two_cells, {})
    assert (first.gpus, first.settings.strategy) == (16, "FULL_SHARD")
    assert (first.settings.activation_checkpointing, first.settings.batch) == ("full", 16)


def test_unknown_names_are_usage_errors() -> None:
    for extent in (Extent(("llama9",), ("h200",), (8,)), Extent(("llama-tiny",), ("h900",), (8,))):
        with pytest.raises(UsageError):
            cells(extent)
