"""Memory-bound kernels: time by bytes.

A kernel that moves B bytes takes ``floor + B / (efficiency x peak)``: the floor is what start, ramp-up and
tail of the smallest kernel take, so that small kernels reach a small share of the bandwidth and large ones
the kind's efficiency. Kinds differ in how regular their accesses are. Kernels that Inductor generates reach
``fused_gain`` times as much as eager ones of their kind.
"""

from __future__ import annotations

from fsdpbench.sim.hardware.profile import HardwareProfile


def fused(kind: str) -> str:
    """The kind of a generated kernel that does what eager kernels of `kind` do."""
    return f"fused {kind}"


class BandwidthCost:
    """Nanoseconds of a memory-bound kernel from its bytes and kind."""

    def __init__(self, profile: HardwareProfile) -> None:
        curve = profile.bandwidth
        self._ns_per_byte = {
            kind: 1e9 / (share * profile.memory_bandwidth) for kind, share in curve.efficiency.items()
        }
        for kind, share in curve.efficiency.items():
            reached = min(1.0, share * curve.fused_gain)
            self._ns_per_byte[fused(kind)] = 1e9 / (reached * profile.memory_bandwidth)
        self._default = self._ns_per_byte["pointwise"]
        self._floor_ns = curve.floor_us * 1e3

    def nanoseconds(self, bytes_moved: int, kind: str) -> int:
        """Duration of a kernel that reads and writes ``bytes_moved`` bytes in all."""
        return round(self._floor_ns + bytes_moved * self._ns_per_byte.get(kind, self._default))
