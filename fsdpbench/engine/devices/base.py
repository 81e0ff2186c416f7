"""The interface between worker and device; `cuda`/`cpu` (`real.py`) and `sim` implement it.

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
    """Rank, local rank and world size of this process."""

    rank: int
    world_size: int
    local_rank: int


class AllocatorReadings:
    """Per-step differences of an allocator's cumulative statistics."""

    def __init__(self) -> None:
        self._retries = self._ooms = self._device_allocs = 0

    def since_last(self, stats: Mapping[str, int]) -> StepMemory:
        """Return peaks and counts since the last call.

        `stats`: in the form of `torch.cuda.memory_stats()`, empty before the first allocation.
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
    """Whether tracing adds no time to a step; timed steps are then traced as they run."""

    def open(self) -> None:
        """Initialize the device and the default process group."""

    def close(self) -> None:
        """Destroy the process group; safe to call twice and after a failure."""

    def settle(self) -> None:
        """Collect garbage and reset peaks; called once, after model and optimizer are created."""

    def timed_step(self, step: Callable[[], object]) -> float:
        """Run `step` until all its work is done; return its duration by the device's clock."""

    def has_settled(self, times_s: Sequence[float]) -> bool:
        """Return whether the warm-up can end: step times so far (`times_s`) predict the next ones."""

    def take_memory(self) -> StepMemory | None:
        """Return peaks and counts since the last call; `None` if the device records none."""

    def trainer(self, model: "torch.nn.Module") -> Callable[[], AbstractContextManager[object]]:
        """Return a context manager for each microbatch of the wrapped `model`, which does a trainer's work
        outside of the training loop. On real devices it does nothing."""

    def capture(self, loop: "TrainingLoop") -> None:
        """Prepare to capture `loop` in a CUDA graph, if the configuration asks for it."""

    def memory_traffic(self, steps: int) -> JsonObject | None:
        """Return the bytes of memory-bound kernels per step, averaged over `steps` traced steps. `None`
        if the device does not record what its kernels read and write."""

    def trace(self, path: Path) -> AbstractContextManager[Tracer]:
        """Record a Kineto trace to `path` (gzip); the file is complete when the context ends."""

    def loss_value(self, loss: "torch.Tensor") -> float | None:
        """Return the value of `loss`; `None` if tensors have no values."""

    def on_out_of_memory(self, report: Callable[[str], None]) -> None:
        """Call `report(message)` before an out-of-memory error unwinds, while the memory is still held."""

    def peak_flops(self, compute_type: str) -> float | None:
        """Return the peak FLOP/s in `bf16`, `fp16`, `tf32` or `fp32`; `None` if unknown."""

    def describe(self) -> JsonObject:
        """Return the `hardware` of a result: at least `name`, `simulated` and `source`."""
