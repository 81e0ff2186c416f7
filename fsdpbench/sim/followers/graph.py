"""Capturing a training step once it repeats itself, and replaying it from then on.

    warm-up: steps run as they are, watched, until one is legal and does what the step before did
    replay:  | batches into their static places | one launch |        and the CPU's clock stands

A replayed step is still executed: every kernel, copy, collective and wait comes to the device in its order,
all of them at the moment of the one launch. What the CPU would have decided by waiting (a rate limiter, a
query) no graph has; such steps are refused. A replay has to do, and to be given, exactly what the captured
step did and was given: every launch, and every address on the device. That buffers of the host stay where
they are is not checked.

Estimated: the price of the launch is that of one kernel's, as for compiled graphs; work inside a graph
follows each other no faster than outside of it; memory is that of the step as it runs by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from fsdpbench.sim.followers.graph_watch import Entry, WatchedStep
from fsdpbench.sim.model.observed import ObservedTimeline
from fsdpbench.sim.model.timeline import Timeline
from fsdpbench.sim.torch_device.accelerator import Accelerator

MOST_WARM_UPS = 8
"""Steps that may differ before the step is refused."""
_NO_LIMIT = 1 << 62
_ESTIMATE = "an estimate: no CUDA graph was captured; one launch is priced for the whole step"


class GraphCaptureError(RuntimeError):
    """A step that no CUDA graph can hold."""


class StandingTimeline(ObservedTimeline):
    """A timeline whose CPU stands: in a replay the CPU has launched once, and does nothing else."""

    @property
    def cpu(self) -> int:
        """The moment of the launch, in nanoseconds."""
        now: int = self.__dict__["cpu"]
        return now

    @cpu.setter
    def cpu(self, value: int) -> None:
        pass


class GraphSession:
    """The graph of one training loop, which takes `microbatches` batches a step."""

    def __init__(self, accelerator: Accelerator, microbatches: int) -> None:
        self._accelerator = accelerator
        self._microbatches = microbatches
        self._source: Iterator[tuple[torch.Tensor, ...]] = iter(())
        self._static: list[tuple[torch.Tensor, ...]] = []
        self._pool: int | None = None
        self._trail: list[Entry] | None = None
        self._watched = self._replays = self._kernels = self._streams = 0
        self.captured = False

    def feed(self, batches: Iterator[tuple[torch.Tensor, ...]]) -> Iterator[tuple[torch.Tensor, ...]]:
        """The batches of a loop, always in the same memory."""
        self._source = batches
        return self._again()

    def _again(self) -> Iterator[tuple[torch.Tensor, ...]]:
        while True:
            yield from self._static

    def run(self, step: Callable[[], object]) -> None:
        """Run one step. Raises `GraphCaptureError` where it can never be captured."""
        self._take_batches()
        accelerator = self._accelerator
        timeline, depth = accelerator.timeline, accelerator.timeline.queue_depth
        device, listener = accelerator.allocator.device, accelerator.allocator.device.call_listener
        watch = WatchedStep(accelerator.stream, self._trail)

        def on_call(call: str, start: int, end: int) -> None:
            watch.violate(f"{call} in a step that has warmed up")
            if listener is not None:
                listener(call, start, end)

        device.call_listener = on_call
        accelerator.follow(watch)
        if self.captured:
            self._launch(timeline)
            timeline.queue_depth = _NO_LIMIT
            timeline.__class__ = StandingTimeline
        try:
            step()
        finally:
            accelerator.stop_following(watch)  # its class is again what its observers need
            device.call_listener, timeline.queue_depth = listener, depth
        watch.finish()
        self._judge(watch)

    @property
    def replayed(self) -> bool:
        """Whether a step was replayed already."""
        return self._replays > 0

    def told(self) -> dict[str, Any]:
        """What the result says of it."""
        return {
            "captured": self.captured,
            "warm_up_steps": self._watched,
            "replays": self._replays,
            "launches": self._kernels,
            "streams": self._streams,
            "estimated": _ESTIMATE,
        }

    def _judge(self, watch: WatchedStep) -> None:
        wrong = watch.violation or watch.difference
        if self.captured:
            self._replays += 1
            if wrong is not None:
                raise GraphCaptureError(f"graph=step: a later step differs from the captured one: {wrong}")
            return
        self._watched += 1
        if watch.violation is None and self._trail is not None and watch.difference is None:
            self.captured = True
            self._kernels, self._streams = watch.kernels, watch.streams
        elif self._watched >= MOST_WARM_UPS:
            raise GraphCaptureError(f"graph=step: {watch.violation or f'steps differ: {watch.difference}'}")
        self._trail = watch.trail

    def _take_batches(self) -> None:
        """Load the step's batches into memory outside of the graph's pool, and copy them to where it reads
        them."""
        accelerator = self._accelerator
        if self._pool is None:
            self._pool = accelerator.timeline.add_stream()
        before, accelerator.graph_pool = accelerator.graph_pool, self._pool
        try:
            fresh = [next(self._source) for _ in range(self._microbatches)]
            if not self._static:
                self._static = [tuple(tensor.clone() for tensor in batch) for batch in fresh]
        finally:
            accelerator.graph_pool = before
        for static, batch in zip(self._static, fresh, strict=True):
            for place, tensor in zip(static, batch, strict=True):
                place.copy_(tensor)

    def _launch(self, timeline: Timeline) -> None:
        start = timeline.cpu
        timeline.cpu = start + self._accelerator.cpu_costs.launch_ns
        if self._accelerator.trace is not None:
            self._accelerator.trace.cpu_op("cudaGraphLaunch", start, timeline.cpu)
