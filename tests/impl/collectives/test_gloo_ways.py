"""Gloo's collectives done another way give what the plain ones give: exchange, broadcasts."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fsdp_cases import Model, assert_same_outcome, read_fully_shard, recorded, shard_model, tokens_of, train

from fsdpbench.impl.collectives import comm
from fsdpbench.impl.fsdp1.flat_param import flat_layout
from fsdpbench.impl.runtime.reduce_ways import Exchanged, Given, plan_of
from fsdpbench.impl.runtime.streams import Streams
from fsdpbench.impl.shared.layout import chunked_layout
from fsdpbench.impl.shared.settings import UnitPrecision

SHAPES = {
    "even": ((8, 3), (4,)),
    "uneven": ((5, 2), (7,), (3,)),
    "fewer rows than ranks": ((1, 6), (2,)),
}


def case_exchange(rank: int, *, shapes: tuple[tuple[int, ...], ...], kind: str, before: float) -> None:
    """Against summing whole gradients of all ranks."""
    ranks = dist.get_world_size()
    layout = (flat_layout if kind == "flat" else chunked_layout)(shapes, ranks, rank)
    everyone = [
        [
            torch.randn(shape, generator=torch.Generator().manual_seed(100 * r + i))
            for i, shape in enumerate(shapes)
        ]
        for r in range(ranks)
    ]
    unit: Any = SimpleNamespace(
        layout=layout,
        precision=UnitPrecision.decide(torch.float32, None, None),
        device=torch.device("cpu"),
        groups=comm.UnitGroups.of(dist.group.WORLD),
        gathers=True,
    )
    which = range(len(shapes))
    average = comm.Averaging(dist.ReduceOp.SUM, before, 1.0)
    exchange = Exchanged(Given(unit, which, everyone[rank], average, plan_of(unit, which)))
    exchange.start(Streams(unit.device))
    exchange.work.wait()
    exchange.finish()
    result = exchange.output
    assert result.numel() == layout.shard_numel
    for index, segment in enumerate(layout.segments):
        total = sum(everyone[r][index] for r in range(ranks)) / before
        start, end = segment.shard_range
        found = result[segment.shard_offset : segment.shard_offset + end - start]
        torch.testing.assert_close(found, total.reshape(-1)[start:end], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("pool", ["two_ranks", "four_ranks"])
@pytest.mark.parametrize("kind", ["flat", "chunked"])
def test_an_exchange_is_a_reduce_scatter(pool: str, kind: str, request: Any) -> None:
    for shapes in SHAPES.values():
        request.getfixturevalue(pool).run(case_exchange, shapes=shapes, kind=kind, before=1.0)
    request.getfixturevalue(pool).run(case_exchange, shapes=SHAPES["even"], kind=kind, before=2.0)


def case_all_gather(rank: int, *, in_place: bool) -> None:
    ranks, group = dist.get_world_size(), dist.group.WORLD
    output = torch.full((ranks * 5,), math.nan)
    shard = output[rank * 5 : rank * 5 + 5] if in_place else torch.empty(5)
    shard.copy_(torch.arange(5.0) + 10 * rank)
    assert comm.gathers_by_copying(group, output.device)
    assert not comm.averages(group, output.device)
    work = comm.all_gather(output, shard, group, True)
    work.wait()
    assert output.view(ranks, 5)[:, 0].tolist() == [10.0 * r for r in range(ranks)]
    assert not output.isnan().any()


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("pool", ["two_ranks", "four_ranks"])
def test_broadcasts_are_an_all_gather(pool: str, in_place: bool, request: Any) -> None:
    request.getfixturevalue(pool).run(case_all_gather, in_place=in_place)


def case_peers(rank: int, *, policy: Any, rows: int) -> None:
    """Through a buffer for peers: torch's result and collectives; ``rows`` that do not divide, too."""
    outcomes, records = [], []
    for kind in ("impl", "torch"):
        torch.manual_seed(0)
        model = shard_model(kind, Model(blocks=2, width=rows), policy=policy)
        with recorded(kind) as record:
            outcomes.append(train(model, rank, *read_fully_shard, steps=3))
        records.append(record)
    assert_same_outcome(*outcomes, tolerance=5e-6)  # four ranks sum in different orders
    assert records[0] == records[1]


@pytest.mark.parametrize("policy", [None, (torch.bfloat16, torch.float32)], ids=["fp32", "bf16"])
def test_gathers_from_peers_equal_torch(four_ranks, policy: Any) -> None:
    four_ranks.run(case_peers, policy=policy, rows=10)


def case_abandoned(rank: int) -> None:
    """A gather that nobody used leaves no memory behind, and the next one is right."""
    model = shard_model("impl", Model(blocks=2))
    block = model.blocks[0]
    model(tokens_of(rank, 0)).sum().backward()
    block.unshard(async_op=True)
    block.reshard()
    block.unshard()
    gathered = {name: parameter.clone() for name, parameter in block.named_parameters()}
    block.reshard()
    for name, parameter in block.named_parameters():
        assert torch.equal(parameter.full_tensor(), gathered[name])


def test_a_gather_may_be_abandoned(two_ranks) -> None:
    two_ranks.run(case_abandoned)
