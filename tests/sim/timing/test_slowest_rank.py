"""The slowest of many GPUs sets the pace."""

from __future__ import annotations

import dataclasses
import random
import statistics

import pytest

from fsdpbench.sim.model.profile import (
    HardwareProfile,
    ProfileError,
    expected_largest,
    load_profile,
    of_slowest,
    parse_profile,
    profile_layers,
)

A100 = load_profile("a100-80gb")


def spread(share: float) -> HardwareProfile:
    return dataclasses.replace(A100, compute=dataclasses.replace(A100.compute, clock_spread=share))


@pytest.mark.parametrize("draws", [1, 8, 64])
def test_expected_largest_is_what_draws_give(draws: int) -> None:
    random.seed(1)
    largest = [max(random.gauss(0, 1) for _ in range(draws)) for _ in range(4000)]
    assert statistics.fmean(largest) == pytest.approx(expected_largest(draws), abs=0.05)


def test_rates_are_those_of_the_slowest_and_no_bandwidth_changes() -> None:
    profile = spread(0.02)
    assert of_slowest(profile, 8) == profile
    many = of_slowest(profile, 512)
    slower = 1 + 0.02 * (expected_largest(512) - expected_largest(8))
    assert many.gemm.under_load == pytest.approx(profile.gemm.under_load / slower)
    assert many.attention.under_load == pytest.approx(profile.attention.under_load / slower)
    assert many.bandwidth == profile.bandwidth
    assert of_slowest(profile, 1).gemm.under_load > profile.gemm.under_load
    assert of_slowest(spread(0.0), 512) == spread(0.0)


def test_the_network_of_a_node_may_be_named_with_the_profile() -> None:
    mine = load_profile("a100-80gb+nic-12.5")
    assert mine == dataclasses.replace(
        A100,
        name="a100-80gb+nic-12.5",
        title=f"{A100.title}, 12.5 GB/s a node",
        nic=dataclasses.replace(A100.nic, gb_s_per_node=12.5),
    )
    assert profile_layers("a100-80gb+nic-12.5")[0] == ("a100-80gb+nic-12.5", frozenset({"nic"}))
    with pytest.raises(ProfileError, match="gb_s_per_node"):
        load_profile("a100-80gb+nic-0")
    with pytest.raises(ProfileError, match="unknown hardware 'a1000'"):
        load_profile("a1000+nic-5")


def test_a_spread_is_a_small_share() -> None:
    with pytest.raises(ProfileError, match="clock_spread"):
        parse_profile('base = "a100-80gb"\nname = "x"\n[compute]\nclock_spread = 0.5\n', "x.toml")
