"""`AdamW` with moments in bf16: close to torch's, and no update is lost to rounding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from fsdpbench.impl import AdamW, fully_shard
from fsdpbench.impl.optimizers import round_stochastically


def test_rounding_keeps_the_mean() -> None:
    torch.manual_seed(0)
    exact = torch.tensor([1.0 + 2**-10, -3.0 - 2**-9, 0.1]).repeat_interleave(40_000)
    rounded = torch.empty_like(exact, dtype=torch.bfloat16)
    round_stochastically(exact, rounded)
    for value, given in zip(rounded.float().view(3, -1), exact.view(3, -1), strict=True):
        spacing = (value.max() - value.min()).item()
        assert 0 < spacing <= 2**-7 * given[0].abs().item()
        assert abs(value.mean().item() - given[0].item()) < 0.02 * spacing


def test_what_bf16_holds_and_what_is_no_number_stays() -> None:
    all_ones = torch.tensor([0x7FFFFFFF], dtype=torch.int32).view(torch.float32)
    exact = torch.cat([torch.tensor([0.0, -0.0, 1.5, -(2.0**-126), torch.inf, -torch.inf]), all_ones])
    rounded = torch.empty_like(exact, dtype=torch.bfloat16)
    round_stochastically(exact, rounded)
    torch.testing.assert_close(rounded.float(), exact, rtol=0, atol=0, equal_nan=True)


def test_second_moment_reaches_its_mean() -> None:
    """Rounded to nearest it would stay at 16: a step's change is a fifth of the spacing there."""
    torch.manual_seed(0)
    weight = nn.Parameter(torch.zeros(256))
    optimizer = AdamW([weight], lr=1e-3)
    weight.grad = torch.full((256,), 4.0)
    optimizer.step()
    optimizer.state[weight]["exp_avg_sq"].fill_(16.0)
    weight.grad = torch.full((256,), 1.0)
    for _ in range(1000):
        optimizer.step()
    expected = 1.0 + 15.0 * 0.999**1000
    assert optimizer.state[weight]["exp_avg_sq"].dtype is torch.bfloat16
    assert abs(optimizer.state[weight]["exp_avg_sq"].float().mean().item() - expected) < 0.1


def test_close_to_torch() -> None:
    torch.manual_seed(0)
    start, gradients = torch.randn(512), torch.randn(20, 512)
    found = []
    for kind in (AdamW, torch.optim.AdamW):
        weight = nn.Parameter(start.clone())
        optimizer: Any = kind([weight], lr=1e-2, weight_decay=0.1)
        for gradient in gradients:
            weight.grad = gradient.clone()
            optimizer.step()
        found.append(weight.detach())
    moved = (found[1] - start).norm()
    assert (found[0] - found[1]).norm() < 0.01 * moved


@pytest.mark.parametrize(
    ("wrong", "named"), [({"lr": -1.0}, "lr"), ({"betas": (0.9, 1.0)}, "betas"), ({"eps": -1.0}, "eps")]
)
def test_refusals(wrong: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        AdamW([nn.Parameter(torch.ones(3))], **wrong)


def case_shards(rank: int) -> None:
    torch.manual_seed(0)
    model = nn.Linear(6, 5)
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    optimizer = AdamW(model.parameters())
    before = model.weight.full_tensor().clone()  # type: ignore[operator]
    model(torch.ones(2, 6)).sum().backward()
    optimizer.step()
    assert isinstance(optimizer.state[model.weight]["exp_avg"], DTensor)
    assert optimizer.state[model.weight]["exp_avg"].dtype is torch.bfloat16
    assert not torch.equal(model.weight.full_tensor(), before)  # type: ignore[operator]


def test_shards(two_ranks: Any) -> None:
    two_ranks.run(case_shards)
