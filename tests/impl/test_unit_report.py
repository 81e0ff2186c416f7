"""The report of units: what it says, for both front ends."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fsdp_cases import Model, loss_of, recorded, shard_model, tokens_of, wrap_model
from torch.distributed.device_mesh import init_device_mesh

from fsdpbench import impl


def build(front: str) -> Any:
    dtypes = (torch.bfloat16, torch.float32)
    if front == "fully_shard":
        return shard_model("impl", Model(blocks=2), mesh=init_device_mesh("cpu", (2,)), policy=dtypes)
    return wrap_model("impl", Model(blocks=2), precision=dtypes)


def case_report(rank: int, *, front: str) -> None:
    model = build(front)
    report = impl.unit_report(model)
    assert [unit.name for unit in report] == ["root", "blocks.0", "blocks.1"]
    block = report[1]
    assert block.numel == sum(p.numel() for p in Model(blocks=1).blocks[0].parameters())
    assert (block.dtype, block.compute_dtype, block.reduce_dtype) == ("float32", "bfloat16", "float32")
    assert block.parameters[:2] == ("scale", "norm.weight")
    assert block.shard_bytes == 4 * (block.numel + block.padding) // 2
    assert block.all_gather_bytes == 2 * (block.numel + block.padding)
    assert block.reduce_scatter_bytes == 4 * (block.numel + block.padding)
    assert block.all_reduce_bytes == 0
    assert block.ranks == (2, 1)
    assert block.unsharded_bytes >= block.all_gather_bytes
    # What it says is what is communicated.
    with recorded("impl") as collectives:
        loss_of(model, tokens_of(rank, 0)).backward()
    assert ("all_gather", block.all_gather_bytes // 2) in collectives
    assert ("reduce_scatter", block.reduce_scatter_bytes // 4) in collectives
    assert [unit.reshard_after_forward for unit in impl.unit_report(model)] == [False, True, True]
    lines = str(report).splitlines()
    assert len(lines) == 4
    assert lines[0].split()[:2] == ["unit", "parameters"]
    assert "float32 / bfloat16 / float32" in lines[1]


@pytest.mark.parametrize("front", ["fully_shard", "flat"])
def test_report(two_ranks, front: str) -> None:
    two_ranks.run(case_report, front=front)


def test_a_plain_model_has_no_units() -> None:
    assert impl.unit_report(Model()) == []
