"""Kernels of attention beside the one that torch takes by itself."""

from __future__ import annotations

import dataclasses
import math
import re
from pathlib import Path

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from fsdpbench.base.files.documents import to_toml
from fsdpbench.sim import Simulation
from fsdpbench.sim.model.kernel_costs import AttentionCost
from fsdpbench.sim.model.profile import ProfileError, load_profile, parse_profile

MEASURED = Path(__file__).parents[3] / "ci" / "measured" / "gpu" / "attention.txt"
ROW = re.compile(r"H(\d+) D(\d+) KV(\d+) L(\d+) B(\d+) causal=(\w+) (\w+) +([\d.]+) \d+ +([\d.]+)")


@pytest.mark.parametrize(
    ("kernel", "named", "most"),
    [("flash2", "flash", 0.11), ("cudnn", "cudnn", 0.07), ("efficient",) * 2 + (0.05,)],
)
def test_rates_are_those_that_were_measured(kernel: str, named: str, most: float) -> None:
    """On one H100; the rates of flash attention 2 are from its successor's paper, not fitted to it."""
    profile = load_profile("h100-80gb").with_attention(kernel)
    alone = dataclasses.replace(profile, attention=dataclasses.replace(profile.attention, under_load=1.0))
    cost, errors = AttentionCost(alone), []
    for row in ROW.finditer(MEASURED.read_text()):
        heads, size, key_heads, length, batch = map(int, row.groups()[:5])
        if row[7] == named:
            shape = batch, heads, length, length, size, row[6] == "True", "bf16", key_heads
            for direction, ms in (("forward", row[8]), ("backward", row[9])):
                errors.append(abs(math.log(cost.seconds(direction, *shape) * 1e3 / float(ms))))
    assert len(errors) >= 20
    assert sum(errors) / len(errors) < most


def test_a_calibrated_file_keeps_the_kernels_of_its_chip_and_another_chip_does_not() -> None:
    mine = {"base": "h100-80gb", "name": "mine", "attention": {"forward_tflops": 600.0}}
    peaks = {"bf16": 989.0, "fp16": 989.0, "tf32": 494.5, "fp32": 67.0}
    same = parse_profile(to_toml(mine | {"compute": {"peak_tflops": peaks}}), "mine.toml")
    assert same.attention.kernel == "cudnn"
    older = load_profile("h100-80gb").older
    assert older is not None
    assert same.with_attention("flash2").attention.forward_tflops == older.attention.forward_tflops
    other = parse_profile(to_toml(mine | {"compute": {"peak_tflops": {**peaks, "bf16": 700.0}}}), "mine.toml")
    assert other.attention.kernel == "flash2"
    with pytest.raises(ProfileError, match="no figure of cudnn on mine is known: take flash2, flex or math"):
        other.with_attention("cudnn")


def test_flex_attention_is_a_share_of_flash_attention_2() -> None:
    for name in ("a100-80gb", "h100-80gb", "b200"):
        flex, flash = (load_profile(name).with_attention(each).attention for each in ("flex", "flash2"))
        assert flex.forward_tflops == pytest.approx(0.9 * flash.forward_tflops)
        assert flex.doubt > flash.doubt


def test_without_a_kernel_that_takes_the_call_torch_raises() -> None:
    Simulation.start(load_profile("h100-80gb"), 1, 1)
    x = torch.empty(1, 2, 16, 8, device="sim", dtype=torch.bfloat16)
    mask = torch.empty(16, 16, device="sim", dtype=torch.bfloat16)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION), pytest.raises(RuntimeError, match="No available kernel"):
        torch.nn.functional.scaled_dot_product_attention(x, x, x, mask)
