"""Flash attention: time by batch, heads, length and head size.

    flops   = 4 x batch x heads x q_len x kv_len x head_dim     (half of it when causal; backward 2.5 times)
    compute = flops / rate, in rounds of query blocks over the multiprocessors
    traffic = bytes of queries, keys, values and outputs / bandwidth    (backward 2.5 times)
    time    = floor + compute + traffic

The two add up instead of overlapping: what grows with the length alone (loading a block, rescaling, writing
the result) keeps the tensor cores waiting, which is why short sequences reach a small share of the long
ones' rate. The backward pass computes the scores again, hence five products instead of two. Heads of 64 run
slower, since the exponentials weigh twice as much against their products.
"""

from __future__ import annotations

import math

from fsdpbench.sim.model.profile import HardwareProfile

_QUERY_BLOCK = 128
_BACKWARD = 2.5


class AttentionCost:
    """Seconds of flash attention from its shape."""

    def __init__(self, profile: HardwareProfile) -> None:
        self._curve = profile.attention
        self._sm_count = profile.sm_count
        self._peak = profile.peak_flops
        self._bandwidth = profile.memory_bandwidth * profile.attention.memory_efficiency

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
        kv_heads: int | None,
    ) -> float:
        """Duration of ``direction`` (forward or backward); ``kv_heads`` if heads share keys and values."""
        curve = self._curve
        backward = direction == "backward"
        flops = 4.0 * batch * heads * q_len * kv_len * head_dim
        if causal:
            flops *= 0.5
        rate = (curve.backward_tflops if backward else curve.forward_tflops) * 1e12 * curve.under_load
        # Rates are those of 16-bit tensor cores; without flash attention in fp32 the peak's ratio is a bound.
        rate *= self._peak[dtype] / self._peak["bf16"]
        if head_dim <= 64:
            rate *= curve.head_dim_64
        element = 2 if dtype in ("bf16", "fp16") else 4
        rows = heads * q_len + (heads if kv_heads is None else kv_heads) * kv_len
        traffic = 2.0 * batch * rows * head_dim * element / self._bandwidth
        if backward:
            flops *= _BACKWARD
            traffic *= _BACKWARD
        blocks = math.ceil(q_len / _QUERY_BLOCK) * batch * heads
        rounds = max(1.0, self._rounds(blocks)) * self._sm_count / blocks
        return curve.floor_us * 1e-6 + flops / rate * rounds + traffic

    def _rounds(self, blocks: int) -> float:
        even = blocks / self._sm_count
        share = self._curve.wave_quantisation
        return even * (1 - share) + math.ceil(even) * share
