"""Where the script's own lines make the CPU wait for the device: `loss.item()`, `torch.cuda.synchronize()`,
a copy from memory that is not pinned.

FSDP waits too (its rate limiter), and so does a gradient scaler: those waits are not the script's.
"""

from __future__ import annotations

import functools
import os
import sys
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import Any

import torch

from fsdpbench.script.own_files import OwnFiles
from fsdpbench.sim import Simulation
from fsdpbench.sim.torch_device.accelerator import DEVICE_TYPE

_TORCHS_OWN = tuple(
    os.path.join(os.path.dirname(torch.__file__), *parts) + os.sep
    for parts in (
        ("distributed", "fsdp"),
        ("distributed", "_composable"),
        ("distributed", "checkpoint"),
        ("amp",),
        ("nn", "parallel"),
    )
)
_LONGEST = 120
_MOST_CALLERS = 8
_Caller = tuple[CodeType, dict[str, Any]]
"""The code that ran, and the place of its call."""


@dataclass
class _Place:
    """Waits of one line: how often and how long (ns), by step."""

    counts: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    waited: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    copies_in: int = 0
    text: dict[str, Any] = field(default_factory=dict)
    callers: tuple[_Caller, ...] = ()
    """Calls of the script's own that led there, the nearest first."""


class Waits:
    """Notes them; with ``skipped`` the CPU continues instead. Made when the simulation has started.

    ``step``: how many steps have ended. ``count``: waits that were skipped.
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
        self._places: dict[tuple[str, int], _Place] = defaultdict(_Place)
        timeline: Any = simulation.accelerator.timeline
        timeline.wait_for = self._following(timeline.wait_for)
        device: Any = torch.get_device_module(DEVICE_TYPE)
        for module in (device, torch.cuda, torch.cuda.memory, torch.accelerator):
            for name in {"synchronize", "empty_cache"} & set(dir(module)):
                setattr(module, name, self._following(getattr(module, name)))

    def _following(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def wait(*args: Any, **kwargs: Any) -> Any:
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
                place, step = self._places[line], self.step()
                place.counts[step] += 1
                place.waited[step] += self._simulation.cpu_ns() - before
                place.copies_in += copies_in
                if not place.text:
                    place.text, place.callers = self._place(frame), self._callers(frame.f_back)

        return wait

    def _line(self) -> tuple[FrameType, bool] | None:
        """The script's frame that waits, and whether it copies to the device; None where FSDP waits, or a
        library."""
        frame: FrameType | None = sys._getframe(2)
        copies_in = False
        while frame is not None:
            name = frame.f_code.co_filename
            if self._own_files.has(name):
                return frame, copies_in
            if name.startswith(_TORCHS_OWN):
                return None
            copies_in |= (
                frame.f_code.co_name == "copy_over_host_link" and frame.f_locals.get("kind") == "HtoD"
            )
            frame = frame.f_back
        return None

    def _place(self, frame: FrameType) -> dict[str, Any]:
        place = self._own_files.place(frame)
        return {**place, "text": place["text"][:_LONGEST]}

    def _callers(self, frame: FrameType | None) -> tuple[_Caller, ...]:
        found: list[_Caller] = []
        while frame is not None and len(found) < _MOST_CALLERS:
            if self._own_files.has(frame.f_code.co_filename):
                found.append((frame.f_code, self._place(frame)))
            frame = frame.f_back
        return tuple(found)

    def to_list(self, steps: int) -> list[dict[str, Any]]:
        """Lines that wait in every step but the first of the `steps` that ended, the longest waits first.

        `file`, `line`, its `text`, `per_step`, `waited_s_per_step`, whether it `copies` to the device, and
        from which line of the loop it is `called`, where it is in another function.
        """
        wanted = range(1, steps)
        found = []
        for place in self._places.values():
            if not wanted or not all(place.counts.get(step) for step in wanted):
                continue
            count = sum(place.counts[step] for step in wanted)
            found.append(
                {
                    **place.text,
                    "per_step": count / len(wanted),
                    "waited_s_per_step": sum(place.waited[step] for step in wanted) / len(wanted) / 1e9,
                    "copies": place.copies_in > 0,
                    # The line of the training loop, where what waits is in a function that it calls.
                    "called": next((each for code, each in place.callers if code is self.loop), None),
                }
            )
        return sorted(found, key=lambda each: -each["waited_s_per_step"])
