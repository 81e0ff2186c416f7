"""What an emulated collective leaves is what a real one leaves where all ranks hold the same."""

from __future__ import annotations

import pytest
import torch
from torch.distributed import ReduceOp

from fsdpbench.engine.emulation.process_group import fill_outputs

RANK, SIZE = 1, 3


def test_a_gather_repeats_the_own_shard_also_in_place() -> None:
    whole = torch.zeros(6)
    shard = whole[2:4]
    shard.copy_(torch.tensor([5.0, 7.0]))
    fill_outputs("all_gather", [shard], [whole], RANK, SIZE, None)
    assert whole.tolist() == [5, 7] * SIZE
    separate, parts = torch.tensor([1.0, 2.0]), [torch.zeros(2) for _ in range(SIZE)]
    fill_outputs("all_gather", [separate], parts, RANK, SIZE, None)
    assert [part.tolist() for part in parts] == [[1, 2]] * SIZE


@pytest.mark.parametrize(
    ("operation", "factor"), [(ReduceOp.SUM, SIZE), (ReduceOp.AVG, 1), (ReduceOp.MAX, 1)]
)
def test_a_reduction_of_equal_ranks(operation: ReduceOp, factor: int) -> None:
    source, own = torch.arange(6.0), torch.zeros(2)
    fill_outputs("reduce_scatter", [source], [own], RANK, SIZE, operation)
    assert own.tolist() == [2 * factor, 3 * factor]
    listed = [torch.full((2,), float(rank)) for rank in range(SIZE)]
    fill_outputs("reduce_scatter", listed, [own], RANK, SIZE, operation)
    assert own.tolist() == [RANK * factor] * 2
    tensor = torch.ones(2)
    fill_outputs("all_reduce", [tensor], [tensor], RANK, SIZE, operation)
    assert tensor.tolist() == [factor] * 2


def test_an_exchange() -> None:
    source, received = torch.arange(3.0), torch.zeros(3)
    fill_outputs("all_to_all", [source], [received], RANK, SIZE, None)
    assert received.tolist() == source.tolist()
