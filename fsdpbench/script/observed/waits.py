"""Waits of a script's CPU: for the device at the script's own lines (`loss.item()`,
`torch.cuda.synchronize()`, a copy from unpinned memory), and for its data loaders.

FSDP (its rate limiter) and gradient scalers wait too: those waits are not the script's.
"""

import os
import sys
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import msgspec
import torch

from fsdpbench.base.result_sections import Place, Wait
from fsdpbench.base.torch_internals import (
    BaseDataLoaderIter,
    IterableDatasetFetcher,
    MapDatasetFetcher,
    tree_leaves,
)
from fsdpbench.script.interposing import around
from fsdpbench.script.own_files import OwnFiles
from fsdpbench.sim import Simulation
from fsdpbench.sim.torch_device.accelerator import DEVICE_TYPE
from fsdpbench.sim.torch_device.patches.dynamo import passing_to

_TORCHS_OWN = tuple(
    os.path.join(os.path.dirname(torch.__file__), of, "")
    for of in ("distributed/fsdp", "distributed/_composable", "distributed/checkpoint", "amp", "nn/parallel")
)
_LONGEST = 120
_MOST_CALLERS = 8
_Caller = tuple[CodeType, Place]
"""The code that was running, and the place of its call."""


@dataclass
class _WaitsOfLine:
    """The waits of one line: their number and duration (ns), by step."""

    counts: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    waited: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    copies_in: int = 0
    place: Place | None = None
    callers: tuple[_Caller, ...] = ()
    """Calls of the script's own that led to the line, innermost first."""


class Waits:
    """The waits for the device. Created when the simulation has started.

    Attributes: `step`: returns the number of steps that have ended; `skipped`: the CPU continues instead of
    waiting; `count`: the number of skipped waits.
    """

    def __init__(self, own_files: OwnFiles, simulation: Simulation) -> None:
        self._simulation = simulation
        self.step: Callable[[], int] = lambda: 0
        self.loop: CodeType | None = None
        """The script's code that calls the optimizer's step."""
        self.skipped = False
        self.count = 0
        self._inside = False
        self._own_files = own_files
        self._places: dict[tuple[str, int], _WaitsOfLine] = defaultdict(_WaitsOfLine)
        timeline: Any = simulation.accelerator.timeline
        timeline.wait_for = passing_to(self._following)(timeline.wait_for)
        device: Any = torch.get_device_module(DEVICE_TYPE)
        for module in (device, torch.cuda, torch.cuda.memory, torch.accelerator):
            for name in {"synchronize", "empty_cache"} & set(dir(module)):
                around(module, name, self._following)

    def _following(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        found = None if self._inside else self._line()
        if found is None:
            return original(*args, **kwargs)
        if self.skipped:
            self.count += 1
            return None
        before = self._simulation.cpu_ns()
        self._inside = True
        try:
            return original(*args, **kwargs)
        finally:
            self._inside = False
            frame, copies_in = found
            line = self._own_files.whole_name(frame.f_code.co_filename), frame.f_lineno
            waits, step = self._places[line], self.step()
            waits.counts[step] += 1
            waits.waited[step] += self._simulation.cpu_ns() - before
            waits.copies_in += copies_in
            if waits.place is None:
                waits.place, waits.callers = self._place(frame), self._callers(frame.f_back)

    def _line(self) -> tuple[FrameType, bool] | None:
        """Return the script's frame that waits, and whether it copies to the device; None for other waits."""
        copies_in = False
        for frame, _ in traceback.walk_stack(sys._getframe(2)):
            name = frame.f_code.co_filename
            if self._own_files.has(name):
                return frame, copies_in
            if name.startswith(_TORCHS_OWN):
                return None
            copies_in |= (
                frame.f_code.co_name == "copy_over_host_link" and frame.f_locals.get("kind") == "HtoD"
            )
        return None

    def _place(self, frame: FrameType) -> Place:
        place = self._own_files.place(frame)
        return msgspec.structs.replace(place, text=place.text[:_LONGEST])

    def _callers(self, frame: FrameType | None) -> tuple[_Caller, ...]:
        frames = [each for each, _ in traceback.walk_stack(frame)] if frame is not None else []
        own = [each for each in frames if self._own_files.has(each.f_code.co_filename)]
        return tuple((each.f_code, self._place(each)) for each in own[:_MOST_CALLERS])

    def reported(self, steps: int) -> list[Wait]:
        """Return the lines that wait in every step but the first of the `steps` that ended, longest waits
        first."""
        wanted = range(1, steps)
        found: list[Wait] = []
        for waits in self._places.values():
            if not wanted or waits.place is None or not all(waits.counts.get(step) for step in wanted):
                continue
            called = next((each for code, each in waits.callers if code is self.loop), None)
            line = Wait.at(
                waits.place,
                per_step=sum(waits.counts[step] for step in wanted) / len(wanted),
                waited_s_per_step=sum(waits.waited[step] for step in wanted) / len(wanted) / 1e9,
                copies=waits.copies_in > 0,
                called=called,
            )
            found.append(line)
        return sorted(found, key=lambda each: -each.waited_s_per_step)


_FILE = "loader_times"
_now = time.monotonic
_WAITED = Path("/proc/thread-self/schedstat")
_LEAST = 3
"""Fewest batches for which times are reported."""


class Loaders:
    """The real time that batches of `DataLoader`s take the host, in this process and in their workers.

    Workers are other processes; each writes the times of its batches to a file. Simulated time stops during
    loading, except for the script's own `time.sleep`, which advances both clocks.
    """

    def __init__(self, folder: Path, simulation: Simulation) -> None:
        self._simulation = simulation
        self.taken = 0
        """Number of batches that the script has taken."""
        self._ahead: dict[int, tuple[int, int]] = {}  # by dataset: bytes and workers
        self._file = folder.absolute() / _FILE
        self._pid = os.getpid()
        self._times: list[float] = []
        self._charged: list[float] = []
        for kind in (MapDatasetFetcher, IterableDatasetFetcher):
            around(kind, "fetch", self._fetching)
        around(BaseDataLoaderIter, "__next__", self._taking)

    def _fetching(self, original: Callable[..., Any], fetcher: Any, possibly_batched_index: Any) -> Any:
        began, waited = _now(), _waited_for_a_core()
        found = original(fetcher, possibly_batched_index)
        took = max(0.0, _now() - began - (_waited_for_a_core() - waited))
        if os.getpid() == self._pid:
            self._times.append(took)
        else:
            with self._file.open("a") as file:
                file.write(f"{took:.6f}\n")
        return found

    def _taking(self, original: Callable[..., Any], iterator: Any) -> Any:
        began = self._simulation.cpu_ns()
        found = original(iterator)
        self.taken += 1
        self._charged.append((self._simulation.cpu_ns() - began) / 1e9)
        if iterator._num_workers:
            leaves = tree_leaves(dict(found) if isinstance(found, Mapping) else found)
            nbytes = sum(each.nbytes for each in leaves if isinstance(each, torch.Tensor))
            held = iterator._num_workers * iterator._prefetch_factor * nbytes
            self._ahead[id(iterator._dataset)] = held, iterator._num_workers
        return found

    def held_ahead(self) -> tuple[int, int]:
        """Return the bytes of batches that workers hold before they are taken, and the number of workers."""
        return sum(held for held, _ in self._ahead.values()), sum(count for _, count in self._ahead.values())

    def to_dict(self, steps: int) -> dict[str, float] | None:
        """Return the `seconds` that a batch takes, `batches` per step, and `charged_s`, the seconds that the
        simulation counts already; None if there were too few batches."""
        times = self._times or self._read()
        if len(times) < _LEAST or not steps or not self.taken:
            return None
        usual = sorted(times[1:])
        # The lower quartile: on a busy machine other processes slow the rest.
        return {
            "seconds": usual[len(usual) // 4],
            "batches": self.taken / steps,
            "charged_s": sorted(self._charged)[len(self._charged) // 2],
        }

    def _read(self) -> list[float]:
        try:
            found = [float(line) for line in self._file.read_text().split()]
            self._file.unlink()
        except (OSError, ValueError):
            return []
        return found


def _waited_for_a_core() -> float:
    """Return the seconds that this thread waited for a core; 0 if Linux does not say."""
    try:
        return int(_WAITED.read_text().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0
