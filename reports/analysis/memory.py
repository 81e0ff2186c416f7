"""Peaks and retries from a trace's memory events."""

from __future__ import annotations

import numpy as np

from reports.analysis.model import MemoryAnalysis
from reports.analysis.windows import Window
from reports.trace import Trace
from reports.trace.model import Bool

CPU_DEVICE = 0
"""torch's DeviceType of the host."""


def device_events(trace: Trace) -> Bool:
    """Mask over the memory events: the accelerator's, where there are any, else the host's."""
    on_device = trace.memory.device_type != CPU_DEVICE
    return on_device if on_device.any() else ~on_device


def analyze_memory(trace: Trace, steps: list[Window]) -> MemoryAnalysis:
    """Peaks over the whole trace; retries by the step in whose marks they happened."""
    memory, retries = trace.memory, trace.retries
    if not len(memory) and not len(retries):
        return MemoryAnalysis()
    mask = device_events(trace)
    per_step = tuple(
        int(((retries.time >= step.mark.start) & (retries.time < step.mark.end)).sum()) for step in steps
    )
    reserved = int(memory.reserved[mask].max(initial=0))
    return MemoryAnalysis(
        peak_allocated=int(memory.allocated[mask].max()) if mask.any() else None,
        # The host's allocator reserves nothing and says 0.
        peak_reserved=reserved or None,
        retries=len(retries),
        retries_per_step=per_step if len(retries) else tuple(np.zeros(len(steps), int).tolist()),
    )
