"""Units that run in some iterations and not in others, and forwards that no backward follows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fsdp_cases import (
    Model,
    Read,
    assert_close,
    loss_of,
    read_flat,
    read_fully_shard,
    shard_model,
    tokens_of,
    wrap_model,
)
from torch.distributed.device_mesh import init_device_mesh

from fsdpbench.impl.runtime import schedule
from fsdpbench.impl.runtime.hooks import hooks_of


class Shorter(Model):
    """Runs its first ``count`` blocks."""

    count = 4

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in list(self.blocks)[: self.count]:
            x = block(x)
        return self.head(self.norm(x))


def build(kind: str, front: str, prefetch: str) -> tuple[Any, Shorter, Read]:
    torch.manual_seed(0)
    plain = Shorter(blocks=4)
    if front == "fully_shard":
        ours = {"backward_prefetch": prefetch} if kind == "impl" else {}
        mesh = init_device_mesh("cpu", (2,))
        return shard_model(kind, plain, mesh=mesh, **ours), plain, read_fully_shard[1]
    wrapped = wrap_model(kind, plain, prefetch=f"BACKWARD_{prefetch.upper()}")
    return wrapped, plain, read_flat(kind)[1]


def case_skipped(rank: int, *, front: str) -> None:
    for prefetch in ("pre", "post"):
        found = []
        for kind in ("impl", "torch"):
            model, plain, read = build(kind, front, prefetch)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            losses = []
            for step, count in enumerate((4, 2, 4, 1, 3)):
                plain.count = count
                loss = loss_of(model, tokens_of(rank, step))
                loss.backward()
                losses.append(loss.item())
                optimizer.step()
                optimizer.zero_grad()
            found.append((losses, read(model)))
        assert found[0][0] == pytest.approx(found[1][0], rel=1e-5)
        assert_close(found[0][1], found[1][1], 1e-5)


@pytest.mark.parametrize("front", ["fully_shard", "flat"])
def test_skipped_blocks_equal_torch(two_ranks, front: str) -> None:
    two_ranks.run(case_skipped, front=front)


def case_no_backward(rank: int) -> None:
    model, plain, _ = build("impl", "flat", "pre")
    hooks: Any = hooks_of(plain.blocks[0])
    stage = hooks.stage
    for step in range(3):
        with torch.no_grad():
            model(tokens_of(rank, step))
    assert not stage.forward_positions
    assert not hooks.runtime.schedule._post_forward_order
    # With gradients a backward may still come, in any order: remembered for long, but not for ever.
    before, schedule._LONGEST_ORDER = schedule._LONGEST_ORDER, 12
    try:
        losses = [loss_of(model, tokens_of(rank, step)) for step in range(4)]
        assert len(hooks.runtime.schedule._post_forward_order) <= 12
        assert len(stage.forward_positions) <= 3
    finally:
        schedule._LONGEST_ORDER = before
    sum(losses).backward()
    assert not stage.forward_positions


def test_forwards_without_backward_are_not_remembered_for_ever(two_ranks) -> None:
    two_ranks.run(case_no_backward)
