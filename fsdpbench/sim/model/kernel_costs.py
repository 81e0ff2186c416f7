"""All kernel costs of one accelerator, behind one object with integer nanoseconds and a cache a shape."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from fsdpbench.base.files.operator_tables import ATTENTION, COLLECTIVE, Measured
from fsdpbench.sim.model.chips import OPERATOR_CHIPS
from fsdpbench.sim.model.library_costs import Array, attention_seconds, product_seconds
from fsdpbench.sim.model.network import Network, curve_seconds
from fsdpbench.sim.model.profile import DTYPES, HardwareProfile, load_profile, profile_names
from fsdpbench.sim.model.sections import AttentionTable, ProductTable

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


# Kernels that compute more addresses than they move bytes: time by instructions.
# A multiprocessor has four schedulers, each issues one instruction of a warp a cycle:
#     time = floor + threads x instructions / (multiprocessors x 128 x clock x issue_share)
# The clock is the data sheet's: what its rate in fp32 needs with two FLOPs a lane and cycle.

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


# Memory-bound kernels: time by bytes.
# A kernel that moves B bytes takes ``floor + B / (efficiency x peak)``: the floor is what start, ramp-up and
# tail of the smallest kernel take, so that small kernels reach a small share of the bandwidth and large ones
# the kind's efficiency. Kinds differ in how regular their accesses are. Kernels that Inductor generates reach
# ``fused_gain`` times as much as eager ones of their kind.


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


# Dense matrix products: time by shape.
# The library cuts the ``m x n`` output into tiles and gives them to the multiprocessors, one each at a time:
#     tiles    = ceil(m / rows) * ceil(n / columns) * batch * split
#     waves    = tiles / multiprocessors, between even sharing and full rounds (``wave_quantisation``)
#     compute  = waves * 2 * rows * columns * (k / split + prologue_k) / (rate of one multiprocessor)
#     traffic  = bytes of both inputs and the output / bandwidth
#     time     = floor + (compute^p + traffic^p)^(1/p)
# A tile of 256 x 128 runs its main loop fastest, smaller ones waste less of a matrix's edge and of the last
# round; a *split* of k makes more tiles of a small output at the price of adding up partial results. The
# library's choice is modelled as the fastest of them. ``prologue_k`` is what starting and ending a tile
# costs, in steps of k. The power p = 4 joins the two limits smoothly, for memory and compute never overlap
# perfectly where they are equal.
# Fitted for each GPU on 160 measured shapes (bf16, m 1 to 16384); the errors are in the profiles.

BYTES_PER_ELEMENT = {"bf16": 2, "fp16": 2, "tf32": 4, "fp32": 4}
_SPLITS = (1, 2, 3, 4, 8)
# A split is not worth its start-up below so many steps of k.
_SMALLEST_SPLIT_K = 256
# Partial results are written and read back in fp32, half of it from cache.
_SPLIT_BYTES = 4
_JOIN = 4.0


class GemmCost:
    """Seconds of a matrix product from its shape."""

    def __init__(self, profile: HardwareProfile) -> None:
        self._curve = profile.gemm
        self._sm_count = profile.sm_count
        self._peak = profile.peak_flops
        self._bandwidth = profile.memory_bandwidth * profile.gemm.memory_efficiency

    def seconds(self, m: int, n: int, k: int, batch: int, dtype: str, kind: str) -> float:
        """Duration of ``batch`` products ``m x k`` by ``k x n``; ``kind`` forward or weight_grad."""
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
        """Rounds over the multiprocessors; the library recovers a part of the loss in the last round."""
        even = tiles / self._sm_count
        share = self._curve.wave_quantisation
        return max(1.0, even * (1 - share) + math.ceil(even) * share)


class LibraryCosts:
    """Seconds of products and attention by the first of ``names`` that knows them; None if none does."""

    def __init__(self, profile: HardwareProfile, names: Sequence[str]) -> None:
        self._profile = profile
        self._tables = [profile.libraries[name] for name in names if name in profile.libraries]

    def product_table(self, dtype: str) -> ProductTable | None:
        """The table of a type; 16-bit types share one."""
        kind = "bf16" if dtype == "fp16" else dtype
        return next((tables.products[kind] for tables in self._tables if kind in tables.products), None)

    @property
    def attention_table(self) -> AttentionTable | None:
        """The first table of attention."""
        return next((tables.attention for tables in self._tables if tables.attention is not None), None)

    def product(
        self, m: int, n: int, k: int, dtype: str, slowed: float = 1.0, comes_quantised: bool = False
    ) -> float | None:
        """One product; ``slowed`` is the share of the tensor cores' rate that training leaves.
        ``comes_quantised``: without what libraries cast before it, in operators that were measured as one."""
        table, profile = self.product_table(dtype), self._profile
        if table is None:
            return None
        if comes_quantised:
            table = dataclasses.replace(table, quantise=0.0)
        a, b, c = map(_array, (m, n, k))
        return float(product_seconds(table, profile.sm_count, profile.memory_bandwidth, a, b, c, slowed)[0])

    def attention_forward(
        self, batch: int, heads: int, kv_heads: int, length: int, head_dim: int, slowed: float = 1.0
    ) -> float | None:
        """One causal forward of equal lengths."""
        table, profile = self.attention_table, self._profile
        if table is None:
            return None
        seconds = attention_seconds(
            table,
            profile.sm_count,
            profile.memory_bandwidth,
            _array(batch),
            _array(heads),
            _array(kv_heads),
            _array(length),
            _array(head_dim),
            slowed,
        )
        return float(seconds[0])


def _array(value: int) -> Array:
    return np.array([float(value)])


class CpuCosts:
    """Constants in integer nanoseconds, read once from a profile, as attributes for hot paths.

    ``operator_ns``: dispatch of an operator that launches a kernel, the launch excluded; ``view_ns``: an
    operator without a kernel; ``launch_ns``: a kernel launch; ``autograd_node_ns``: one node of the
    backward graph; ``module_call_ns``: one ``nn.Module.__call__``; ``hook_ns``: one Python hook;
    ``collective_ns``: the call of a collective, its launch included; ``event_ns``: record, wait or query of
    an event; ``stream_ns``: switching the current stream; ``synchronize_ns``: the call of a
    synchronisation, waiting excluded.
    """

    __slots__ = (
        "autograd_node_ns",
        "collective_ns",
        "event_ns",
        "hook_ns",
        "launch_ns",
        "module_call_ns",
        "operator_ns",
        "stream_ns",
        "synchronize_ns",
        "view_ns",
    )

    def __init__(self, profile: HardwareProfile) -> None:
        for slot in self.__slots__:
            microseconds = getattr(profile.cpu, slot.removesuffix("_ns") + "_us")
            setattr(self, slot, round(microseconds * 1000))

    autograd_node_ns: int
    collective_ns: int
    event_ns: int
    hook_ns: int
    launch_ns: int
    module_call_ns: int
    operator_ns: int
    stream_ns: int
    synchronize_ns: int
    view_ns: int


# Flash attention: time by batch, heads, length and head size.
#     flops   = 4 x batch x heads x q_len x kv_len x head_dim     (half of it when causal; backward 2.5 times)
#     compute = flops / rate, in rounds of query blocks over the multiprocessors
#     traffic = bytes of queries, keys, values and outputs / bandwidth    (backward 2.5 times)
#     time    = floor + compute + traffic
# The two add up instead of overlapping: what grows with the length alone (loading a block, rescaling, writing
# the result) keeps the tensor cores waiting, which is why short sequences reach a small share of the long
# ones' rate. The backward pass computes the scores again, hence five products instead of two. Heads of 64 run
# slower, since the exponentials weigh twice as much against their products.

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


# What a profile says of operators that run alone, as benchmarks of one operator measure them.
# The table of the library that was measured prices them; without one, what prices training runs, less what
# only training does to a product (`under_load`). `operator_tables` reads lists of operators.

_TYPES = {"bfloat16": "bf16", "fp8": "fp8", "nvfp4": "nvfp4"}


def profile_of(gpu: str) -> HardwareProfile | None:
    """The packaged profile of a chip as tables name it; None if there is none."""
    name = gpu.lower().replace("_", "-")
    name = OPERATOR_CHIPS[name].profile if name in OPERATOR_CHIPS else name
    return load_profile(name) if name in profile_names() else None


class IsolatedPrices:
    """Microseconds of measured operators on one profile; ``tables`` False prices them as training runs do."""

    def __init__(self, profile: HardwareProfile, tables: bool = True) -> None:
        self._profile = profile
        self._tables = tables
        self._kernels = KernelCosts(
            dataclasses.replace(
                profile,
                gemm=dataclasses.replace(profile.gemm, under_load=1.0),
                attention=dataclasses.replace(profile.attention, under_load=1.0),
            )
        )
        # Wide enough for any group inside one node.
        self._network = Network(profile, 1 << 20, 1 << 20)

    def microseconds(self, row: Measured) -> float:
        """The price of a measured operator."""
        if row.kind == COLLECTIVE:
            return self._collective(row)
        return self._attention(row) if row.kind == ATTENTION else self._product(row)

    def _libraries(self, row: Measured) -> LibraryCosts:
        return LibraryCosts(self._profile, [row.library] if self._tables else [])

    def _collective(self, row: Measured) -> float:
        kind = str(row.columns["op"]).replace("alltoall", "all_to_all")
        nbytes, ranks = row.number("bytes"), row.number("gpus")
        if self._tables and row.library in self._profile.libraries:
            seconds = curve_seconds(self._profile.libraries[row.library], kind, nbytes, ranks)
            if seconds is not None:
                return seconds * 1e6
        return self._network.collective_ns(kind, nbytes, range(ranks)) / 1e3

    def _product(self, row: Measured) -> float:
        m, n, k = map(row.number, ("m", "n", "k"))
        dtype = _TYPES[row.dtype]
        seconds = self._libraries(row).product(m, n, k, dtype)
        return self._kernels.gemm_ns(m, n, k, 1, dtype) / 1e3 if seconds is None else seconds * 1e6

    def _attention(self, row: Measured) -> float:
        batch, heads, kv_heads, length, size = map(
            row.number, ("batch", "heads", "kv_heads", "seq", "head_dim")
        )
        seconds = self._libraries(row).attention_forward(batch, heads, kv_heads, length, size)
        if seconds is not None:
            return seconds * 1e6
        return (
            self._kernels.attention_forward_ns(batch, heads, length, length, size, True, "bf16", kv_heads)
            / 1e3
        )
