"""Real GPUs: one rank a GPU, NCCL, CUDA events, `torch.profiler`, the caching allocator's counters."""

from __future__ import annotations

import gc
from collections.abc import Callable

import torch
import torch.distributed as dist

from fsdpbench.base.configuration.config import Config
from fsdpbench.base.configuration.simulated_cuda import VARIABLE, simulated_cuda
from fsdpbench.base.errors import BenchError
from fsdpbench.base.reading import JsonObject
from fsdpbench.base.torch_internals import cuda_attach_out_of_memory_observer
from fsdpbench.engine.devices.base import AllocatorReadings, Placement, StepMemory
from fsdpbench.engine.devices.cpu import RealDevice
from fsdpbench.engine.devices.detection import peak_flops_of
from fsdpbench.sim.model.chips import peaks_source


class CudaDevice(RealDevice):
    """A `Device` on the GPU of this process's local rank.

    As on `cpu`, ranks start a timed step together and report the slowest one's time, but not while tracing.
    """

    name = "cuda"

    def __init__(self, config: Config, placement: Placement) -> None:
        super().__init__(config, placement, torch.device("cuda", placement.local_rank))
        self._slowest: torch.Tensor | None = None
        self._report_out_of_memory: Callable[[str], None] | None = None
        self._readings = AllocatorReadings()

    def open(self) -> None:
        """Raise `BenchError` if this machine has no GPU for the local rank."""
        visible = torch.cuda.device_count()
        if self._placement.local_rank >= visible:
            raise BenchError(
                f"rank {self._placement.rank} needs GPU {self._placement.local_rank} of its machine, where "
                f"{visible} are visible: use fewer --gpus, or --device sim"
            )
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
        """Report out-of-memory errors as the allocator sees them, before it raises and they are wrapped."""
        attach = cuda_attach_out_of_memory_observer
        report = self._report_out_of_memory
        if attach is None or report is None:
            return

        def observe(device: int, asked: int, total: int, free: int) -> None:
            """Report a request for `asked` bytes that `device` cannot give."""
            report(
                f"CUDA out of memory: tried to allocate {asked / 2**20:.0f} MiB on GPU {device}, "
                f"{free / 2**20:.0f} of {total / 2**20:.0f} MiB are free"
            )

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
