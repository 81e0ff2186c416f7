"""Handles of collectives: `Work` objects and their futures."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed import Work
from torch.futures import Future

from fsdpbench.base.torch_internals import current_graph_task_id, queue_callback
from fsdpbench.sim.model.timeline import Marker, Timeline
from fsdpbench.sim.torch_device.accelerator import Accelerator


class CollectiveWork(Work):
    """Handle of a collective."""

    def __init__(
        self,
        accelerator: Accelerator,
        marker: Marker | None,
        tensors: Sequence[torch.Tensor],
        *,
        blocks_cpu: bool = False,
    ) -> None:
        super().__init__()
        self._accelerator = accelerator
        self.marker = marker
        self.held = list(tensors)
        self.results = list(tensors)
        self._blocks_cpu = blocks_cpu
        self.before_wait: Callable[[], None] | None = None

    def wait(self, timeout: Any = None) -> bool:
        """Make the current stream wait for the collective (a barrier also blocks the CPU)."""
        before, self.before_wait = self.before_wait, None
        if before is not None:
            before()
        if self.marker is not None:
            timeline = self._accelerator.timeline
            timeline.cpu += self._accelerator.cpu_costs.event_ns
            timeline.make_wait(self._accelerator.stream, self.marker)
            if self._blocks_cpu:
                timeline.wait_for(self.marker)
        self.held.clear()
        self.results = []
        return True

    def synchronize(self) -> None:
        """Do the same as `wait`."""
        self.wait()

    def is_completed(self) -> bool:
        """Return whether the device has completed the collective."""
        return self.marker is None or self._accelerator.timeline.has_passed(self.marker)

    def result(self) -> list[torch.Tensor]:
        """Return the output tensors."""
        return self.results

    def get_future(self) -> Future[list[torch.Tensor]]:
        """Return a completed future, like NCCL: waiting for it makes the current stream wait."""
        return CollectiveFuture(self._accelerator, self.marker, self.results)


class CollectiveFuture(Future[Any]):
    """Future of device work: completed from the start; `marker` determines when its value is ready.

    As with NCCL, `wait` makes the current stream wait, and callbacks run on their own stream after the work.
    DDP passes futures to C++ code that waits on no stream, so all futures taken in backward are joined at its
    end, before DDP copies the reduced gradients.
    """

    def __init__(self, accelerator: Accelerator, marker: Marker | None, value: Any) -> None:
        super().__init__()
        self._accelerator = accelerator
        self._marker = marker
        self.set_result(value)
        if marker is not None and current_graph_task_id() != -1:
            JOIN_AFTER_BACKWARD.add(self)

    def wait(self) -> Any:
        """Make the current stream wait until the value is ready, and return it."""
        self.join()
        return super().wait()

    def join(self) -> None:
        """Make the current stream wait until the value is ready."""
        if self._marker is not None:
            timeline = self._accelerator.timeline
            timeline.cpu += self._accelerator.cpu_costs.event_ns
            timeline.make_wait(self._accelerator.stream, self._marker)

    def then(self, callback: Any) -> Any:
        """Run `callback(self)` after the work, on its own stream; return its result as a future."""
        if self._marker is None:
            return super().then(callback)
        accelerator = self._accelerator
        timeline, before = accelerator.timeline, accelerator.stream
        accelerator.stream = JOIN_AFTER_BACKWARD.callback_stream(timeline)
        try:
            self.join()
            value = callback(self)
            return CollectiveFuture(accelerator, timeline.record(accelerator.stream), value)
        finally:
            accelerator.stream = before

    def add_done_callback(self, callback: Any) -> None:
        """Run `callback(self)` after the work."""
        self.then(callback)


class _JoinAfterBackward:
    """Futures created in backward, for which one callback at its end waits."""

    def __init__(self) -> None:
        self._works: list[CollectiveFuture] = []
        self._backward = -1
        self._callbacks: tuple[Any, int] | None = None

    def callback_stream(self, timeline: Timeline) -> int:
        """Return the stream for callbacks (CUDA takes one from its pool)."""
        if self._callbacks is None or self._callbacks[0] is not timeline:
            self._callbacks = (timeline, timeline.add_stream())
        return self._callbacks[1]

    def add(self, work: CollectiveFuture) -> None:
        """Wait for a future at the end of the current backward."""
        backward = current_graph_task_id()
        if backward != self._backward:  # also if the last backward raised, so that its callback never ran
            self._backward = backward
            self._works = []
            queue_callback(self._join)
        self._works.append(work)

    def _join(self) -> None:
        works, self._works = self._works, []
        self._backward = -1
        for work in works:
            work.join()


JOIN_AFTER_BACKWARD = _JoinAfterBackward()
