"""Real devices, with `torch.profiler`.

    CPUs   one process per rank, gloo, wall-clock time
    GPUs   one GPU per rank, NCCL, CUDA events, statistics of the caching allocator

A barrier starts each timed step on all ranks, and all report the slowest rank's time. Both are collectives,
so neither runs while tracing: a trace must contain only the training's own communication.
"""

import gc
import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, schedule

from fsdpbench.base.configuration.config import Config
from fsdpbench.base.configuration.simulated_cuda import VARIABLE, simulated_cuda
from fsdpbench.base.errors import BenchError, error_text
from fsdpbench.base.reading import JsonObject
from fsdpbench.base.torch_internals import cuda_attach_out_of_memory_observer
from fsdpbench.base.writing import replacing
from fsdpbench.engine.devices.base import AllocatorReadings, Placement, StepMemory, Tracer
from fsdpbench.engine.devices.detection import peak_flops_of
from fsdpbench.engine.measuring.soak import TrainingLoop
from fsdpbench.engine.measuring.warmup import is_stable
from fsdpbench.engine.results.provenance import machine
from fsdpbench.sim.model.chips import peaks_source

COLLECTIVE_GRACE_S = 60.0
"""Seconds by which collectives outlast the configuration's own timeout, which should end the run first."""


class RealDevice:
    """The common part of `CpuDevice` and `CudaDevice`: the process group and the profiler's trace."""

    tracing_is_free = False

    def __init__(self, config: Config, placement: Placement, device: torch.device) -> None:
        self.torch_device = device
        self._config = config
        self._placement = placement
        self._tracing = False

    def close(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()

    def has_settled(self, times_s: Sequence[float]) -> bool:
        return is_stable(times_s)

    def trainer(self, model: torch.nn.Module) -> Callable[[], AbstractContextManager[object]]:
        return nullcontext

    def capture(self, loop: TrainingLoop) -> None:
        """Do nothing: real devices do not capture steps in a graph."""

    def memory_traffic(self, steps: int) -> None:
        return None

    def loss_value(self, loss: torch.Tensor) -> float | None:
        return float(loss.item())

    def trace(self, path: Path) -> AbstractContextManager[Tracer]:
        return self._traced(path)

    @contextmanager
    def _traced(self, path: Path) -> Iterator[Tracer]:
        self._wait_for_all()
        self._tracing = True
        try:
            with profile_steps(path, self._config.measurement.traced_steps, self.torch_device) as tracer:
                yield tracer
        finally:
            self._tracing = False

    def _wait_for_all(self) -> None:
        dist.barrier()

    def _join(self, backend: str, device: torch.device | None = None) -> None:
        """Initialize the default process group of all ranks."""
        dist.init_process_group(
            backend,
            rank=self._placement.rank,
            world_size=self._placement.world_size,
            timeout=timedelta(seconds=self._config.measurement.timeout_s + COLLECTIVE_GRACE_S),
            device_id=device,
        )


class CpuDevice(RealDevice):
    """A `Device` on the CPU of this process. Memory is unknown, because there is no caching allocator."""

    name = "cpu"

    def __init__(self, config: Config, placement: Placement) -> None:
        super().__init__(config, placement, torch.device("cpu"))

    def open(self) -> None:
        """Raise `torch.distributed.DistError` if the other ranks cannot be reached."""
        # One thread per rank: ranks share the cores, and sums of one thread are reproducible.
        torch.set_num_threads(1)
        _prefer_loopback()
        self._join("gloo")

    def settle(self) -> None:
        gc.collect()
        gc.freeze()

    def timed_step(self, step: Callable[[], object]) -> float:
        if self._tracing:
            return _duration(step)
        self._wait_for_all()
        mine = torch.tensor([_duration(step)], dtype=torch.float64)
        dist.all_reduce(mine, op=dist.ReduceOp.MAX)
        return float(mine.item())

    def take_memory(self) -> StepMemory | None:
        return None

    def on_out_of_memory(self, report: Callable[[str], None]) -> None:
        """Do nothing: a failed allocation raises directly, and the launcher recognizes its message."""

    def peak_flops(self, compute_type: str) -> float | None:
        return None

    def describe(self) -> JsonObject:
        found = machine()
        name, source = found["processor"] or "CPU", "measured on this machine"
        return {"name": name, "simulated": False, "source": source, "cores": found["cores"]}


def _duration(step: Callable[[], object]) -> float:
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def _prefer_loopback() -> None:
    """Let gloo use the loopback interface if all ranks are on one machine, whose name may not resolve."""
    all_here = os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE", "")
    if all_here and "lo" in {name for _, name in socket.if_nameindex()}:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")


_SUFFIX = ".json.gz"


@contextmanager
def profile_steps(path: Path, steps: int, device: torch.device) -> Iterator[Tracer]:
    """Profile the next `steps` steps into `path` (`*.json.gz`); call `step()` of the result after each.

    The profiler starts before the first step, so that its startup does not slow that step down. If a step
    fails, nothing is written.
    """
    on_gpu = device.type == "cuda"
    profiler = profile(
        activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])],
        schedule=schedule(wait=0, warmup=1, active=steps, repeat=1),
        profile_memory=on_gpu,
        record_shapes=True,  # for `calibrate --from-trace`, FLOPs, and sizes of gloo's collectives
    )
    with profiler:
        profiler.step()  # ends the empty warm-up: recording starts here
        yield profiler
    with replacing(path, _SUFFIX) as partial:  # the profiler compresses by the file's name
        profiler.export_chrome_trace(str(partial))


class CudaDevice(RealDevice):
    """A `Device` on the GPU of this process's local rank.

    As on `cpu`, a barrier starts each timed step and all ranks report the slowest rank's time.
    """

    name = "cuda"

    def __init__(self, config: Config, placement: Placement) -> None:
        super().__init__(config, placement, torch.device("cuda", placement.local_rank))
        self._slowest: torch.Tensor | None = None
        self._report_out_of_memory: Callable[[str], None] | None = None
        self._readings = AllocatorReadings()

    def open(self) -> None:
        """Raise `BenchError` if this machine has no GPU for the local rank."""
        visible, place = torch.cuda.device_count(), self._placement
        if place.local_rank >= visible:
            raise BenchError(error_text("real.no_gpu", place.rank, place.local_rank, visible))
        torch.cuda.set_device(self.torch_device)
        self._observe_allocator()
        self._join("cpu:gloo,cuda:nccl", self.torch_device)
        self._slowest = torch.zeros(1, dtype=torch.float64, device=self.torch_device)

    def settle(self) -> None:
        gc.collect()
        gc.freeze()
        torch.cuda.synchronize(self.torch_device)
        torch.cuda.empty_cache()
        self.take_memory()

    def timed_step(self, step: Callable[[], object]) -> float:
        if self._tracing:
            return self._duration(step)
        self._wait_for_all()
        return self._maximum(self._duration(step))

    def take_memory(self) -> StepMemory | None:
        taken = self._readings.since_last(torch.cuda.memory_stats(self.torch_device))
        torch.cuda.reset_peak_memory_stats(self.torch_device)
        return taken

    def on_out_of_memory(self, report: Callable[[str], None]) -> None:
        self._report_out_of_memory = report

    def peak_flops(self, compute_type: str) -> float | None:
        return peak_flops_of(torch.cuda.get_device_name(self.torch_device), compute_type)

    def describe(self) -> JsonObject:
        properties = torch.cuda.get_device_properties(self.torch_device)
        rehearsed = simulated_cuda()
        source = "measured on this machine"
        if rehearsed is not None:
            source = f"run on a simulated {rehearsed.profile} ({VARIABLE}), not measured"
        return {
            "name": properties.name,
            "simulated": rehearsed is not None,
            "source": source,
            "memory_bytes": properties.total_memory,
            "peaks": peaks_source(properties.name),
            "cuda": torch.version.cuda,
            "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        }

    def _observe_allocator(self) -> None:
        """Report out-of-memory errors from the allocator's observer, before it raises and code wraps them."""
        attach = cuda_attach_out_of_memory_observer
        report = self._report_out_of_memory
        if attach is None or report is None:
            return

        def observe(device: int, asked: int, total: int, free: int) -> None:
            """Report a failed allocation of `asked` bytes on `device`."""
            report(error_text("real.out_of_memory", asked / 2**20, device, free / 2**20, total / 2**20))

        torch.cuda.init()
        attach(observe)

    def _duration(self, step: Callable[[], object]) -> float:
        torch.cuda.synchronize(self.torch_device)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        step()
        end.record()
        torch.cuda.synchronize(self.torch_device)
        return start.elapsed_time(end) / 1e3

    def _wait_for_all(self) -> None:
        dist.barrier(device_ids=[self._placement.local_rank])
        torch.cuda.synchronize(self.torch_device)

    def _maximum(self, seconds: float) -> float:
        if self._slowest is None:
            raise RuntimeError("the device is used before open()")
        self._slowest.fill_(seconds)
        dist.all_reduce(self._slowest, op=dist.ReduceOp.MAX)
        return float(self._slowest.item())
