"""Sanitizer for data races between streams of the simulated device (`sanitizer.py`)."""

from fsdpbench.sim.followers.sanitizer.findings import Finding, Kind
from fsdpbench.sim.followers.sanitizer.sanitizer import Sanitizer
