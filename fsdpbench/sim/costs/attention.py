"""Flash attention (first version)."""

from __future__ import annotations

from fsdpbench.sim.hardware import HardwareProfile


class AttentionCost:
    """Seconds of flash attention from its shape."""

    def __init__(self, profile: HardwareProfile) -> None:
        self._curve = profile.attention
        self._bf16 = profile.peak_flops["bf16"]
        self._peak = profile.peak_flops

    def seconds(
        self,
        direction: str,
        batch: int,
        heads: int,
        q_len: int,
        kv_len: int,
        head_dim: int,
        causal: bool,
        dtype: str,
    ) -> float:
        """FLOPs (half of them when causal) over a rate that rises with the length."""
        curve = self._curve
        flops = 4.0 * batch * heads * q_len * kv_len * head_dim
        rate = curve.forward_tflops * 1e12
        if direction == "backward":
            flops *= 2.5
            rate = curve.backward_tflops * 1e12
        if causal:
            flops *= 0.5
        rate *= self._peak[dtype] / self._bf16
        rate *= kv_len / (kv_len + curve.half_length)
        return flops / rate + curve.floor_us * 1e-6
