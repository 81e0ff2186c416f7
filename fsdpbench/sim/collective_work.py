"""The handle of a collective, and what the trace says of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch.distributed import Work
from torch.futures import Future

from fsdpbench.sim.accelerator import ACCELERATOR
from fsdpbench.sim.timeline import Marker
from fsdpbench.torch_internals import current_graph_task_id, queue_callback

if TYPE_CHECKING:
    from fsdpbench.sim.trace import TraceRecorder

# How torch writes dtypes in the metadata of a collective.
_TRACE_DTYPES = {
    torch.float32: "Float",
    torch.bfloat16: "BFloat16",
    torch.float16: "Half",
    torch.float64: "Double",
    torch.int64: "Long",
    torch.int32: "Int",
    torch.uint8: "Byte",
    torch.int8: "Char",
    torch.bool: "Bool",
}


class Communicator(Protocol):
    """What the trace says of a process group."""

    @property
    def group_name(self) -> str: ...

    @property
    def group_desc(self) -> str: ...

    @property
    def ranks(self) -> Sequence[int]: ...


class CollectiveWork(Work):
    """Handle of a collective."""

    def __init__(
        self, marker: Marker | None, tensors: Sequence[torch.Tensor], *, blocks_cpu: bool = False
    ) -> None:
        super().__init__()
        self.marker = marker
        self.tensors: Sequence[torch.Tensor] = tensors
        self._results = list(tensors)
        self._blocks_cpu = blocks_cpu

    def wait(self, timeout: Any = None) -> bool:
        """Make the current stream wait for the collective (a barrier blocks the CPU)."""
        if self.marker is not None:
            timeline = ACCELERATOR.timeline
            timeline.cpu += ACCELERATOR.cpu_costs.event_ns
            timeline.make_wait(ACCELERATOR.stream, self.marker)
            if self._blocks_cpu:
                timeline.wait_for(self.marker)
        self.tensors = ()
        self._results = []
        return True

    def synchronize(self) -> None:
        """As `wait`."""
        self.wait()

    def is_completed(self) -> bool:
        """Whether the device has done it."""
        return self.marker is None or ACCELERATOR.timeline.has_passed(self.marker)

    def is_success(self) -> bool:
        """Simulated collectives do not fail."""
        return True

    def exception(self) -> None:
        """Simulated collectives do not fail."""

    def result(self) -> list[torch.Tensor]:
        """The output tensors."""
        return self._results

    def get_future(self) -> Future[list[torch.Tensor]]:
        """A future that is done already; the current stream waits for the collective at the end of backward.

        That is what DDP needs, which chains its copies to the future and waits for all of them in the end.
        """
        future: Future[list[torch.Tensor]] = Future()
        future.set_result(self._results)
        if self.marker is not None:
            JOIN_AFTER_BACKWARD.add(self)
        return future


class _JoinAfterBackward:
    """Works whose futures were taken: waited for by one callback at the end of the running backward."""

    def __init__(self) -> None:
        self._works: list[CollectiveWork] = []
        self._backward = -1

    def add(self, work: CollectiveWork) -> None:
        """Wait for a work at the end of backward, or now if none runs."""
        backward = current_graph_task_id()
        if backward == -1:
            work.wait()
            return
        if backward != self._backward:  # also after a backward that ended in an error, without its callback
            self._backward = backward
            self._works = []
            queue_callback(self._join)
        self._works.append(work)

    def _join(self) -> None:
        works, self._works = self._works, []
        self._backward = -1
        for work in works:
            work.wait()


JOIN_AFTER_BACKWARD = _JoinAfterBackward()


class CollectiveRecord:
    """What the trace says of a collective."""

    __slots__ = ("dtype", "group", "in_elems", "kind", "launch_end_ns", "launch_start_ns", "out_elems")

    def __init__(
        self,
        group: Communicator,
        kind: str,
        inputs: list[torch.Tensor],
        outputs: list[torch.Tensor],
        launch_start_ns: int,
        launch_end_ns: int,
    ) -> None:
        self.group = group
        self.kind = kind
        self.in_elems = sum(tensor.numel() for tensor in inputs)
        self.out_elems = sum(tensor.numel() for tensor in outputs)
        self.dtype = _TRACE_DTYPES.get(outputs[0].dtype, "Byte") if outputs else "Float"
        self.launch_start_ns = launch_start_ns
        self.launch_end_ns = launch_end_ns

    def write(self, trace: TraceRecorder, stream: int, start_ns: int, end_ns: int) -> None:
        """Add the collective to a trace, now that its times are known."""
        trace.nccl_kernel(
            self.kind,
            stream,
            self.launch_start_ns,
            self.launch_end_ns,
            start_ns,
            end_ns,
            in_elems=self.in_elems,
            out_elems=self.out_elems,
            dtype=self.dtype,
            group_size=len(self.group.ranks),
            group_name=self.group.group_name,
            group_description=self.group.group_desc,
            group_ranks=self.group.ranks,
        )
