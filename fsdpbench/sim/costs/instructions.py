"""Kernels that compute more addresses than they move bytes: time by instructions.

A multiprocessor has four schedulers, each issues one instruction of a warp a cycle:

    time = floor + threads x instructions / (multiprocessors x 128 x clock x issue_share)

The clock is the data sheet's: what its rate in fp32 needs with two FLOPs a lane and cycle.
"""

from __future__ import annotations

from fsdpbench.sim.hardware.profile import HardwareProfile

_ISSUED_A_CYCLE = 4 * 32
_FLOPS_A_LANE = 2


class InstructionCost:
    """Nanoseconds of a kernel from its threads and what each of them issues."""

    def __init__(self, profile: HardwareProfile) -> None:
        compute = profile.compute
        lanes = compute.fp32_lanes * _FLOPS_A_LANE
        # Multiprocessors and clock together: the rate in fp32 is lanes times both.
        rate = profile.peak_flops["fp32"] / lanes * _ISSUED_A_CYCLE * compute.issue_share
        self._ns_per_instruction = 1e9 / rate
        self._floor_ns = profile.bandwidth.floor_us * 1e3

    def nanoseconds(self, threads: float, instructions: float) -> int:
        """Duration of ``threads`` that issue ``instructions`` each."""
        return round(self._floor_ns + threads * instructions * self._ns_per_instruction)
