"""A profile's figures from the kernels of a Kineto trace, matched with the operators that launched them."""

from fsdpbench.lab.calibrate.from_trace.fit import Figure, fit_trace
from fsdpbench.lab.calibrate.from_trace.samples import Samples, read_samples
