"""Holders, by which a collective takes its modelled time on a real device.

On a GPU a kernel of one block spins on its stream until the time has passed by the GPU's own clock. It is
named as NCCL's kernels are, so that traces read alike; it leaves the other multiprocessors and the memory
alone, so that computation beside it is not slowed. On a CPU the wait for the collective sleeps.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed import Work
from torch.futures import Future

from fsdpbench.base.torch_internals import compile_cuda_kernel

_KERNEL = """
extern "C" __global__ void {name}(int nanoseconds) {{
    unsigned long long begin, now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(begin));
    do {{
        asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    }} while (now - begin < (unsigned long long) nanoseconds);
}}
"""
_KERNEL_NAMES = {
    "all_gather": "ncclDevKernel_AllGather_Emulated",
    "reduce_scatter": "ncclDevKernel_ReduceScatter_Emulated",
    "all_reduce": "ncclDevKernel_AllReduce_Emulated",
    "broadcast": "ncclDevKernel_Broadcast_Emulated",
    "all_to_all": "ncclDevKernel_SendRecv_Emulated",
    "barrier": "ncclDevKernel_AllReduce_Emulated",
}
_LONGEST_NS = 2_000_000_000
"""The longest wait of one launch: its argument is a C int."""


class GpuHolder:
    """A holder that queues on the current stream, or on the communicator's own; the CPU never waits."""

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream | None = None
        self._last: torch.cuda.Event | None = None
        self._kernels: dict[str, Any] = {}

    def run(
        self,
        kind: str,
        fill: Callable[[], object],
        duration_ns: int,
        tensors: Sequence[torch.Tensor],
        asynchronous: bool,
    ) -> Work:
        """Queue a collective: `fill` writes its outputs, the stream is held for `duration_ns`.

        Args:
            tensors: kept alive until an asynchronous work is waited for.
            asynchronous: on the communicator's own stream, not on the current one.
        """
        current = torch.cuda.current_stream()
        stream = self._own_stream() if asynchronous else current
        if stream != current:
            stream.wait_stream(current)
        if self._last is not None:
            stream.wait_event(self._last)
        with torch.cuda.stream(stream):
            fill()
            while duration_ns > 0:
                self._kernel(kind)((1, 1, 1), (1, 1, 1), [min(duration_ns, _LONGEST_NS)])
                duration_ns -= _LONGEST_NS
            done = torch.cuda.Event()
            done.record(stream)
        self._last = done
        return _GpuWork(stream, done, tensors, holds=asynchronous, blocks_cpu=kind == "barrier")

    def _own_stream(self) -> torch.cuda.Stream:
        if self._stream is None:
            self._stream = torch.cuda.Stream(priority=-1)
        return self._stream

    def _kernel(self, kind: str) -> Any:
        name = _KERNEL_NAMES[kind]
        if name not in self._kernels:
            self._kernels[name] = compile_cuda_kernel(_KERNEL.format(name=name), name)
        return self._kernels[name]


class _GpuWork(Work):
    """A work that keeps its tensors until it is waited for, as NCCL's do."""

    def __init__(
        self,
        stream: torch.cuda.Stream,
        done: torch.cuda.Event,
        tensors: Sequence[torch.Tensor],
        *,
        holds: bool,
        blocks_cpu: bool,
    ) -> None:
        super().__init__()
        self._stream = stream
        self._done = done
        self._tensors = tensors if holds else ()
        self._blocks_cpu = blocks_cpu

    def wait(self, timeout: Any = None) -> bool:
        """Make the current stream wait (a barrier holds the CPU)."""
        torch.cuda.current_stream().wait_event(self._done)
        if self._blocks_cpu:
            self._done.synchronize()
        self._tensors = ()
        return True

    def is_completed(self) -> bool:
        """Return whether the device has finished the collective."""
        return bool(self._done.query())

    def get_future(self) -> Future[list[torch.Tensor]]:
        """Return a future that is done; functions chained to it run on streams that wait for the
        collective."""
        future: Future[list[torch.Tensor]] = Future(devices=[torch.cuda.current_device()])
        with torch.cuda.stream(self._stream):
            future.set_result(list(self._tensors))
        return future


class CpuHolder:
    """A holder that writes outputs immediately; a wait for the work sleeps until the modelled end."""

    def __init__(self) -> None:
        self._free_at_ns = 0
        self._lock = threading.Lock()

    def run(
        self,
        kind: str,
        fill: Callable[[], object],
        duration_ns: int,
        tensors: Sequence[torch.Tensor],
        asynchronous: bool,
    ) -> Work:
        """Write the outputs by `fill`; the work ends `duration_ns` after the previous one's end."""
        fill()
        with self._lock:
            end = max(self._free_at_ns, time.perf_counter_ns()) + duration_ns
            self._free_at_ns = end
        work = _CpuWork(kind, end, tensors)
        if not asynchronous:
            work.wait()
        return work


class _CpuWork(Work):
    """A work that is done at a moment of the host's clock."""

    def __init__(self, kind: str, end_ns: int, tensors: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._kind = kind
        self._end_ns = end_ns
        self._tensors = tensors

    def wait(self, timeout: Any = None) -> bool:
        """Wait, asleep, until the modelled end."""
        left = self._end_ns - time.perf_counter_ns()
        if left > 0:
            with torch.profiler.record_function(f"emulated:{self._kind}"):
                time.sleep(left / 1e9)
        return True

    def is_completed(self) -> bool:
        """Return whether the modelled end has passed."""
        return time.perf_counter_ns() >= self._end_ns

    def get_future(self) -> Future[list[torch.Tensor]]:
        """Return a future that is done: the call itself waits for the modelled end."""
        self.wait()
        future: Future[list[torch.Tensor]] = Future()
        future.set_result(list(self._tensors))
        return future
