"""Ladders: the largest batch first, down to the first that fits without risk."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from fsdpbench.atlas.names import SMALL, WHOLE, Extent
from fsdpbench.atlas.space import BATCHES, Cell, cells
from fsdpbench.errors import UsageError
from fsdpbench.sim.hardware.profile import profile_names
from fsdpbench.workloads.registry import workload_names


def test_what_the_atlas_covers_is_there() -> None:
    assert (len(WHOLE.models), len(WHOLE.hardware)) == (10, 8)
    assert (len(SMALL.models), len(SMALL.hardware), len(SMALL.gpus)) == (3, 3, 4)
    assert (WHOLE.gpus[0], WHOLE.gpus[-1]) == (8, 1024)
    assert set(WHOLE.models) | set(SMALL.models) <= set(workload_names())
    assert set(WHOLE.hardware) | set(SMALL.hardware) <= set(profile_names())


def test_hybrid_sharding_is_tried_between_nodes_alone(two_cells: list[Cell]) -> None:
    tried = [
        {config.settings.strategy for ladder in cell.ladders for config in ladder.configs}
        for cell in two_cells
    ]
    assert tried == [
        {"FULL_SHARD", "SHARD_GRAD_OP"},
        {"FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD"},
    ]


@pytest.mark.parametrize(
    ("fits", "risky", "tried"),
    [(16, 0, [16]), (4, 0, [16, 8, 4]), (0, 0, list(BATCHES)), (8, 8, [16, 8, 4])],
)
def test_a_ladder_ends_where_a_batch_fits_without_risk(
    two_cells: list[Cell],
    worked_off: Callable[..., Any],
    ran: Callable[..., Any],
    out_of_memory: Callable[[], Any],
    fits: int,
    risky: int,
    tried: list[int],
) -> None:
    def told(config: Any) -> Any:
        batch = config.settings.batch
        return ran(batch, risky=batch == risky) if batch <= fits else out_of_memory()

    cell = Cell("llama-tiny", "a100-80gb", 8, two_cells[0].ladders[:1])
    found = cell.found(worked_off([cell], told))
    assert [config.settings.batch for config, _ in found] == tried


def test_unknown_names_are_usage_errors() -> None:
    for extent in (Extent(("llama9",), ("h200",), (8,)), Extent(("llama-tiny",), ("h900",), (8,))):
        with pytest.raises(UsageError):
            cells(extent)
