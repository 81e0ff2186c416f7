"""Times of the CPU that a trace shows: launches, events, views, operators, nodes of autograd, collectives.

    aten::gelu           [operator  (launch)]         aten::view       [view]      cudaEventRecord  [event]
    aten::gelu_backward  [operator, node  (launch)]   c10d::allreduce_ [collective]

Operators count that launch one kernel and have a `_backward`, or are one: a trace does not say which others
ran in backward, nor how many calls in Python are between them, which are scaled as operators and views are.
A real profiler lengthens it all, by a share that its trace does not show.
"""

from __future__ import annotations

import dataclasses
import math
import statistics

import numpy as np

from fsdpbench.reports.readers import Trace
from fsdpbench.reports.readers.trace import Category, Int64
from fsdpbench.sim.model.sections import CpuProfile

_EVENTS = ("cudaEventRecord", "cudaStreamWaitEvent")
_WITHIN = {"operator": "launch", "autograd_node": "operator"}  # what else the times of these have in them
HostTimes = dict[str, list[int]]  # ns of the calls of each kind


def add_host_times(found: HostTimes, trace: Trace, operators: Int64, kernels: Int64) -> None:
    """Add a trace's times; `operators`: rows of those that have a price, `kernels`: how many of each."""
    single = operators[kernels == 1]
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
        found.setdefault(kind, []).extend(trace.events.duration[each].tolist())


def host_of(times: HostTimes, base: CpuProfile) -> dict[str, tuple[float, int]]:
    """Return the figures in us, and how many calls show each: 0 of those that are scaled as operators and
    views. Nothing where neither is shown."""
    us = {"": 0.0} | {kind: statistics.median(each) / 1e3 for kind, each in times.items() if each}
    found = {
        f"{kind}_us": (value, len(times[kind]))
        for kind, whole in us.items()
        if (value := whole - us.get(_WITHIN.get(kind, ""), math.nan)) > 0
    }
    known = [key for key in ("operator_us", "view_us") if key in found and getattr(base, key)]
    if not known:
        return {}
    scale = statistics.fmean(found[key][0] / getattr(base, key) for key in known)
    rest = [field.name for field in dataclasses.fields(base) if not field.name.startswith("cuda_")]
    return {key: (scale * getattr(base, key), 0) for key in rest} | found
