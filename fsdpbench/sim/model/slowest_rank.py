"""The slowest of many GPUs: GPUs of one kind differ, and a step of data-parallel training ends with the last.

Under a power limit each chip settles at a clock of its own. With a spread of s (standard deviation over the
mean, `compute.clock_spread`) the slowest of n is expected at

    mean x (1 - s x z(n))        z(n): expected largest of n draws of a normal distribution (Blom 1958)

    n       1     8    64   512   2048
    z(n)    0   1.43  2.34  3.03  3.43

The efficiencies of a profile under load were fitted to runs of 8 GPUs and more, so they are those of the
slowest of 8. Clocks move what is limited by arithmetic; memory-bound kernels continue as they were.
"""

from __future__ import annotations

import dataclasses
from statistics import NormalDist

from fsdpbench.sim.model.profile import HardwareProfile

_FITTED_TO = 8


def of_slowest(profile: HardwareProfile, ranks: int) -> HardwareProfile:
    """`profile` with the rates of the slowest of `ranks` GPUs, that of 8 being its own."""
    slower = 1 + profile.compute.clock_spread * (expected_largest(ranks) - expected_largest(_FITTED_TO))
    return dataclasses.replace(
        profile,
        gemm=dataclasses.replace(profile.gemm, under_load=min(1.0, profile.gemm.under_load / slower)),
        attention=dataclasses.replace(
            profile.attention, under_load=min(1.0, profile.attention.under_load / slower)
        ),
    )


def expected_largest(draws: int) -> float:
    """Of so many draws of a normal distribution, in standard deviations above its mean."""
    return NormalDist().inv_cdf((draws - 0.375) / (draws + 0.25))
