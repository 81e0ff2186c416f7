"""FLOPs and bytes of operator calls from their shapes, and how near their kernels came to the peak.

A product of m x k and k x n has 2 m n k FLOPs. Bytes are the least memory traffic: each input is read once,
each output written once. What the shapes do not determine is None. A kernel belongs to the innermost call of
known shape around its launch. If a call has several kernels (a product split over K and its sum), the longest
one gets the work in the table of kernels.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from math import prod
from typing import Any

import numpy as np

from fsdpbench.reports.analysis.activity import Work
from fsdpbench.reports.analysis.peaks import Chip, compute_type
from fsdpbench.reports.analysis.records import Ns, Record, seconds
from fsdpbench.reports.analysis.units import NOTHING, index_spans
from fsdpbench.reports.readers import OperatorCall, Trace, dtype_bytes
from fsdpbench.reports.readers.trace import OPERATORS, Int64

MOST_ROWS = 200
"""Greatest number of rows of each table in the JSON; the rows left out are counted."""


@dataclass(frozen=True)
class Rate:
    """Work of known size. time: ns that it took.  flops, bytes: totals, None if unknown.  least: ns that it
    would take at the chip's peak, None if no peak is known."""

    time: int = 0
    flops: int | None = None
    bytes: int | None = None
    least: float | None = None

    def __add__(self, other: Rate) -> Rate:
        """Return the sum; a figure that only one side knows is that side's."""
        pairs = (self.flops, other.flops), (self.bytes, other.bytes), (self.least, other.least)
        sums: Any = (one if two is None else two if one is None else one + two for one, two in pairs)
        return Rate(self.time + other.time, *sums)

    def to_dict(self) -> dict[str, float | None]:
        known = self.time > 0
        return {
            "tflops": self.flops / self.time / 1e3 if known and self.flops else None,
            "bytes_per_s": self.bytes / seconds(self.time) if known and self.bytes else None,
            "roof_share": self.least / self.time if known and self.least else None,
        }


@dataclass(frozen=True)
class KernelTotal(Record, rate=""):
    """Kernels, copies and collectives of one name (operators on a CPU trace) within the steps.

    time: summed durations; for operators, without those inside them.  share: of the time of all kernels.
    rate: of those whose work is known.
    """

    name: str
    family: str
    count: int
    time: Ns
    share: float
    rate: Rate = field(default_factory=Rate)

    def to_dict(self) -> dict[str, object]:
        return super().to_dict() | {"mean_s": seconds(self.time) / self.count} | self.rate.to_dict()


@dataclass(frozen=True)
class OperatorTotal(Record, rate=""):
    """Calls of one operator with the same shapes. time: of the kernels that they launched.  flops, bytes: of
    one call (bytes: the least).  bound: what limits it at the peak, `compute` or `memory`."""

    name: str
    shapes: str
    dtype: str
    count: int
    time: Ns
    share: float
    flops: int | None
    bytes: int | None
    bound: str | None
    rate: Rate

    @property
    def intensity(self) -> float | None:
        """Return FLOPs per byte."""
        return self.flops / self.bytes if self.flops and self.bytes else None

    def to_dict(self) -> dict[str, object]:
        return super().to_dict() | {"flops_per_byte": self.intensity} | self.rate.to_dict()


@dataclass(frozen=True)
class ModuleTotal(Record, name="module"):
    """Modules of one class. calls: number of forward calls.  own: time of the kernels launched in them but in
    no module inside them; time: with modules inside."""

    name: str
    instances: int
    calls: int
    own: Ns
    time: Ns
    share: float


@dataclass(frozen=True)
class DeviceUse(Record, computing="computation", communicating="communication", span=""):
    """One device of a trace: how long within the steps it was busy, computed and communicated."""

    device: int
    busy: Ns
    computing: Ns
    communicating: Ns
    span: Ns

    def to_dict(self) -> dict[str, object]:
        return super().to_dict() | {"idle_s": seconds(self.span - self.busy)}


@dataclass(frozen=True)
class WorkTables:
    """Work within the steps, each table by decreasing time. total: summed durations of all kernels, ns.
    `roof`: the chip whose peak rates are the reference; None if none is known."""

    total: int = 0
    kernels: tuple[KernelTotal, ...] = ()
    families: tuple[KernelTotal, ...] = ()
    operators: tuple[OperatorTotal, ...] = ()
    modules: tuple[ModuleTotal, ...] = ()
    devices: tuple[DeviceUse, ...] = ()
    roof: str | None = None

    def to_dict(self) -> dict[str, object]:
        return {
            "kernel_time_s": seconds(self.total),
            "roof": self.roof,
            "kernels": [each.to_dict() for each in self.kernels[:MOST_ROWS]],
            "kernels_left_out": max(0, len(self.kernels) - MOST_ROWS),
            "kernel_families": [each.to_dict() for each in self.families],
            "operators": [each.to_dict() for each in self.operators[:MOST_ROWS]],
            "operators_left_out": max(0, len(self.operators) - MOST_ROWS),
            "modules": [each.to_dict() for each in self.modules[:MOST_ROWS]],
            "devices": [each.to_dict() for each in self.devices],
        }


_IS_CAUSAL, _OUT_DTYPE = OPERATORS["attention"], OPERATORS["scaled_products"]
_BYTES_OF = {"4": 8, "5": 2, "6": 4, "7": 8, "11": 1, "15": 2, "23": 1, "24": 1, "44": 1}
"""Element size by torch's number of a type: int64, float16, float32, float64, bool, bfloat16, 3 of 8 bits."""

_MOST_FLOPS = 1 << 80
_MOST_ELEMENTS = 1 << 50
"""No call exceeds these; larger shapes in a trace are treated as unknown."""


@dataclass(frozen=True)
class CallCost:
    """FLOPs and least bytes of a call; `dtype`: the profiler's name of the type of its first input."""

    flops: int | None
    bytes: int | None
    dtype: str


@lru_cache(maxsize=4096)
def cost_of(name: str, call: OperatorCall) -> CallCost:
    """Return the cost of a call of the operator `name` (such as `aten::mm`)."""
    short = name.removeprefix("aten::")
    first = next((kind for size, kind in zip(call.sizes, call.types, strict=True) if size and kind), "")
    if call.moved is not None:
        return CallCost(None, call.moved, first)
    try:
        if short in _BY_TYPE:
            return CallCost(None, _one_pass(short, call), first)
        flops, elements = _RULES[short](short, call)
    except (IndexError, KeyError, ValueError):  # an unknown operator, or unexpected shapes
        flops, elements = None, None
    if (flops or 0) > _MOST_FLOPS or (elements or 0) > _MOST_ELEMENTS:
        flops, elements = None, None
    each = dtype_bytes(first or None)
    return CallCost(flops, None if elements is None or each is None else elements * each, first)


def _product(name: str, call: OperatorCall) -> tuple[int | None, int | None]:
    """Return FLOPs and elements of [b x] m x k times [b x] k x n; `addmm` has the added matrix first."""
    left, right = call.sizes[1:3] if name in ("addmm", "baddbmm") else call.sizes[:2]
    (*batch, m, k), (*_, inner, n) = left, right
    if len(left) != len(right) or k != inner or len(left) not in (2, 3):
        return None, None
    many = prod(batch)
    return 2 * many * m * n * k, many * (m * k + k * n + m * n)


def _scaled_product(name: str, call: OperatorCall) -> tuple[int | None, int | None]:
    """Return FLOPs and elements of m x k times k x n of one byte each; a byte holds two 4-bit numbers."""
    flops, elements = _product(name, call)
    if flops is None or elements is None:
        return None, None
    (m, _), (_, n) = call.sizes[:2]
    each_of_out = _BYTES_OF.get(call.values[_OUT_DTYPE[name]], 1)
    packed = 2 if "float4" in call.types[0].lower() else 1
    return packed * flops, elements + (each_of_out - 1) * m * n


def _grouped_product(name: str, call: OperatorCall) -> tuple[int | None, int | None]:
    """Return FLOPs and elements; groups divide left rows or right columns, or each has its own product."""
    left, right = call.sizes[:2]
    (*groups, m, k), (*others, inner, n) = left, right
    if k != inner or len(groups) > 1 or len(others) > 1:
        return None, None
    many = groups[0] if groups and others else 1
    # If the inner dimension is divided, each group has a result.
    results = many if groups or others else (call.sizes[2] or (1,))[0]
    return 2 * many * m * n * k, prod(left) + prod(right) + results * m * n


def _convolution(name: str, call: OperatorCall) -> tuple[int | None, int | None]:
    if name == "convolution_backward":
        result, image, weight = call.sizes[:3]
        wanted = call.values[-1].count("True") if call.values[-1] else 0
        if len(result) < 3 or len(result) != len(weight) or not wanted:
            return None, None
        # The gradient of the bias is not a product.
        ways = min(wanted, 2)
        products = ways * 2 * prod(result) * prod(weight[1:])
        return products, prod(result) + 2 * (prod(image) + prod(weight))
    image, weight = call.sizes[:2]
    stride, padding, dilation = (tuple(map(int, re.findall(r"\d+", call.values[at]))) for at in (3, 4, 5))
    if call.values[6] != "False" or len(image) < 3 or len(image) != len(weight):
        return None, None
    spatial = len(image) - 2
    if not (len(stride) == len(padding) == len(dilation) == spatial) or min(stride) < 1:
        return None, None
    moves = zip(image[2:], padding, dilation, weight[2:], stride, strict=True)
    spans = [(size + 2 * pad - gap * (kernel - 1) - 1) // step + 1 for size, pad, gap, kernel, step in moves]
    out = [image[0], weight[0], *spans]
    if min(out) < 1:
        return None, None
    return 2 * prod(out) * prod(weight[1:]), prod(image) + prod(weight) + prod(out)


def _attention(name: str, call: OperatorCall) -> tuple[int | None, int | None]:
    """Return FLOPs and elements: two products forward, five backward; a causal mask halves the FLOPs."""
    backward = name.endswith("_backward")
    query, key, value = call.sizes[1:4] if backward else call.sizes[:3]
    if len(query) != 4 or len(key) != 4 or len(value) != 4:
        return None, None
    batch, heads, rows, width = query
    columns, value_width = key[2], value[3]
    causal = call.values[_IS_CAUSAL[name]] if _IS_CAUSAL[name] < len(call.values) else ""
    if causal not in ("True", "False"):
        return None, None
    widths = 3 * width + 2 * value_width if backward else width + value_width
    flops = 2 * batch * heads * rows * columns * widths
    out = batch * heads * rows * value_width
    moved = prod(query) + prod(key) + prod(value) + out
    if backward:  # the output's gradient is read too; three gradients are written
        moved += out + prod(query) + prod(key) + prod(value)
    return flops // 2 if causal == "True" else flops, moved


def _one_pass(name: str, call: OperatorCall) -> int | None:
    """Return bytes: each input is read in its type, and as many as the largest input has are written. An
    expanded input (stride 0) is read once."""
    read, whole = [], []
    for place, size in enumerate(call.sizes):
        each = dtype_bytes(call.types[place] or None)
        if size and each is None:
            return None
        if size and each is not None:
            steps = call.strides[place] if place < len(call.strides) else size
            whole.append(prod(size) * each)
            read.append(prod(count for count, step in zip(size, steps, strict=False) if step) * each)
    if not whole or sum(whole) > _MOST_ELEMENTS:
        return None
    if name in ("fill_", "zero_"):
        return whole[0]
    if name == "_to_copy" and call.values[1]:
        return read[0] + prod(call.sizes[0]) * _BYTES_OF[call.values[1]]
    return (read[-1] if name == "copy_" else sum(read)) + (
        0 if name in OPERATORS["reductions"] else max(whole)
    )


_BY_TYPE = frozenset((*OPERATORS["passes"], *OPERATORS["reductions"]))
_RULES: dict[str, Callable[[str, OperatorCall], tuple[int | None, int | None]]] = {
    name: rule
    for kind, rule in (
        ("products", _product),
        ("scaled_products", _scaled_product),
        ("convolutions", _convolution),
        ("attention", _attention),
        ("grouped", _grouped_product),
    )
    for name in OPERATORS[kind]
}


_FROM_OR_TO_HOST = re.compile(r"Memcpy (?!DtoD)|CopyHostToDevice|CopyDeviceToHost")


@dataclass(frozen=True)
class CallGroup:
    """Calls of one operator with the same inputs, whose longest kernels have one name.

    count: number of calls.  time: ns of all their kernels.  kernel: index of that name, None on a CPU;
    kernel_time: ns of these kernels, one per call.  least: ns of a call at the peak, if known.
    """

    name: str
    call: OperatorCall
    cost: CallCost
    count: int
    time: int
    kernel: int | None
    kernel_time: int
    least: float | None
    bound: str | None

    def rate(self, time: int) -> Rate:
        """Return the rate of the calls' work over `time` ns; an empty rate if the work is unknown."""
        if self.cost.flops is None and self.cost.bytes is None:
            return Rate()
        one = (self.cost.flops, self.cost.bytes, self.least)
        whole: list[Any] = [None if each is None else each * self.count for each in one]
        return Rate(time, *whole)


def call_groups(trace: Trace, work: Work, on_device: bool, chip: Chip | None) -> list[CallGroup]:
    """Return the calls that launched some of `work` (on a CPU: all calls of the trace).

    Args:
        on_device: whether kernels did the work, rather than operators of a CPU.
        chip: the chip whose peak the calls are compared with, if known.
    """
    rows, events = trace.calls.rows, trace.events
    if on_device and len(rows):
        time, kernel, kernel_time = _kernels_of(trace, work)
    else:
        time = np.where(np.isin(rows, work.row), events.duration[rows], 0)
        kernel, kernel_time = np.full(len(rows), NOTHING, np.int64), np.zeros(len(rows), np.int64)
    ran_at_all = np.flatnonzero(time > 0)
    inputs = trace.calls.number[ran_at_all]
    # Numbers of names and of inputs are below 2**31, so that two of them fit into a key.
    same = np.unique(events.name[rows[ran_at_all]].astype(np.int64) << 31 | inputs, return_inverse=True)[1]
    keys = same << 31 | kernel[ran_at_all] + 1
    _, first, group, counts = np.unique(keys, return_index=True, return_inverse=True, return_counts=True)
    times, kernel_times = np.zeros(len(first), np.int64), np.zeros(len(first), np.int64)
    np.add.at(times, group, time[ran_at_all])
    np.add.at(kernel_times, group, kernel_time[ran_at_all])
    found = []
    for number in np.argsort(first).tolist():
        row, ran = int(rows[ran_at_all[first[number]]]), int(kernel[ran_at_all[first[number]]])
        name, call = trace.name_of(row), trace.calls.inputs[inputs[first[number]]]
        cost, word = cost_of(name, call), trace.names[ran] if ran != NOTHING else ""
        # Work over the host link or on the host is not compared with the device's memory.
        least, bound = None, None
        if chip is not None and on_device and not _FROM_OR_TO_HOST.search(word):
            least, bound = chip.roof(cost.flops, cost.bytes, compute_type(cost.dtype, word) or "")
        whole = int(times[number]), None if ran == NOTHING else ran, int(kernel_times[number])
        found.append(CallGroup(name, call, cost, int(counts[number]), *whole, least, bound))
    # Floating-point sums depend on their order: sort by the calls, not by their order in the file.
    return sorted(found, key=lambda group: (group.name, group.time, group.count, group.least or 0.0))


def _kernels_of(trace: Trace, work: Work) -> tuple[Int64, Int64, Int64]:
    """Return for each call the ns of its kernels, the name number of the longest, and the longest's ns."""
    rows, events = trace.calls.rows, trace.events
    index = index_spans(events.lane[rows], events.start[rows], events.ends(rows))
    place = index.innermost(work.launch_lane, work.launch)
    mine = np.flatnonzero((place != NOTHING) & ~work.is_communication)
    place, duration = place[mine], work.end[mine] - work.start[mine]
    time, longest = np.zeros(len(rows), np.int64), np.zeros(len(rows), np.int64)
    np.add.at(time, place, duration)
    np.maximum.at(longest, place, duration)
    # Ties go to the alphabetically last name: numbers of names depend on the order of events in the file.
    by_name = np.array(sorted(range(len(trace.names)), key=trace.names.__getitem__), np.int64)
    last, chosen = np.full(len(rows), NOTHING, np.int64), duration == longest[place]
    np.maximum.at(last, place[chosen], np.argsort(by_name)[events.name[work.row[mine[chosen]]]])
    return time, np.where(last == NOTHING, NOTHING, by_name[last]), longest


def operator_totals(calls: list[CallGroup], total: int) -> tuple[OperatorTotal, ...]:
    """Return totals by name and shapes, the longest first; `total`: ns of all kernels."""
    groups: dict[tuple[str, OperatorCall, str | None], list[CallGroup]] = {}
    for each in calls:
        groups.setdefault((each.name, each.call, each.bound), []).append(each)
    found = [_total(name, bound, group, total) for (name, _, bound), group in groups.items()]
    # `repr` breaks ties, so that the order does not depend on the file.
    return tuple(sorted(found, key=lambda each: (-each.time, repr(each))))


def _total(name: str, bound: str | None, group: list[CallGroup], total: int) -> OperatorTotal:
    cost, time = group[0].cost, sum(each.time for each in group)
    rate = sum((each.rate(each.time) for each in group), Rate())
    shapes = ", ".join("x".join(map(str, size)) for size in group[0].call.sizes if size)[:200]
    share, count = time / total if total else 0.0, sum(each.count for each in group)
    return OperatorTotal(name, shapes, cost.dtype, count, time, share, cost.flops, cost.bytes, bound, rate)
