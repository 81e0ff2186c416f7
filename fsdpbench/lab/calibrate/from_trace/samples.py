"""Times of a trace's kernels by the operator that launched them, as calls that the simulator can price.

    operators   aten::to [ aten::_to_copy [ aten::copy_ ]]   aten::linear [ aten::t  aten::mm ]
    kernels                               [copy]                              [memset][product]

Kernels belong to the outermost operator with a price, by correlation id. Calls whose kernels overlap work of
other streams are not used for rates. A call is repeated on meta tensors, with the first overload that accepts
its inputs. Traces lack the dtypes of tensor lists, so the dtype that fits the measured time is chosen.
"""

import ast
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from itertools import repeat
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fsdpbench.base.errors import UsageError
from fsdpbench.base.torch_internals import dispatch_has_kernel_for_dispatch_key
from fsdpbench.reports.analysis import intervals
from fsdpbench.reports.analysis.activity import Activity, Work, find_activity, group_ranks
from fsdpbench.reports.analysis.analyze import find_traces
from fsdpbench.reports.analysis.naming import COLLECTIVE_TYPES
from fsdpbench.reports.analysis.units import NOTHING, fsdp_spans, index_spans
from fsdpbench.reports.readers import OperatorCall, Trace, read_trace
from fsdpbench.reports.readers.trace import Category, Int64, dtype_from_input_type
from fsdpbench.sim.model.kernel_costs import KernelCosts
from fsdpbench.sim.model.profile import load_profile
from fsdpbench.sim.torch_device.prices import Call
from fsdpbench.sim.torch_device.prices.families import FAMILIES, UNKNOWN, rule_of
from fsdpbench.sim.torch_device.prices.products import attention_backward, attention_forward

_LIST_TYPES = (torch.float32, torch.bfloat16)
_TYPES = {
    "signed char": torch.int8, "unsigned char": torch.uint8, "long unsigned int": torch.uint64,
    "c10::Float8_e4m3fn": torch.float8_e4m3fn, "c10::Float8_e5m2": torch.float8_e5m2,
}  # fmt: skip
_ATTENTION = "aten::_scaled_dot_product_"
# By default torch may choose cuDNN's kernel; a profile's rates are those of the kernel that was chosen.
_CUDNN = {
    f"{_ATTENTION}cudnn_attention": partial(attention_forward, causal_at=6),
    f"{_ATTENTION}cudnn_attention_backward": partial(attention_backward, causal_at=14),
}
_UNREADABLE = (
    *(RuntimeError, TypeError, ValueError, LookupError, ArithmeticError, AssertionError, AttributeError),
    SyntaxError,
)
_ALONE = 0.01
_EVENTS = ("cudaEventRecord", "cudaStreamWaitEvent")


@dataclass
class Sample:
    """Equal calls of an operator, one per possible list dtype; ns and kernels of calls that ran alone."""

    calls: tuple[Call, ...]
    kernels: int = 0
    alone: list[int] = field(default_factory=list)


@dataclass
class Samples:
    """Findings in the traces of one machine, in ns. `unmatched` of `busy`: kernels without an operator of
    known inputs. `working` of `span`: time in which the device did anything. `collectives`: ns and the share
    of it beside computation, by kind, bytes and ranks. `host`: ns of CPU calls by kind."""

    device: str = ""
    memory: int = 0
    simulated: bool = False
    ranks: int = 1
    traces: int = 0
    operators: dict[tuple[str, OperatorCall], Sample] = field(default_factory=dict)
    collectives: dict[tuple[str, int, tuple[int, ...]], list[tuple[int, float]]] = field(default_factory=dict)
    host: dict[str, list[int]] = field(default_factory=dict)
    unmatched: int = 0
    busy: int = 0
    working: int = 0
    span: int = 0


def read_samples(paths: Sequence[Path]) -> Samples:
    """Read the traces at `paths` (files, or folders of ranks). Raises `UsageError` for a trace that cannot be
    read, has no kernels of an NVIDIA GPU, or is from another machine than earlier ones."""
    found = Samples()
    for file in find_traces(paths):
        trace = read_trace(file.path, all_calls=True)
        if not len(trace.rows(Category.KERNEL)):
            raise UsageError(f"--from-trace {trace.path}: shows no kernel of a GPU (ProfilerActivity.CUDA)")
        _identify(found, trace)
        activity = find_activity(trace, fsdp_spans(trace))
        _operators(found, trace, activity.work)
        _collectives(found, trace, activity)
    return found


def _identify(found: Samples, trace: Trace) -> None:
    """Record machine and world size. Raises `UsageError` if they differ from those of earlier traces."""
    names = sorted({str(each.get("name", ""))[:80] for each in trace.devices}) or [""]
    called = {trace.names[number] for number in set(trace.events.name[trace.rows(Category.RUNTIME)].tolist())}
    amd = any(name.startswith("hip") for name in called) or "AMD" in names[0]
    machine = names[0], trace.world_size or 1, trace.simulated is not None
    other = found.traces and machine != (found.device, found.ranks, found.simulated)
    if amd or len(names) > 1 or other:
        why = "AMD's kernels are not priced" if amd else "calibrate from one kind of GPU, one run at a time"
        device = " and ".join(name or "an unknown GPU" for name in names)
        raise UsageError(f"--from-trace {trace.path}: is of {device} among {machine[1]} ranks: {why}")
    found.device, found.ranks, found.simulated = machine
    sizes = [each.get("totalGlobalMem") for each in trace.devices]
    found.memory = next((size for size in sizes if type(size) is int and size > 0), 0)
    found.traces += 1


def _outermost(trace: Trace, calls: Mapping[int, OperatorCall]) -> Int64:
    """Return rows of operators with a price that are not inside another such operator."""
    events, found = trace.events, []
    rows = trace.rows_named(_overloads, Category.CPU_OP)
    rows = rows[np.lexsort((-events.ends(rows), events.start[rows], events.lane[rows]))]
    lane, until = -1, -1
    columns = (rows, events.lane[rows], events.start[rows], events.ends(rows))
    for row, on, start, end in zip(*(column.tolist() for column in columns), strict=True):
        inside = on == lane and start < until
        if not inside and row in calls and _variants(trace.name_of(row), calls[row]):
            found.append(row)
            lane, until = on, end
    return np.array(found, np.int64)


def _operators(found: Samples, trace: Trace, work: Work) -> None:
    """Add the calls whose kernels all ran without overlap on the device."""
    events, calls = trace.events, trace.calls.by_row()
    tops = _outermost(trace, calls)
    whole = intervals.of(work.start, work.end)
    found.working += whole.length()
    found.span += int(whole.end[-1] - whole.start[0]) if len(whole) else 0
    duration, beside = work.end - work.start, np.zeros(len(work), np.int64)
    for stream in np.unique(work.stream):
        mine = work.stream == stream
        others = intervals.of(work.start[~mine], work.end[~mine])
        beside[mine] = intervals.covered(others, work.start[mine], work.end[mine])
    place = np.full(len(work), NOTHING, np.int64)
    if len(tops):
        index = index_spans(events.lane[tops], events.start[tops], events.ends(tops))
        place = index.innermost(work.launch_lane, work.launch)
    kernels, mine = ~work.is_communication & ~work.is_copy, place != NOTHING
    found.busy += int(duration[kernels].sum())
    found.unmatched += int(duration[kernels & ~mine].sum())
    hosts = trace.names_that(lambda name: name.startswith("Memcpy ") and "DtoD" not in name)
    bad = work.is_communication | hosts[events.name[work.row]] | (beside > _ALONE * duration)
    spoilt = np.bincount(place[mine & bad], minlength=len(tops)) > 0
    total = np.bincount(place[mine], weights=duration[mine], minlength=len(tops))
    counts = np.bincount(place[mine], minlength=len(tops))
    _host(found, trace, tops[counts == 1])
    for number in np.flatnonzero((total > 0) & ~spoilt).tolist():
        key = trace.name_of(int(tops[number])), calls[int(tops[number])]
        sample = found.operators.setdefault(key, Sample(_variants(*key)))
        sample.alone.append(int(total[number]))
        sample.kernels += int(counts[number])


def _host(found: Samples, trace: Trace, single: Int64) -> None:
    """Add times of the CPU; `single`: rows of operators with a price that launch one kernel.

    Only operators with a `_backward`, and those, count: a trace does not show which others ran in backward.
    """
    names = [trace.name_of(row) for row in single.tolist()]
    have_backward = {name.removesuffix("_backward") for name in names if name.endswith("_backward")}
    rows = {
        "operator": single[np.array([name in have_backward for name in names], bool)],
        "autograd_node": single[np.array([name.endswith("_backward") for name in names], bool)],
        "view": trace.rows_named(lambda name: name in ("aten::view", "aten::as_strided"), Category.CPU_OP),
        "collective": trace.rows_named(lambda name: name.startswith("c10d::"), Category.CPU_OP),
        "launch": trace.rows_named(lambda name: name.startswith("cudaLaunchKernel"), Category.RUNTIME),
        "event": trace.rows_named(lambda name: name in _EVENTS, Category.RUNTIME),
    }
    for kind, each in rows.items():
        found.host.setdefault(kind, []).extend(trace.events.duration[each].tolist())


def _collectives(found: Samples, trace: Trace, activity: Activity) -> None:
    """Add the collectives with known bytes and ranks."""
    table, everybody = activity.collectives, tuple(range(found.ranks))
    beside = intervals.covered(activity.computation, table.work.start, table.work.end).tolist()
    for at in np.flatnonzero(table.leads & (table.message > 0)).tolist():
        info = trace.collectives.get(int(table.work.row[at]))
        whole = everybody if info is not None and info.group_size == found.ranks else ()
        ranks, ns = (info and group_ranks(info)) or whole, int(table.work.end[at] - table.work.start[at])
        if len(ranks) > 1 and ns > 0:
            key = COLLECTIVE_TYPES[table.kind[at]].value, int(table.message[at]), ranks
            found.collectives.setdefault(key, []).append((ns, beside[at] / ns))


@lru_cache(maxsize=4096)
def _overloads(name: str) -> tuple[Any, ...]:
    """Return the overloads of an operator that a device runs as one operator with its own price."""
    namespace, _, short = name.partition("::")
    is_known = namespace == "aten" and short.isidentifier()
    packet: Any = getattr(torch.ops.aten, short, None) if is_known else None
    if not hasattr(packet, "overloads") or short in FAMILIES["only geometry"]:
        return ()
    return tuple(each for each in (getattr(packet, each) for each in packet.overloads()) if _is_priced(each))


def _is_priced(func: Any) -> bool:
    name = func._schema.name
    try:
        keys = ("CompositeImplicitAutograd", "CPU")
        composed, on_cpu = (dispatch_has_kernel_for_dispatch_key(func.name(), key) for key in keys)
    except RuntimeError:  # an operator of TorchScript only
        return False
    # A composite operator has its own kernels if the CPU has one, or if its name is internal.
    whole = on_cpu or not composed or name.startswith("aten::_")
    return whole and not func.is_view and (name in _CUDNN or rule_of(func) is not UNKNOWN)


@lru_cache(maxsize=65536)
def _variants(name: str, call: OperatorCall) -> tuple[Call, ...]:
    """Return the call, once per possible list dtype; empty if its inputs are unknown."""
    for func in _overloads(name):
        try:
            types = _LIST_TYPES if "TensorList" in call.types else _LIST_TYPES[:1]
            found = tuple(_made(func, call, dtype) for dtype in types)
            return found if all(map(priced_ns, found, repeat(_tried()))) else ()
        except _UNREADABLE:
            continue
    return ()


@lru_cache(maxsize=1)
def _tried() -> KernelCosts:
    return KernelCosts(load_profile("h100-80gb"))


def priced_ns(call: Call, costs: KernelCosts) -> float:
    """Return the simulator's price of a call, at least 1 ns."""
    rule = _CUDNN.get(call.func._schema.name) or rule_of(call.func)
    return max(1.0, float(rule(call, costs).duration_ns))


def _made(func: Any, call: OperatorCall, list_type: torch.dtype) -> Call:
    arguments = func._schema.arguments
    nothing = ((),) * len(call.types)
    inputs = zip(
        call.types, call.values, call.sizes, call.strides or nothing, call.lists or nothing, strict=True
    )
    values = [_value(each, *line, list_type) for each, line in zip(arguments, inputs, strict=True)]
    named = list(zip(arguments, values, strict=True))
    args = [value for each, value in named if not each.kwarg_only]
    kwargs = {each.name: value for each, value in named if each.kwarg_only}
    priced_by_inputs = func._schema.name.startswith(_ATTENTION)
    out = () if priced_by_inputs else func(*args, **kwargs)
    outs = out if isinstance(out, (list, tuple)) else [out]
    return Call(func, args, kwargs, [each for each in outs if isinstance(each, torch.Tensor)])


def _value(declared: Any, kind: str, text: str, size: Any, stride: Any, inside: Any, list_type: Any) -> Any:
    """Return an input in the type of the schema. Raises `TypeError` if the trace does not determine it."""
    wanted = str(declared.type)
    if "List[Tensor]" in wanted and kind == "TensorList":
        return [torch.empty(each, dtype=list_type, device="meta") for each in inside]
    if "Tensor" in wanted and kind and "List[" not in wanted:
        dtype = _TYPES.get(kind) or getattr(torch, (dtype_from_input_type(kind) or "").lower(), None)
        if not isinstance(dtype, torch.dtype):
            raise TypeError(kind)
        if len(stride) != len(size):
            return torch.empty(size, dtype=dtype, device="meta")
        return torch.empty_strided(size, stride, dtype=dtype, device="meta")
    if text and "Tensor" not in wanted:
        return ast.literal_eval(text)
    if kind and wanted in ("number", "float"):  # prices do not depend on the value
        return 1.0
    if kind:
        raise TypeError(wanted)
    return declared.default_value if declared.has_default_value() else None
