"""The Kineto trace of a simulated rank (signatures; writing follows)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fsdpbench.sim.hardware import HardwareProfile


class TraceRecorder:
    """Collects events of one rank in simulated nanoseconds and writes them as Kineto JSON.

    All ``*_ns`` are integer nanoseconds of the simulated clock. ``stream`` numbers are CUDA's as Kineto shows
    them. Calls only append; order does not matter.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        profile: HardwareProfile,
        process_groups: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        raise NotImplementedError

    def cpu_op(
        self, name: str, start_ns: int, end_ns: int, input_shapes: Sequence[Sequence[int]] | None = None
    ) -> None:
        """An operator on the main CPU thread."""

    def annotation(self, name: str, start_ns: int, end_ns: int) -> None:
        """A span of ``torch.profiler.record_function`` on the main CPU thread."""

    def step(self, index: int, start_ns: int, end_ns: int) -> None:
        """``ProfilerStep#index``."""

    def kernel(
        self,
        name: str,
        stream: int,
        launch_start_ns: int,
        launch_end_ns: int,
        start_ns: int,
        end_ns: int,
        args: Mapping[str, Any] | None = None,
    ) -> int:
        """A kernel with its launch and the flow between them; returns the correlation id."""
        raise NotImplementedError

    def nccl_kernel(
        self,
        kind: str,
        stream: int,
        launch_start_ns: int,
        launch_end_ns: int,
        start_ns: int,
        end_ns: int,
        *,
        in_elems: int,
        out_elems: int,
        dtype: str,
        group_size: int,
        group_name: str,
        group_ranks: Sequence[int] = (),
        reduce_op: str = "Sum",
    ) -> int:
        """A collective's kernel (kind as in `Network.collective_ns`, dtype in torch's words: BFloat16, Float)."""
        raise NotImplementedError

    def memcpy(
        self,
        kind: str,
        stream: int,
        launch_start_ns: int,
        launch_end_ns: int,
        start_ns: int,
        end_ns: int,
        nbytes: int,
    ) -> int:
        """A copy; kind is HtoD, DtoH or DtoD."""
        raise NotImplementedError

    def memset(
        self, stream: int, launch_start_ns: int, launch_end_ns: int, start_ns: int, end_ns: int, nbytes: int
    ) -> int:
        """A fill with zeros."""
        raise NotImplementedError

    def event_record(self, stream: int, event_id: int, start_ns: int, end_ns: int) -> int:
        """cudaEventRecord on the CPU; returns the correlation id that waits refer to."""
        raise NotImplementedError

    def stream_wait_event(
        self,
        stream: int,
        event_id: int,
        record_stream: int,
        record_correlation: int,
        start_ns: int,
        end_ns: int,
        wait_start_ns: int,
        wait_end_ns: int,
    ) -> None:
        """cudaStreamWaitEvent on the CPU, and the wait on the stream (wait_*_ns) behind the event's record."""

    def event_synchronize(
        self, event_id: int, record_stream: int, record_correlation: int, start_ns: int, end_ns: int
    ) -> None:
        """The CPU waits for an event."""

    def stream_synchronize(self, stream: int, start_ns: int, end_ns: int) -> None:
        """The CPU waits for a stream."""

    def device_synchronize(self, start_ns: int, end_ns: int) -> None:
        """The CPU waits for all streams."""

    def runtime(self, name: str, start_ns: int, end_ns: int) -> None:
        """Another runtime call on the CPU: cudaMalloc, cudaFree, cudaEventQuery."""

    def memory(self, address: int, nbytes: int, allocated: int, reserved: int, time_ns: int) -> None:
        """Memory given out (``nbytes`` positive) or given back (negative), with the totals after it."""

    def alloc_retry(self, nbytes: int, freed: int, time_ns: int) -> None:
        """The allocator gave its cache back and tried again."""

    def write(self, path: Path | str) -> Path:
        """Write ``path`` (gzip) and return it."""
        raise NotImplementedError
