"""`torch.profiler.profile` in a simulated script: it counts steps, and exports the bench's own trace.

torch's profiler would measure this process, in real time. The bench traces the simulated steps anyway; each
export of the script or its handler is a copy of that trace, written when the run ends.
"""

import gzip
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch.profiler
from torch.profiler import ProfilerAction

from fsdpbench.base.errors import error_text
from fsdpbench.script.cuda.refusals import Replacements

_HINT = error_text("profiling.trace_of_run")


class ProfilerRequests:
    """Requests of the script to its profilers: files to export to. `on_step` is called at each step."""

    def __init__(self) -> None:
        self.on_step: Callable[[], None] | None = None
        self._paths: list[Path] = []

    def export(self, path: str | Path) -> None:
        """Remember a file to copy the trace to."""
        self._paths.append(Path(path).absolute())

    def copy(self, trace: Path) -> None:
        """Copy ``trace`` (gzip) to all requested files, compressed if the file's name says so."""
        for path in dict.fromkeys(self._paths):
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.suffix == ".gz":
                shutil.copyfile(trace, path)
                continue
            with gzip.open(trace, "rb") as packed, path.open("wb") as plain:
                shutil.copyfileobj(packed, plain)


class _NoAverages(list[Any]):
    """`key_averages()`: empty, but it can be printed."""

    def table(self, *args: Any, **kwargs: Any) -> str:
        return _HINT

    def total_average(self) -> None:
        return None


class SimulatedProfile:
    """Replacement for `torch.profiler.profile`: same arguments, same schedule, no events of its own."""

    requests: ProfilerRequests

    def __init__(
        self,
        *,
        activities: Any = None,
        schedule: Callable[[int], ProfilerAction] | None = None,
        on_trace_ready: Callable[..., Any] | None = None,
        **others: Any,
    ) -> None:
        self.step_num = 0
        self.on_trace_ready = on_trace_ready
        self._schedule = schedule or (lambda step: ProfilerAction.RECORD)
        self.current_action = self._schedule(0)

    def __enter__(self) -> "SimulatedProfile":
        self.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()

    def start(self) -> None:
        """Begin."""

    def stop(self) -> None:
        """End; pass a recording in progress to `on_trace_ready`."""
        if self.current_action in (ProfilerAction.RECORD, ProfilerAction.RECORD_AND_SAVE):
            self._ready()

    def step(self) -> None:
        """End a step of the schedule."""
        ended = self.current_action
        self.step_num += 1
        self.current_action = self._schedule(self.step_num)
        if ended is ProfilerAction.RECORD_AND_SAVE:
            self._ready()
        if self.requests.on_step is not None:
            self.requests.on_step()

    def _ready(self) -> None:
        if self.on_trace_ready is not None:
            self.on_trace_ready(self)

    def export_chrome_trace(self, path: str, *args: Any, **kwargs: Any) -> None:
        """Request a copy of the bench's trace."""
        self.requests.export(path)

    def key_averages(self, *args: Any, **kwargs: Any) -> _NoAverages:
        """Return an empty list of averages, which prints a hint."""
        return _NoAverages()

    def events(self) -> Iterator[Any]:
        """Return no events."""
        return iter(())

    def _left_out(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing; called as the real profiler's method."""

    export_stacks = export_memory_timeline = add_metadata = add_metadata_json = _left_out
    preset_metadata_json = toggle_collection_dynamic = set_custom_trace_id_callback = _left_out


def map_profiler(replacements: Replacements) -> ProfilerRequests:
    """Replace the profiler; return the scripts' requests to it."""
    SimulatedProfile.requests = requests = ProfilerRequests()
    replacements.add(torch.profiler.profile, SimulatedProfile)
    return requests
