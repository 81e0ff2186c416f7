"""Costs of all kernels of one accelerator, in integer nanoseconds, cached by shape."""

import dataclasses
import math
from collections.abc import Sequence
from functools import partialmethod

import numpy as np

from fsdpbench.sim.model.library_costs import Array, attention_seconds, product_seconds
from fsdpbench.sim.model.profile import HardwareProfile
from fsdpbench.sim.model.sections import DTYPES, AttentionTable, ProductTable

# Only for matrix products. If a profile has no table for these types, products run in 16 bits.
_NARROW = ("fp8", "nvfp4")


class KernelCosts:
    """Kernel durations in integer ns on an otherwise idle accelerator, without the launch."""

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
        """Return the duration of a (batched) product of `m x k` by `k x n`; `dtype` is the compute type.

        `kind` is `forward` (also for the input's gradient) or `weight_grad`. `comes_quantised` excludes the
        cast of the first factor, which some tables include. Raises `ValueError` for an unknown dtype or kind.
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
        """Return seconds from a library's table if it has this product (tables have no batches)."""
        gemm = self.profile.gemm
        slowed = gemm.under_load * (gemm.weight_grad if kind == "weight_grad" else 1.0)
        library = self._of_any if dtype in _NARROW else self._of_runs
        seconds = library.product(m, n, k, dtype, slowed, comes_quantised) if batch == 1 else None
        if seconds is not None:
            return seconds
        return self._gemm.seconds(m, n, k, batch, "bf16" if dtype in _NARROW else dtype, kind)

    def _attention_ns(
        self,
        direction: str,
        batch: int,
        heads: int,
        q_len: int,
        kv_len: int,
        head_dim: int,
        causal: bool,
        dtype: str = "bf16",
        kv_heads: int | None = None,
    ) -> int:
        """Return the duration of flash attention. `kv_heads` (default: `heads`): heads of keys and values.

        Backward has 2.5 times the FLOPs of forward.
        """
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
                seconds = self._attention.seconds(*key)
            found = self._cache[key] = round(seconds * 1e9)
        return found

    attention_forward_ns = partialmethod(_attention_ns, "forward")
    attention_backward_ns = partialmethod(_attention_ns, "backward")

    def memory_bound_ns(self, bytes_moved: int, kind: str = "pointwise") -> int:
        """Return the duration of a kernel that moves `bytes_moved`; unknown kinds count as `pointwise`."""
        return self._bandwidth.nanoseconds(bytes_moved, kind)

    def issued_ns(self, threads: float, instructions: float) -> int:
        """Return the duration of a kernel limited by instruction issue: `threads` times `instructions`."""
        return self._instructions.nanoseconds(threads, instructions)


def _check_dtype(dtype: str, known: Sequence[str]) -> None:
    if dtype not in known:
        raise ValueError(f"compute type {dtype!r}: known are {', '.join(known)}")


_ISSUED_A_CYCLE = 4 * 32
_FLOPS_A_LANE = 2


class InstructionCost:
    """Duration of a kernel that is limited by computing addresses, not by moving bytes.

    Each of a multiprocessor's four schedulers issues one instruction of a warp per cycle:
        time = floor + threads x instructions / (multiprocessors x 128 x clock x issue_share)
    The clock follows from the data sheet's fp32 rate, with two FLOPs per lane and cycle.
    """

    def __init__(self, profile: HardwareProfile) -> None:
        compute = profile.compute
        lanes = compute.fp32_lanes * _FLOPS_A_LANE
        # fp32 rate = lanes x multiprocessors x clock
        rate = profile.peak_flops["fp32"] / lanes * _ISSUED_A_CYCLE * compute.issue_share
        self._ns_per_instruction = 1e9 / rate
        self._floor_ns = profile.bandwidth.floor_us * 1e3

    def nanoseconds(self, threads: float, instructions: float) -> int:
        """Return the duration of `threads` threads that issue `instructions` each."""
        return round(self._floor_ns + threads * instructions * self._ns_per_instruction)


def fused(kind: str) -> str:
    """Return the kind of a generated kernel that replaces eager kernels of `kind`."""
    return f"fused {kind}"


class BandwidthCost:
    """Duration of a memory-bound kernel by bytes and kind: `floor + bytes / (efficiency x peak)`.

    The floor is the start, ramp-up and tail of the smallest kernel. Kinds differ in the regularity of their
    accesses. Kernels generated by Inductor reach `fused_gain` times the bandwidth of eager kernels.
    """

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
        """Return the duration of a kernel that reads and writes `bytes_moved` bytes."""
        return round(self._floor_ns + bytes_moved * self._ns_per_byte.get(kind, self._default))


BYTES_PER_ELEMENT = {"bf16": 2, "fp16": 2, "tf32": 4, "fp32": 4}
_SPLITS = (1, 2, 3, 4, 8)
# Below this k, a split costs more than it saves.
_SMALLEST_SPLIT_K = 256
# Partial results are written and read back in fp32; half of that traffic hits the cache.
_SPLIT_BYTES = 4
_JOIN = 4.0


class GemmCost:
    """Duration of a dense matrix product by shape, with the fastest tile and split.

        tiles    = ceil(m / rows) * ceil(n / columns) * batch * split
        waves    = tiles / multiprocessors, between even sharing and full rounds (`wave_quantisation`)
        compute  = waves * 2 * rows * columns * (k / split + prologue_k) / (rate of one multiprocessor)
        traffic  = bytes of both inputs and the output / bandwidth
        time     = floor + (compute^p + traffic^p)^(1/p)         p = 4: the limits never overlap perfectly
    Large tiles have the fastest main loop; small ones waste less at edges and in the last round. A *split* of
    k gives a small output more tiles, whose partial results are added. `prologue_k`: start and end of a tile,
    in steps of k. Fitted to 160 measured shapes per GPU (bf16, m 1 to 16384); errors are in the profiles.
    """

    def __init__(self, profile: HardwareProfile) -> None:
        self._curve = profile.gemm
        self._sm_count = profile.sm_count
        self._peak = profile.peak_flops
        self._bandwidth = profile.memory_bandwidth * profile.gemm.memory_efficiency

    def seconds(self, m: int, n: int, k: int, batch: int, dtype: str, kind: str) -> float:
        """Return the seconds of `batch` products `m x k` by `k x n`; `kind` is forward or weight_grad."""
        curve = self._curve
        rate = self._peak[dtype] * curve.sustained * curve.under_load
        if kind == "weight_grad":
            rate *= curve.weight_grad
        compute = math.inf
        for rows, columns, efficiency in curve.tiles:
            tile_rate = rate / self._sm_count * efficiency
            tiles = math.ceil(m / rows) * math.ceil(n / columns) * batch
            for split in _SPLITS:
                if split > 1 and k < split * _SMALLEST_SPLIT_K:
                    break
                seconds = self._waves(tiles * split) * 2 * rows * columns * (k / split + curve.prologue_k)
                seconds /= tile_rate
                if split > 1:
                    seconds += batch * m * n * _SPLIT_BYTES * split / self._bandwidth
                compute = min(compute, seconds)
        traffic = batch * BYTES_PER_ELEMENT[dtype] * (m * k + k * n + m * n) / self._bandwidth
        return (compute**_JOIN + traffic**_JOIN) ** (1 / _JOIN) + curve.floor_us * 1e-6

    def _waves(self, tiles: int) -> float:
        """Return rounds over the multiprocessors; libraries recover part of the loss in the last round."""
        even = tiles / self._sm_count
        share = self._curve.wave_quantisation
        return max(1.0, even * (1 - share) + math.ceil(even) * share)


class LibraryCosts:
    """Seconds of products and attention from the first table in `names` that has them, else None."""

    def __init__(self, profile: HardwareProfile, names: Sequence[str]) -> None:
        self._profile = profile
        self._tables = [profile.libraries[name] for name in names if name in profile.libraries]

    def product_table(self, dtype: str) -> ProductTable | None:
        """Return the table of a compute type; 16-bit types share one."""
        kind = "bf16" if dtype == "fp16" else dtype
        return next((tables.products[kind] for tables in self._tables if kind in tables.products), None)

    @property
    def attention_table(self) -> AttentionTable | None:
        """Return the first attention table."""
        return next((tables.attention for tables in self._tables if tables.attention is not None), None)

    def product(
        self, m: int, n: int, k: int, dtype: str, slowed: float = 1.0, comes_quantised: bool = False
    ) -> float | None:
        """Return the seconds of one product. `slowed`: the share of the tensor cores' rate in training.

        `comes_quantised` excludes the preceding cast from operators that were measured with it.
        """
        table, profile = self.product_table(dtype), self._profile
        if table is None:
            return None
        if comes_quantised:
            table = dataclasses.replace(table, quantise=0.0)
        machine = profile.sm_count, profile.memory_bandwidth
        return float(product_seconds(table, *machine, *map(_array, (m, n, k)), slowed=slowed)[0])

    def attention_forward(
        self, batch: int, heads: int, kv_heads: int, length: int, head_dim: int, slowed: float = 1.0
    ) -> float | None:
        """Return the seconds of a causal forward with `length` queries and keys; `slowed` as in `product`."""
        table, profile = self.attention_table, self._profile
        if table is None:
            return None
        machine, shape = (
            (profile.sm_count, profile.memory_bandwidth),
            (batch, heads, kv_heads, length, head_dim),
        )
        return float(attention_seconds(table, *machine, *map(_array, shape), slowed=slowed)[0])


def _array(value: int) -> Array:
    return np.array([float(value)])


@dataclasses.dataclass(slots=True)
class CpuCosts:
    """CPU times in integer ns, read once from a profile and kept as attributes for hot paths.

    `operator_ns`: dispatch of an operator with a kernel, without the launch; `view_ns`: an operator without a
    kernel; `launch_ns`: a kernel launch; `autograd_node_ns`: one node of the backward graph;
    `module_call_ns`: one `nn.Module.__call__`; `hook_ns`: one Python hook; `collective_ns`: the call of a
    collective with its launch; `event_ns`: record, wait or query of an event; `stream_ns`: switching the
    current stream; `synchronize_ns`: the call of a synchronization, without waiting;
    `python_call_ns`: the first call of any other Python function after an operator.
    """

    autograd_node_ns: int
    collective_ns: int
    event_ns: int
    hook_ns: int
    launch_ns: int
    module_call_ns: int
    operator_ns: int
    python_call_ns: int
    stream_ns: int
    synchronize_ns: int
    view_ns: int

    @classmethod
    def of(cls, profile: HardwareProfile) -> "CpuCosts":
        """Return the times in a profile."""
        names = [spec.name for spec in dataclasses.fields(cls)]
        return cls(**{name: round(getattr(profile.cpu, f"{name[:-3]}_us") * 1000) for name in names})


_QUERY_BLOCK = 128
_BACKWARD = 2.5


class AttentionCost:
    """Duration of flash attention by batch, heads, length and head size.

        flops   = 4 x batch x heads x q_len x kv_len x head_dim    (half when causal; backward 2.5 times)
        compute = flops / rate, in rounds of query blocks over the multiprocessors
        traffic = bytes of queries, keys, values and outputs / bandwidth    (backward: `backward_traffic`)
        time    = floor + compute + traffic
    The terms add: work proportional to the length (loading a block, rescaling, writing the result) stalls the
    tensor cores, so short sequences reach less of the rate. Backward recomputes the scores: five products,
    not two. Heads of size 64 are slower, because exponentials take twice the share relative to products.
    """

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
        """Return the seconds of `direction` (forward or backward); `kv_heads`: heads of keys and values."""
        curve = self._curve
        backward = direction == "backward"
        flops = 4.0 * batch * heads * q_len * kv_len * head_dim
        if causal:
            flops *= 0.5
        rate = (curve.backward_tflops if backward else curve.forward_tflops) * 1e12 * curve.under_load
        # Rates are those of 16-bit tensor cores; in fp32, without flash attention, scale by ratio of peaks.
        rate *= self._peak[dtype] / self._peak["bf16"]
        if head_dim <= 64:
            rate *= curve.head_dim_64
        element = 2 if dtype in ("bf16", "fp16") else 4
        expanded = kv_heads is None or (backward and curve.backward_traffic)
        rows = heads * q_len + (heads if expanded else kv_heads or heads) * kv_len
        traffic = 2.0 * batch * rows * head_dim * element / self._bandwidth
        if backward:
            flops *= _BACKWARD
            traffic *= curve.backward_traffic or _BACKWARD
        blocks = math.ceil(q_len / _QUERY_BLOCK) * batch * heads
        rounds = max(1.0, self._rounds(blocks)) * self._sm_count / blocks
        return curve.floor_us * 1e-6 + flops / rate * rounds + traffic

    def _rounds(self, blocks: int) -> float:
        even = blocks / self._sm_count
        share = self._curve.wave_quantisation
        return even * (1 - share) + math.ceil(even) * share
