"""Kineto traces of real devices: `torch.profiler`, written whole or not at all."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from torch.profiler import ProfilerActivity, profile, schedule

from fsdpbench.devices.base import Tracer
from fsdpbench.reports.writing import replacing

_SUFFIX = ".json.gz"


@contextmanager
def profile_steps(
    path: Path, steps: int, activities: Sequence[ProfilerActivity], *, memory: bool, shapes: bool
) -> Iterator[Tracer]:
    """Profile the next `steps` steps, each ended by `step()` of what is yielded, into `path` (`*.json.gz`).

    The profiler starts up before the first step, which it would slow down otherwise; if a step fails, nothing
    is written.
    """
    profiler = profile(
        activities=list(activities),
        schedule=schedule(wait=0, warmup=1, active=steps, repeat=1),
        profile_memory=memory,
        record_shapes=shapes,
    )
    with profiler:
        profiler.step()  # ends the empty warm-up: recording starts here
        yield profiler
    with replacing(path, _SUFFIX) as partial:  # the profiler compresses by the file's name
        profiler.export_chrome_trace(str(partial))
