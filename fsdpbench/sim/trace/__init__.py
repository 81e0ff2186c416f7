"""The trace of a simulated rank, as Kineto JSON."""

from fsdpbench.sim.trace.recorder import TraceRecorder

__all__ = ["TraceRecorder"]
