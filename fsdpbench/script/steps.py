"""The steps of a script: their ends, which steps are warm-up, timed and traced, and the optimizers that end
them.

A step ends when the first optimizer that ever steps has stepped (or when the script's profiler steps). At the
end of a timed step a mark goes into the current stream's queue, like a CUDA event; a step takes the time
between two marks. Marks cost nothing and wait for nothing: the CPU runs ahead as without them.

    step      1         2         3        4        5           6          7
           |........|.........|<-- a -->|<-- b -->|<-- c -->|=sync= traced =sync= traced =sync=|  end
             build,   warm-up      timed: median(a, b, c)        times by kind, overlap
             warm-up

Traced steps begin and end with an idle device, so that each contains only its own work.
"""

import gc
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from fsdpbench.base.configuration.config import Measurement
from fsdpbench.base.result_sections import Place
from fsdpbench.engine.devices.base import StepMemory
from fsdpbench.script.interposing import around
from fsdpbench.script.own_files import OwnFiles
from fsdpbench.sim import SimulatedTrace, Simulation
from fsdpbench.sim.model.timeline import Marker
from fsdpbench.sim.torch_device.flops import Flops


class MeasuredAllError(BaseException):
    """The end of a measured script. Not an `Exception`, so that scripts do not catch it."""


class Steps:
    """The steps of a script: times in seconds, memory and FLOPs.

    Args:
        take_memory: returns peaks and counts since its last call.
        to_the_end: whether the script continues when all steps are measured.
    """

    def __init__(
        self,
        simulation: Simulation,
        measurement: Measurement,
        trace_path: Path,
        take_memory: Callable[[], StepMemory],
        *,
        to_the_end: bool,
    ) -> None:
        self.count = 0
        self.memory: list[StepMemory] = []
        self.flops: list[Flops] = []
        self.traced_times_s: list[float] = []
        self.trace_path = trace_path
        self._simulation = simulation
        self._accelerator = simulation.accelerator
        self._warmup = measurement.warmup_steps
        self._timed = measurement.timed_steps
        self._to_trace = measurement.traced_steps
        self._most_timed = max(measurement.most_timed_steps, measurement.timed_steps)
        self._take_memory = take_memory
        self._to_the_end = to_the_end
        self.slows_link = not to_the_end  # in one more step, for `RankRecord.step_work`
        self._stretches: list[list[Marker]] = [[]]  # a mark where each untraced step begins or ends
        self._trace: SimulatedTrace | None = None
        self._traced_until = 0
        self._done = False
        self._began: Marker | None = None
        self._first: tuple[StepMemory, Flops] | None = None
        self.work: dict[str, float] = {}  # RankRecord.step_work
        self._slow: list[Marker] = []

    def begin(self) -> None:
        """Note that training may begin now: an optimizer was created."""
        if not self.count:
            self._began = self._accelerator.timeline.record(self._accelerator.stream)

    def ended(self) -> None:
        """End a step.

        Raises:
            MeasuredAllError: everything is measured, and the script need not continue.
        """
        self.count += 1
        self._accelerator.python.end_step()
        self._collect_garbage()
        if not self._done:
            self._measure()
        self._accelerator.python.begin_step()

    def _measure(self) -> None:
        """Take the figures of the step that ends."""
        if self._slow:
            self._slow.append(self._accelerator.timeline.record(self._accelerator.stream))
        else:
            (self._end_timed_step if self._trace is None else self._end_traced_step)()
            self.work = self._simulation.take_launched()
        last = self.count >= self.wanted
        if last and not self._slow and self.slows_link and self._simulation.slow_host_link(self.work):
            self._slow = [self._accelerator.timeline.record(self._accelerator.stream)]
        elif last:
            self._done = True
            gc.enable()  # code after training may hold garbage too
            if not self._to_the_end:
                raise MeasuredAllError

    @property
    def retried(self) -> bool:
        """Return whether the allocator retried in a timed step: no step then predicts the next one."""
        return any(memory.alloc_retries for memory in self.memory)

    def _collect_garbage(self) -> None:
        """Collect garbage only at the ends of steps: the time when memory is freed must not be random."""
        gc.collect()
        if self.count == 1:
            gc.freeze()
            gc.disable()

    def _end_timed_step(self) -> None:
        self._mark()
        memory, flops = self._take_memory(), self._take_flops()
        self._first = self._first or (memory, flops)
        if self.count > self._warmup:
            self.memory.append(memory)
            self.flops.append(flops)
            if memory.alloc_retries:
                self._timed = self._most_timed
        if self.count == self._warmup + self._timed and self._to_trace:
            self.trace_path.parent.mkdir(parents=True, exist_ok=True)
            self._trace = self._simulation.trace(self.trace_path)
            self._trace.__enter__()
            self._traced_until = self._accelerator.timeline.cpu

    def _mark(self) -> None:
        self._stretches[-1].append(self._accelerator.timeline.record(self._accelerator.stream))

    def _take_flops(self) -> Flops:
        assert self._accelerator.flops is not None
        return self._accelerator.flops.take()

    def _end_traced_step(self) -> None:
        assert self._trace is not None
        self._simulation.drain()
        now = self._accelerator.timeline.cpu
        self.traced_times_s.append((now - self._traced_until) / 1e9)
        self._traced_until = now
        self._trace.step()
        if len(self.traced_times_s) == self._to_trace:
            self._close_trace()
            self._stretches.append([])
            self._mark()
            self._take_memory()
            self._take_flops()

    def finish(self) -> None:
        """Close the trace and let the device finish. The script has ended, maybe before all was measured."""
        self._accelerator.python.end_step()
        self._close_trace()
        self._accelerator.timeline.drain()
        for begin, end in pairwise(self._slow):
            self.work["slow_link_step"] = (end.time - begin.time) / 1e9
        if self.count == 1 and self._first is not None:
            self.memory, self.flops = [self._first[0]], [self._first[1]]

    def _close_trace(self) -> None:
        """Write the trace if it contains a whole step, else discard it."""
        trace, self._trace = self._trace, None
        if trace is not None:
            error = None if self.traced_times_s else MeasuredAllError()
            trace.__exit__(None if error is None else MeasuredAllError, error, None)

    @property
    def times_s(self) -> list[float]:
        """Return the times of all untraced steps but the first, which also builds the model."""
        return [
            (end.time - start.time) / 1e9 for stretch in self._stretches for start, end in pairwise(stretch)
        ]

    @property
    def warmup_times_s(self) -> list[float]:
        """Return the times of the steps before timing: all but the last, if the script made no more steps."""
        times = self.times_s
        return times[: min(self._warmup - 1, len(times) - 1)] if times else []

    @property
    def step_times_s(self) -> list[float]:
        """Return the times of the timed steps; for a single step, the time since its optimizer was made."""
        if self.count == 1 and self._began is not None:
            return [(self._stretches[0][0].time - self._began.time) / 1e9]
        return self.times_s[len(self.warmup_times_s) :]

    @property
    def wanted(self) -> int:
        """Return the number of steps to measure."""
        return self._warmup + self._timed + self._to_trace

    @property
    def notes(self) -> list[str]:
        """Return remarks about this measurement."""
        wanted, own = self.wanted, "the script's own profiler hid calls: their Python costs nothing"
        if self.count >= wanted:
            return [own] * self._accelerator.python.hidden
        if self.count == 1:
            return ["the script made one step: its first, which also allocates memory and builds its states; "
                    "Python between operators costs nothing in it"]  # fmt: skip
        missing = [] if self.traced_times_s else ["times by kind, communication and overlap"]
        if self.count <= self._warmup:
            missing += ["a step after the warm-up", "the time of Python between operators"]
        ended = f"the script ended after {self.count} steps; {wanted} are measured"
        return [f"{ended}: without {' and '.join(missing)}" if missing else ended]


MADE = "_sim_made"
"""The attribute of an optimizer that holds its `MadeOptimizer`."""


@dataclass
class MadeOptimizer:
    """An optimizer: its class, the place where it was created, and its steps."""

    name: str
    place: Place
    steps: int = 0

    def __str__(self) -> str:
        return f"{self.name} ({self.place.short or '?'})"


class Optimizers:
    """The optimizers that a script creates, recorded from before it starts.

    `on_step` is called when the first optimizer that ever steps has stepped, which ends the script's step.
    """

    def __init__(self, own_files: OwnFiles) -> None:
        self.on_step: Callable[[], None] | None = None
        self.on_made: Callable[[], None] = lambda: None
        self._own_files = own_files
        self._made: list[MadeOptimizer] = []
        self._leading: torch.optim.Optimizer | None = None
        register_optimizer_step_post_hook(self._stepped)
        around(torch.optim.Optimizer, "__init__", self._making)

    def _making(self, original: Callable[..., Any], optimizer: Any, *args: Any, **kwargs: Any) -> None:
        original(optimizer, *args, **kwargs)
        made = MadeOptimizer(type(optimizer).__name__, self._own_files.place(self._own_files.innermost()))
        self._made.append(made)
        setattr(optimizer, MADE, made)
        self.on_made()

    def _stepped(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        made = getattr(optimizer, MADE, None)
        if made is not None:
            made.steps += 1
        if self._leading is None:
            self._leading = optimizer
        if self._leading is optimizer and self.on_step is not None:
            self.on_step()

    def without_steps(self) -> list[str]:
        """Return sentences about the optimizers whose `step()` was never called."""
        if not self._made:
            return ["it made no optimizer of torch.optim"]
        idle = [str(made) for made in self._made if not made.steps]
        return [f"step() of {' and '.join(idle)} was never called"] if idle else []
