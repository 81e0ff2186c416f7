"""Finds the data races of stream code on the simulated device (`sanitizer.py`)."""

from fsdpbench.sim.sanitizer.reporting.findings import Finding, Kind
from fsdpbench.sim.sanitizer.sanitizer import Sanitizer

__all__ = ["Finding", "Kind", "Sanitizer"]
