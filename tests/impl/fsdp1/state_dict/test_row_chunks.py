"""Flat shards to rows and back in one exchange, against cutting the whole tensors."""

from __future__ import annotations

import itertools
import math
import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fsdpbench.impl.collectives.comm import UnitGroups
from fsdpbench.impl.fsdp1.flat_param import flat_layout
from fsdpbench.impl.fsdp1.state_dict.sharded_values import fill_shard, row_range, rows_of_shard, rows_shape


def shapes_of(generator: random.Random) -> list[tuple[int, ...]]:
    """One to six parameters of up to three dimensions, also none, and also without elements."""
    return [
        tuple(generator.choice([0, 1, 2, 3, 5, 8]) for _ in range(generator.randint(0, 3)))
        for _ in range(generator.randint(1, 6))
    ]


def unit_of(shapes: list[tuple[int, ...]], rank: int, world: int) -> Any:
    """What the exchange needs of a unit."""
    groups = UnitGroups.of(dist.group.WORLD)
    layout = flat_layout(shapes, world, rank)
    return SimpleNamespace(layout=layout, groups=groups, device=torch.device("cpu"))


def case_exchange(rank: int) -> None:
    world = dist.get_world_size()
    generator = random.Random(0)
    for _ in range(40):
        shapes = shapes_of(generator)
        unit = unit_of(shapes, rank, world)
        torch.manual_seed(1)
        whole = [torch.randint(1, 1000, shape, dtype=torch.int64) for shape in shapes]
        padded = torch.zeros(unit.layout.gathered_numel, dtype=torch.int64)
        flat = torch.cat([value.reshape(-1) for value in whole])
        padded[: flat.numel()] = flat
        size = unit.layout.shard_numel
        shard = padded[rank * size : (rank + 1) * size]
        which = sorted(generator.sample(range(len(shapes)), generator.randint(1, len(shapes))))
        rows = rows_of_shard(unit, shard, which)
        for index, own in zip(which, rows, strict=True):
            chunks = whole[index].chunk(world) if shapes[index] else [whole[index]] * world
            expected = chunks[rank] if rank < len(chunks) else whole[index][:0]
            assert torch.equal(own, expected), (shapes, index)
        filled = torch.full_like(shard, -1)
        fill_shard(unit, filled, which, rows)
        for index, segment in enumerate(unit.layout.segments):
            part = filled[segment.shard_offset : segment.shard_offset + segment.shard_numel]
            start, end = segment.shard_range
            if index in which:
                assert torch.equal(part, whole[index].reshape(-1)[start:end]), (shapes, index)
            else:
                assert (part == -1).all()


@pytest.mark.parametrize("pool", ["one_rank", "two_ranks", "four_ranks"])
def test_exchange(pool: str, request) -> None:
    request.getfixturevalue(pool).run(case_exchange)


@pytest.mark.parametrize("world", [1, 2, 3, 7])
def test_rows_cover_everything_once(world: int) -> None:
    for shape in [(5, 3), (1,), (9, 2, 2), (4, 0), (0, 2)]:
        ranges = [row_range(shape, world, rank) for rank in range(world)]
        assert ranges[0][0] == 0
        assert ranges[-1][1] == math.prod(shape)
        assert all(a[1] == b[0] for a, b in itertools.pairwise(ranges))
        sizes = [math.prod(rows_shape(shape, world, rank)) for rank in range(world)]
        assert sizes == [end - start for start, end in ranges]
