"""Labels in traces: one span around the CPU work of each FSDP event.

A span is named ``FSDP::<event> (<unit>)``; trace readers attribute a collective's kernel to the unit whose
span encloses the launch. Without a profiler a span costs one attribute look-up and no call into torch.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from .torch_internals import is_profiler_enabled

NOTHING: AbstractContextManager[None] = nullcontext()


class UnitLabels:
    """The span names of one unit, built once so that the steady state formats no strings."""

    __slots__ = (
        "all_gather",
        "all_reduce",
        "limiter_wait",
        "post_backward",
        "post_forward",
        "pre_backward",
        "pre_forward",
        "reduce_scatter",
        "reshard",
        "wait_all_gather",
    )

    def __init__(self, unit_name: str) -> None:
        for event in self.__slots__:
            setattr(self, event, f"FSDP::{event} ({unit_name})")

    all_gather: str
    all_reduce: str
    limiter_wait: str
    post_backward: str
    post_forward: str
    pre_backward: str
    pre_forward: str
    reduce_scatter: str
    reshard: str
    wait_all_gather: str


def span(label: str) -> AbstractContextManager[object]:
    """A context that puts ``label`` into the trace while a profiler runs, and does nothing otherwise."""
    if is_profiler_enabled():
        return torch.profiler.record_function(label)
    return NOTHING
