"""Software before torch 2.11 and CUDA 13 runs older kernels where a chip has newer ones."""

from __future__ import annotations

import dataclasses

import pytest

from fsdpbench.sim.model.profile import load_profile, profile_names
from fsdpbench.sim.model.software import CURRENT, load_software, software_names

HOPPER = {"gh200-96gb", "h100-64gb", "h100-80gb", "h100-96gb", "h100-96gb-hbm2e", "h200", "h800-80gb"}


def test_hopper_alone_has_two_generations() -> None:
    assert {name for name in profile_names() if load_profile(name).older is not None} == HOPPER


NEWER = {CURRENT, "thunder-2024"}
"""Software with cuDNN's attention and today's products."""


@pytest.mark.parametrize("software", software_names())
def test_dated_software_takes_the_older(software: str) -> None:
    profile, dated = load_profile("h100-80gb"), load_software(software)
    assert dated.kernels.older is (software not in NEWER)
    applied, older = dated.applied_to(profile), profile.older
    assert older is not None
    if software in NEWER:
        assert applied.gemm == profile.gemm
        assert applied.attention.forward_tflops == profile.attention.forward_tflops
        return
    assert applied.gemm.weight_grad == older.gemm.weight_grad < profile.gemm.weight_grad
    assert applied.attention.forward_tflops == older.attention.forward_tflops * dated.attention.forward_rate
    assert applied.attention.head_dim_64 == older.attention.head_dim_64


def test_a_chip_of_one_generation_stays_as_it_is() -> None:
    profile = load_profile("a100-80gb")
    assert profile.older is None
    assert profile.with_older_kernels() == profile


def test_another_peak_takes_the_older_ones_of_its_base() -> None:
    """They are measured on one chip; a chip built on its profile has another."""
    base, chip = load_profile("h100-80gb"), load_profile("mi300x")
    assert base.older is not None
    assert chip.older is None
    assert chip.gemm.weight_grad == base.older.gemm.weight_grad
    assert (
        dataclasses.replace(chip.attention, forward_tflops=400, backward_tflops=270) == base.older.attention
    )
