"""Data races of stream code on the simulated device (`sanitizer.py`)."""

from fsdpbench.sim.followers.sanitizer.findings import Finding, Kind
from fsdpbench.sim.followers.sanitizer.sanitizer import Sanitizer
