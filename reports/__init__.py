"""Trace reading, analysis and reports; needs no torch and works on anybody's traces."""

from reports.memory_curve import MemoryCurve, memory_curve
from reports.result_figures import result_figures

__all__ = ["MemoryCurve", "memory_curve", "result_figures"]
