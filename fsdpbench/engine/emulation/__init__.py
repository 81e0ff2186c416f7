"""One real device as rank 0 of many: real kernels, streams and allocator, modelled collectives."""

from fsdpbench.engine.emulation.process_group import BACKEND, init_process_group

__all__ = ["BACKEND", "init_process_group"]
