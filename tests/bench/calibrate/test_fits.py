"""The fits find the profile that made the figures again, also from noisy ones and from another start."""

from __future__ import annotations

import dataclasses
import random

import pytest

from fsdpbench.lab.calibrate.host_costs import line
from fsdpbench.lab.calibrate.kernel_rates import (
    FORWARD_SHAPES,
    SHAPES,
    fit_backward,
    fit_forward,
    fit_gemm,
)
from fsdpbench.sim.model.kernel_costs import AttentionCost, GemmCost
from fsdpbench.sim.model.profile import HardwareProfile, load_profile


def chip_of(hardware: str, base: str) -> HardwareProfile:
    """The base's efficiencies on another chip's size, peak and memory: where a calibration starts."""
    truth = load_profile(hardware)
    return dataclasses.replace(load_profile(base), memory=truth.memory, compute=truth.compute)


@pytest.mark.parametrize("base", ["h200", "a100-80gb"])
def test_matrix_products(base: str) -> None:
    truth, noise = load_profile("h100-80gb"), random.Random(1)
    seconds = {
        shape: GemmCost(truth).seconds(*shape, 1, "bf16", "forward") * noise.uniform(0.98, 1.02)
        for shape in FORWARD_SHAPES
    }
    fit = fit_gemm(chip_of("h100-80gb", base), seconds)
    fitted = GemmCost(dataclasses.replace(truth, gemm=fit.section))
    assert fit.mean_error < 0.08
    for shape in ((4096, 11008, 4096), (8192, 5120, 5120), (2048, 8192, 28672)):  # not among the fitted
        assert fitted.seconds(*shape, 1, "bf16", "forward") == pytest.approx(
            GemmCost(truth).seconds(*shape, 1, "bf16", "forward"), rel=0.1
        )


def test_attention() -> None:
    truth = load_profile("h100-80gb")
    cost = AttentionCost(truth)
    start = chip_of("h100-80gb", "a100-80gb")
    forward = {shape: cost.seconds("forward", *shape.arguments()) for shape in SHAPES}
    fit = fit_forward(start, forward)
    backward = {shape: cost.seconds("backward", *shape.arguments()) for shape in SHAPES}
    rate = fit_backward(start, fit.section, backward).backward_tflops
    assert fit.mean_error < 0.02
    assert fit.section.head_dim_64 == pytest.approx(truth.attention.head_dim_64, rel=0.03)
    assert fit.section.forward_tflops == pytest.approx(
        truth.attention.forward_tflops * truth.attention.under_load, rel=0.06
    )
    assert rate == pytest.approx(truth.attention.backward_tflops * truth.attention.under_load, rel=0.06)


def test_a_line_through_points_of_very_different_size() -> None:
    sizes = [1.0, 1e3, 1e6]
    assert line(sizes, [8.0 + 2 * size for size in sizes]) == pytest.approx((8.0, 2.0))
