"""``torch.func.functional_call`` on wrapped models: values of the call's own, or an error, and never a model
that keeps them.
"""

from __future__ import annotations

import pytest
import torch
from flat_programs import Side
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.func import functional_call

from fsdpbench import impl

STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD")
BATCH = torch.ones(2, 8)


def halves(model: nn.Module, trained: bool) -> dict[str, torch.Tensor]:
    """What a moving average may be: tensors, or parameters."""
    found = {name: parameter.detach() * 0.5 for name, parameter in model.named_parameters()}
    return {name: nn.Parameter(value) if trained else value for name, value in found.items()}


def plain() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))


def case_originals(rank: int) -> None:
    reference = plain()
    before = reference(BATCH)
    halved = functional_call(reference, halves(reference, False), (BATCH,))
    for strategy in STRATEGIES:
        side = Side("impl", rank, True, strategy)
        model = side.wrap(plain())
        for mode in (torch.no_grad, torch.inference_mode):
            for trained in (False, True):
                torch.testing.assert_close(model(BATCH), before)  # stays gathered for a backward
                values = halves(model, trained)
                with mode():
                    output = functional_call(model, values, (BATCH,))
                torch.testing.assert_close(output, halved)
                torch.testing.assert_close(model(BATCH), before)
        model(BATCH).sum().backward()
        loss = functional_call(model, halves(model, True), (BATCH,)).sum()
        with pytest.raises((RuntimeError, AssertionError), match="changing the parameters between"):
            loss.backward()
        model.zero_grad()
        torch.testing.assert_close(model(BATCH), before)


def test_originals(two_ranks) -> None:
    two_ranks.run(case_originals)


def case_refused(rank: int) -> None:
    sharded = plain()
    mesh = init_device_mesh("cpu", (2,))
    for layer in (sharded[0], sharded[2], sharded):
        impl.fully_shard(layer, mesh=mesh)
    flat = Side("impl", rank, False).wrap(plain())
    for model, name in ((sharded, "weight"), (flat, "_flat_param")):
        before = model(BATCH)
        before.sum().backward()
        for trained in (False, True):
            with pytest.raises(ValueError, match=f"'{name}' was replaced.*functional_call"):
                functional_call(model, halves(model, trained), (BATCH,))
            torch.testing.assert_close(model(BATCH), before)
        model.zero_grad()
        same = functional_call(model, dict(model.named_parameters()), (BATCH,))
        torch.testing.assert_close(same, before)
        same.sum().backward()
        assert all(parameter.grad is not None for parameter in model.parameters())
    sharded[0].weight = nn.Parameter(sharded[0].weight.detach() * 0)
    with pytest.raises(ValueError, match="'weight' was replaced"):
        sharded(BATCH)


def test_refused(two_ranks) -> None:
    two_ranks.run(case_refused)
