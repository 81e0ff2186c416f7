"""A script's own operator: unknown, and so told, until the script gives it a price."""

from __future__ import annotations

from typing import Any

import pytest

PROGRAM = """
import torch

@torch.library.custom_op("mylib::scaled", mutates_args=(), device_types="cuda")
def scaled(x: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("a kernel for GPUs")

@scaled.register_fake
def _(x):
    return torch.empty_like(x)

if {priced}:
    from fsdpbench.sim.torch_device.prices import OperatorCost, operator_price

    @operator_price("mylib::scaled")
    def price(call, costs):
        return OperatorCost("scaled_kernel", 5_000_000)

class Scaled(torch.nn.Module):
    def forward(self, x):
        return scaled(x.detach()) + x

linear = torch.nn.Linear
torch.nn.Linear = lambda *words: torch.nn.Sequential(linear(*words), Scaled())
train(4)
"""


@pytest.mark.parametrize("priced", [False, True])
def test_its_price_is_the_scripts(run_probe: Any, priced: bool) -> None:
    done = run_probe(PROGRAM.format(priced=priced))
    assert done.result["status"] == "ok", done.result["cause"]
    assert ("mylib::scaled" in done.result["unknown_operators"]) is not priced
    assert (done.result["step_time_s"] > 5e-3) is priced
