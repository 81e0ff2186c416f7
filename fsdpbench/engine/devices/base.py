"""The interface between worker and device; `cuda`, `cpu` and `sim` have a file each.

worker ──> Device.open() ─> build, wrap ─> settle() ─> timed_step(...) x n ─> trace(...) ─> close()
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from fsdpbench.base.reading import JsonObject
from fsdpbench.engine.measuring.warmup import StepMemory as StepMemory
from fsdpbench.engine.measuring.warmup import Tracer as Tracer

if TYPE_CHECKING:
    import torch

    from fsdpbench.engine.measuring.soak import TrainingLoop


@dataclass(frozen=True)
class Placement:
    """Place of this process among the ranks."""

    rank: int
    world_size: int
    local_rank: int


class AllocatorReadings:
    """Each step's share of an allocator's statistics, whose counts run on from step to step."""

    def __init__(self) -> None:
        self._retries = self._ooms = self._device_allocs = 0

    def since_last(self, stats: Mapping[str, int]) -> StepMemory:
        """Return peaks and counts since the last call.

        `stats`: as `torch.cuda.memory_stats()` names them, empty before the first allocation.
        """
        retries, ooms = stats.get("num_alloc_retries", 0), stats.get("num_ooms", 0)
        device_allocs = stats.get("num_device_alloc", 0)
        taken = StepMemory(
            allocated=stats.get("allocated_bytes.all.peak", 0),
            active=stats.get("active_bytes.all.peak", 0),
            reserved=stats.get("reserved_bytes.all.peak", 0),
            alloc_retries=retries - self._retries,
            ooms=ooms - self._ooms,
            device_allocs=device_allocs - self._device_allocs,
            inactive_split=stats.get("inactive_split_bytes.all.current", 0),
        )
        self._retries, self._ooms, self._device_allocs = retries, ooms, device_allocs
        return taken


class Device(Protocol):
    """One kind of device, in one process. Times are in seconds, memory in bytes."""

    name: str
    torch_device: "torch.device"
    tracing_is_free: bool
    """Whether tracing costs a step no time: timed steps are then traced as they run."""

    def open(self) -> None:
        """Make the device and the default process group ready."""

    def close(self) -> None:
        """Leave the process group; safe to call twice and after a failure."""

    def settle(self) -> None:
        """Collect garbage and reset peaks; called once after model and optimizer exist."""

    def timed_step(self, step: Callable[[], object]) -> float:
        """Run `step` until all its work is done; return how long it took on this device's clock."""

    def has_settled(self, times_s: Sequence[float]) -> bool:
        """Return whether the steps so far, which took `times_s`, say what those to come will be like."""

    def take_memory(self) -> StepMemory | None:
        """Return peaks and counts since the last call; `None` where the device keeps none."""

    def trainer(self, model: "torch.nn.Module") -> Callable[[], AbstractContextManager[object]]:
        """Return the context to enter around each microbatch of `model`, which is wrapped: the work that a
        trainer does beside the training loop. Real devices have the loop alone."""

    def capture(self, loop: "TrainingLoop") -> None:
        """Prepare `loop` to be captured in a graph, if the configuration says so."""

    def memory_traffic(self, steps: int) -> JsonObject | None:
        """Return the bytes of kernels that memory limits, of a mean one of `steps` traced steps; `None` where
        the device does not know what its kernels read and write."""

    def trace(self, path: Path) -> AbstractContextManager[Tracer]:
        """Record a Kineto trace into `path` (gzip); the file is whole when the context ends."""

    def loss_value(self, loss: "torch.Tensor") -> float | None:
        """Return the number in `loss`; `None` where tensors hold no numbers."""

    def on_out_of_memory(self, report: Callable[[str], None]) -> None:
        """Call `report(message)` before an out-of-memory error unwinds, with what holds memory then."""

    def peak_flops(self, compute_type: str) -> float | None:
        """Return the peak FLOP/s in `bf16`, `fp16`, `tf32` or `fp32`; `None` if unknown."""

    def describe(self) -> JsonObject:
        """Return the `hardware` of a result: at least `name`, `simulated` and `source`."""
