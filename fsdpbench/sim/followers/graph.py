"""Capture of a training step as a CUDA graph once the step repeats itself, and replay from then on.

    warm-up: steps run normally and are observed, until one is legal and equals the step before
    replay:  | copy batches to their static addresses | one launch |     the CPU's clock does not advance

A replayed step still executes: every kernel, copy, collective and wait reaches the device in order, all at
the time of the one launch. A graph cannot hold decisions of a CPU that waits for the device (a rate limiter,
a query); such steps are refused. Every launch and device address of a replay must equal those of the captured
step. Addresses of host buffers are not checked.

Estimates: a graph launch costs as much as one kernel launch, as for compiled graphs; kernels in a graph
follow each other no faster than outside; memory is that of the step without a graph.
"""

import sys
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import torch

from fsdpbench.base.errors import error_text
from fsdpbench.base.files.documents import table_beside
from fsdpbench.sim.followers.sanitizer.findings import frames
from fsdpbench.sim.followers.sanitizer.shadow import Stacks
from fsdpbench.sim.model.allocator.types import Block
from fsdpbench.sim.model.observed import ObservedTimeline, Observer
from fsdpbench.sim.model.timeline import Marker, Work
from fsdpbench.sim.torch_device.accelerator import Accelerator

MOST_WARM_UPS = 8
"""Warm-up steps that may differ before fsdpbench refuses the step."""
_NO_LIMIT = 1 << 62
_ESTIMATE = "an estimate: no CUDA graph was captured; one launch is priced for the whole step"


class GraphCaptureError(RuntimeError):
    """The step cannot be captured in a CUDA graph."""


class StandingTimeline(ObservedTimeline):
    """A timeline whose CPU clock does not advance, because a replay is one launch."""

    @property
    def cpu(self) -> int:
        """Return the moment of the launch, in nanoseconds."""
        now: int = self.__dict__["cpu"]
        return now

    @cpu.setter
    def cpu(self, value: int) -> None:
        pass


class GraphSession:
    """The CUDA graph of one training loop with `microbatches` batches per step."""

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
        """Yield the batches of a loop, always in the same memory."""
        self._source = batches
        return self._again()

    def _again(self) -> Iterator[tuple[torch.Tensor, ...]]:
        while True:
            yield from self._static

    def run(self, step: Callable[[], object]) -> None:
        """Run one step. Raises `GraphCaptureError` if the step cannot be captured."""
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
            accelerator.launch_graph()
            timeline.queue_depth = _NO_LIMIT
            timeline.__class__ = StandingTimeline
        try:
            step()
        finally:
            accelerator.stop_following(watch)  # the observers' class again
            device.call_listener, timeline.queue_depth = listener, depth
        watch.finish()
        self._judge(watch)

    @property
    def replayed(self) -> bool:
        """Return whether any step has been replayed."""
        return self._replays > 0

    def to_dict(self) -> dict[str, object]:
        """Return this graph's entry of `result.json`."""
        return {
            "captured": self.captured,
            "warm_up_steps": self._watched,
            "replays": self._replays,
            "launches": self._kernels,
            "streams": self._streams,
            "estimated": _ESTIMATE,
        }

    def _judge(self, watch: "WatchedStep") -> None:
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
        """Load the step's batches outside the graph's pool; copy them to the addresses that it reads."""
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


Entry = tuple[Any, ...]

_ASKED_BY = table_beside(__file__, "names.toml")["asked_by"]
_SYNCHRONISES = "a synchronisation"


class WatchedStep(Observer):
    """Observer of one step: records its operations in order, and finds those that a CUDA graph cannot hold.

    The rules of stream capture (CUDA programming guide, "Creating a Graph Using Stream Capture") and of
    torch's allocator during one:

    - the CPU never waits for or queries the device: no `.item()`, synchronization, query, or copy of unpinned
    memory (cudaErrorStreamCaptureUnsupported);
    - no stream waits for an event from before the step (cudaErrorStreamCaptureIsolation); every stream with
    work first waits for the step's own stream, which waits for all of them at the end
    (cudaErrorStreamCaptureUnjoined);
    - no cudaMalloc, no cudaFree: a step that repeats itself needs neither;
    - no `record_stream` on memory that is then freed: the allocator frees it only after the capture
    (`needs_events_deferred_until_no_capture`), so the step would need more memory than simulated here.

    `origin`: the stream on which the step starts. `expected`: the operations of the previous step;
    `difference` describes the first operation that differs.
    """

    def __init__(self, origin: int, expected: list[Entry] | None) -> None:
        self._origin = origin
        self._expected = expected
        self._markers: dict[int, tuple[Marker, dict[int, int]]] = {}
        self._orders: dict[int, dict[int, int]] = {origin: {}}
        self._work: dict[int, int] = {}
        self.trail: list[Entry] = []
        self.difference: str | None = None
        self.violation: str | None = None

    @property
    def kernels(self) -> int:
        """Return the number of launches in this step."""
        return sum(self._work.values())

    @property
    def streams(self) -> int:
        """Return the number of streams that have work."""
        return len(self._work)

    def finish(self) -> None:
        """End the step: its own stream must have waited for all other streams."""
        reached = self._orders[self._origin]
        for stream, count in self._work.items():
            if stream != self._origin and reached.get(stream, 0) < count:
                self.violate(f"work on stream {stream} is not awaited when the step ends")
        if self._expected is not None and len(self.trail) < len(self._expected):
            self.difference = self.difference or "it ends earlier than the step before"

    def violate(self, what: str) -> None:
        """Record the first violation of the rules of capture, with its place in the program."""
        if self.violation is None:
            self.violation = f"{what}, at {_place()}"

    def note(self, entry: Entry, what: Callable[[], str]) -> None:
        """Append the next operation and compare it with the previous step; `what` describes it."""
        expected, index = self._expected, len(self.trail)
        self.trail.append(entry)
        if expected is None or self.difference is not None:
            return
        if index >= len(expected) or expected[index] != entry:
            self.difference = f"{what()}, at {_place()}"

    def launches(self, stream: int, work: Work, duration_ns: int, traffic: int) -> None:
        """Note a launch on `stream`, which must have waited for the step's own stream."""
        self.note(("launch", stream, work, duration_ns), lambda: f"other work is launched on stream {stream}")
        if stream not in self._orders:
            self.violate(f"stream {stream} works without having followed the step's own stream")
            self._orders[stream] = {}
        count = self._work[stream] = self._work.get(stream, 0) + 1
        self._orders[stream][stream] = count

    def recorded(self, stream: int, marker: Marker) -> None:
        self._markers[id(marker)] = (marker, dict(self._orders.get(stream, {})))

    def stream_waits(self, stream: int, marker: Marker, *, by_program: bool) -> None:
        if not by_program:
            return
        found = self._markers.get(id(marker))
        if found is None:
            self.violate(f"stream {stream} waits for an event from before the step")
            return
        order = self._orders.setdefault(stream, {})
        for other, count in found[1].items():
            order[other] = max(order.get(other, 0), count)

    def asked(self, marker: Marker, passed: bool) -> None:
        self.violate(f"the CPU asks the device: {_asked()}")

    def host_waits(self, marker: Marker) -> None:
        self.violate(f"the CPU waits for the device: {_asked()}")

    def host_waits_for_all(self, *, by_program: bool) -> None:
        if by_program:
            self.violate(f"the CPU waits for the device: {_asked()}")

    def allocated(self, block: Block) -> None:
        self.note((block.address, block.size), lambda: f"{block.size} bytes are at another address")

    def used_on(self, block: Block, stream: int) -> None:
        if stream != block.stream:
            self.violate(error_text("graph.record_stream"))


def _place() -> str:
    found = frames(Stacks().here(2))
    return found[0] if found else "a place without Python"


def _asked() -> str:
    """Return the device function by which the CPU queries or waits."""
    for frame, _ in traceback.walk_stack(sys._getframe(2)):
        name = frame.f_code.co_qualname
        found = _ASKED_BY.get(name) or _ASKED_BY.get(name.partition(".<locals>")[0])
        if found is not None:
            return found
    return _SYNCHRONISES
