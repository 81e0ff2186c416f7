"""All kernel costs of one accelerator, behind one object with integer nanoseconds and a cache a shape."""

from __future__ import annotations

from collections.abc import Sequence

from fsdpbench.sim.costs.attention import AttentionCost
from fsdpbench.sim.costs.bandwidth import BandwidthCost
from fsdpbench.sim.costs.gemm import GemmCost
from fsdpbench.sim.costs.instructions import InstructionCost
from fsdpbench.sim.costs.library import LibraryCosts
from fsdpbench.sim.hardware.profile import DTYPES, HardwareProfile

# Products only; a profile without a table of them runs them as 16-bit ones.
_NARROW = ("fp8", "nvfp4")


class KernelCosts:
    """Kernel durations on an accelerator that runs nothing else, in integer nanoseconds, launch excluded."""

    def __init__(self, profile: HardwareProfile) -> None:
        self.profile = profile
        self._gemm = GemmCost(profile)
        self._attention = AttentionCost(profile)
        self._bandwidth = BandwidthCost(profile)
        self._instructions = InstructionCost(profile)
        self._of_runs = LibraryCosts(profile, profile.runs_use)
        self._of_any = LibraryCosts(profile, (*profile.runs_use, *profile.libraries))
        self._cache: dict[tuple[object, ...], int] = {}

    def gemm_ns(
        self,
        m: int,
        n: int,
        k: int,
        batch: int = 1,
        dtype: str = "bf16",
        kind: str = "forward",
        comes_quantised: bool = False,
    ) -> int:
        """A (batched) product of ``m x k`` by ``k x n``; ``dtype`` names the compute type.

        ``kind`` is ``forward`` (also for the gradient of the input) or ``weight_grad``. ``comes_quantised``:
        the product alone, where a table is of operators that cast their first factor, too.
        Raises ValueError for an unknown dtype or kind.
        """
        key = ("gemm", m, n, k, batch, dtype, kind, comes_quantised)
        found = self._cache.get(key)
        if found is None:
            _check_dtype(dtype, (*DTYPES, *_NARROW))
            if kind not in ("forward", "weight_grad"):
                raise ValueError(f"gemm kind {kind!r}: known are forward, weight_grad")
            found = self._cache[key] = round(
                self._gemm_seconds(m, n, k, batch, dtype, kind, comes_quantised) * 1e9
            )
        return found

    def _gemm_seconds(
        self, m: int, n: int, k: int, batch: int, dtype: str, kind: str, comes_quantised: bool
    ) -> float:
        """By a library's table where there is one; tables know no batches."""
        gemm = self.profile.gemm
        slowed = gemm.under_load * (gemm.weight_grad if kind == "weight_grad" else 1.0)
        library = self._of_any if dtype in _NARROW else self._of_runs
        seconds = library.product(m, n, k, dtype, slowed, comes_quantised) if batch == 1 else None
        if seconds is not None:
            return seconds
        return self._gemm.seconds(m, n, k, batch, "bf16" if dtype in _NARROW else dtype, kind)

    def attention_forward_ns(
        self,
        batch: int,
        heads: int,
        q_len: int,
        kv_len: int,
        head_dim: int,
        causal: bool,
        dtype: str = "bf16",
        kv_heads: int | None = None,
    ) -> int:
        """Flash attention forward; ``kv_heads`` (default: ``heads``) if heads share keys and values."""
        return self._attention_ns("forward", batch, heads, q_len, kv_len, head_dim, causal, dtype, kv_heads)

    def attention_backward_ns(
        self,
        batch: int,
        heads: int,
        q_len: int,
        kv_len: int,
        head_dim: int,
        causal: bool,
        dtype: str = "bf16",
        kv_heads: int | None = None,
    ) -> int:
        """Flash attention backward (2.5 times the forward's FLOPs: the scores are computed again)."""
        return self._attention_ns("backward", batch, heads, q_len, kv_len, head_dim, causal, dtype, kv_heads)

    def _attention_ns(
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
    ) -> int:
        key = (direction, batch, heads, q_len, kv_len, head_dim, causal, dtype, kv_heads)
        found = self._cache.get(key)
        if found is None:
            _check_dtype(dtype, DTYPES)
            seconds = None
            if direction == "forward" and causal and q_len == kv_len and dtype in ("bf16", "fp16"):
                seconds = self._of_runs.attention_forward(
                    batch, heads, kv_heads or heads, q_len, head_dim, self.profile.attention.under_load
                )
            if seconds is None:
                seconds = self._attention.seconds(
                    direction, batch, heads, q_len, kv_len, head_dim, causal, dtype, kv_heads
                )
            found = self._cache[key] = round(seconds * 1e9)
        return found

    def memory_bound_ns(self, bytes_moved: int, kind: str = "pointwise") -> int:
        """A kernel limited by ``bytes_moved`` (read plus written); unknown kinds cost as ``pointwise``."""
        return self._bandwidth.nanoseconds(bytes_moved, kind)

    def issued_ns(self, threads: float, instructions: float) -> int:
        """A kernel limited by what its ``threads`` have to issue, ``instructions`` each."""
        return self._instructions.nanoseconds(threads, instructions)


def _check_dtype(dtype: str, known: Sequence[str]) -> None:
    if dtype not in known:
        raise ValueError(f"compute type {dtype!r}: known are {', '.join(known)}")
