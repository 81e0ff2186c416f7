"""Times of the CPU that a trace shows: launches, events, views, operators, nodes of autograd, collectives.

    aten::gelu           [operator  (launch)]         aten::view       [view]      cudaEventRecord  [event]
    aten::gelu_backward  [operator, node  (launch)]   c10d::allreduce_ [collective]

Of operators those count that launch one kernel and that have a `_backward`, or are one: which of the others
ran in backward a trace does not say. Nor does it count calls in Python between them (modules, hooks, other
functions, changes of stream): these are scaled as operators and views are, one figure of the host. A real
profiler lengthens all of it, by a share that the trace does not show: of a real trace nothing is taken.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping

import numpy as np

from fsdpbench.reports.readers import Trace
from fsdpbench.reports.readers.trace import Category, Int64
from fsdpbench.sim.model.sections import CpuProfile

_VIEWS = ("aten::view", "aten::as_strided")
_EVENTS = ("cudaEventRecord", "cudaStreamWaitEvent")
_LAUNCHES = ("cudaLaunchKernel", "cuLaunchKernel")
_PYTHON = ("module_call_us", "hook_us", "python_call_us", "stream_us", "synchronize_us")
HostTimes = dict[str, list[int]]
"""Durations in ns of the calls of each kind."""


def add_host_times(found: HostTimes, trace: Trace, operators: Int64, kernels: Int64) -> None:
    """Add a trace's times; `operators`: rows of those that have a price, `kernels`: how many of each."""
    single = operators[kernels == 1]
    names = [trace.name_of(row) for row in single.tolist()]
    have_backward = {name.removesuffix("_backward") for name in names if name.endswith("_backward")}
    backward = np.array([name.endswith("_backward") for name in names], bool)
    forward = np.array([name in have_backward for name in names], bool)
    rows = {
        "forward": single[forward],
        "backward": single[backward],
        "view": trace.rows_named(lambda name: name in _VIEWS, Category.CPU_OP),
        "collective": trace.rows_named(lambda name: name.startswith("c10d::"), Category.CPU_OP),
        "launch": trace.rows_named(lambda name: name.startswith(_LAUNCHES), Category.RUNTIME),
        "event": trace.rows_named(lambda name: name in _EVENTS, Category.RUNTIME),
    }
    for kind, each in rows.items():
        found.setdefault(kind, []).extend(trace.events.duration[each].tolist())


def host_of(times: HostTimes, base: CpuProfile) -> tuple[CpuProfile, Mapping[str, int]]:
    """Return the base with the figures that the times show, and how many calls show each: 0 of those that are
    scaled as operators and views. It is the base's where neither is shown."""
    us = {kind: statistics.median(each) / 1e3 for kind, each in times.items() if each}
    shown = {f"{kind}_us": us[kind] for kind in ("launch", "view", "event", "collective") if kind in us}
    calls = {key: len(times[key.removesuffix("_us")]) for key in shown}
    if {"forward", "launch"} <= us.keys():
        shown["operator_us"], calls["operator_us"] = us["forward"] - us["launch"], len(times["forward"])
    if {"forward", "backward"} <= us.keys():
        shown["autograd_node_us"], calls["autograd_node_us"] = (
            us["backward"] - us["forward"],
            len(times["backward"]),
        )
    shown = {key: value for key, value in shown.items() if value > 0}
    both = [key for key in ("operator_us", "view_us") if key in shown and getattr(base, key) > 0]
    if not both:
        return base, {}
    scale = statistics.fmean(shown[key] / getattr(base, key) for key in both)
    rest = {
        key: scale * getattr(base, key) for key in (*_PYTHON, "event_us", "collective_us", "autograd_node_us")
    }
    return dataclasses.replace(base, **rest | shown), dict.fromkeys(rest, 0) | {
        key: calls[key] for key in shown
    }
