"""fsdpbench: run any FSDP configuration on GPUs, CPUs or simulated GPUs, and see what it costs."""

__version__ = "0.1.0"
