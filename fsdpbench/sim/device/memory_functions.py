"""Functions of `torch.sim` that ask the allocator."""

from __future__ import annotations

from typing import Any

from fsdpbench.sim.accelerator import ACCELERATOR
from fsdpbench.sim.device.memory_history import MemoryModule


class MemoryFunctions:
    """As `torch.cuda`'s. Device arguments are taken and not needed."""

    memory: MemoryModule

    def memory_stats(self, device: Any = None) -> dict[str, int]:
        """Counters of the caching allocator, with the keys of `torch.cuda.memory_stats`."""
        ACCELERATOR.require_started()
        return ACCELERATOR.allocator.memory_stats()

    def reset_peak_memory_stats(self, device: Any = None) -> None:
        """Peaks start again from the current values."""
        ACCELERATOR.require_started()
        ACCELERATOR.allocator.reset_peak_memory_stats()

    def memory_allocated(self, device: Any = None) -> int:
        """Bytes of live tensors (rounded as the allocator rounds)."""
        return self.memory_stats()["allocated_bytes.all.current"]

    def max_memory_allocated(self, device: Any = None) -> int:
        """Peak of `memory_allocated`."""
        return self.memory_stats()["allocated_bytes.all.peak"]

    def memory_reserved(self, device: Any = None) -> int:
        """Bytes that the allocator holds."""
        return self.memory_stats()["reserved_bytes.all.current"]

    def max_memory_reserved(self, device: Any = None) -> int:
        """Peak of `memory_reserved`."""
        return self.memory_stats()["reserved_bytes.all.peak"]

    def reset_accumulated_memory_stats(self, device: Any = None) -> None:
        """Totals since the start stay as they are: the bench counts retries by them."""

    def memory_snapshot(self, *args: Any, **kwargs: Any) -> list[dict[str, Any]]:
        """Segments and blocks of the allocator."""
        return self.memory.memory_snapshot()

    def empty_cache(self) -> None:
        """Give cached blocks back to the device."""
        ACCELERATOR.require_started()
        ACCELERATOR.allocator.empty_cache()

    def mem_get_info(self, device: Any = None) -> tuple[int, int]:
        """(free, total) bytes of the device."""
        total = ACCELERATOR.kernel_costs.profile.memory_bytes
        usable = ACCELERATOR.kernel_costs.profile.usable_memory_bytes
        return usable - self.memory_reserved(), total
