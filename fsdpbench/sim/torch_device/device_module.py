"""`torch.sim`: the device module, with the functions of `torch.cuda` that training code uses."""

from __future__ import annotations

import types
from dataclasses import dataclass
from typing import Any

import torch

from fsdpbench.sim.model.chips import chip_of
from fsdpbench.sim.model.timeline import DEFAULT_STREAM
from fsdpbench.sim.torch_device.accelerator import ACCELERATOR
from fsdpbench.sim.torch_device.distributed.symmetric import use_pool
from fsdpbench.sim.torch_device.streams import Event, Stream, StreamContext, switch_to


class MemoryFunctions:
    """As `torch.cuda`'s. Device arguments are taken and not needed."""

    memory: Any

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
        segments: list[dict[str, Any]] = self.memory.memory_snapshot()
        return segments

    def empty_cache(self) -> None:
        """Give cached blocks back to the device."""
        ACCELERATOR.require_started()
        ACCELERATOR.allocator.empty_cache()

    def mem_get_info(self, device: Any = None) -> tuple[int, int]:
        """(free, total) bytes of the device."""
        total = ACCELERATOR.kernel_costs.profile.memory_bytes
        usable = ACCELERATOR.kernel_costs.profile.usable_memory_bytes
        return usable - self.memory_reserved(), total


class RandomNumbers:
    """As `torch.cuda`'s."""

    _seed = 0

    def manual_seed(self, seed: int) -> None:
        """Remember the seed; there are no numbers to make of it."""
        self._seed = int(seed)

    manual_seed_all = manual_seed

    def seed(self) -> None:
        """Same seed as before: simulations repeat."""

    seed_all = seed

    def initial_seed(self) -> int:
        """The seed that was set."""
        return self._seed

    def get_rng_state(self, device: Any = None) -> torch.Tensor:
        """A state as long as CUDA's (seed and offset), on the CPU."""
        return torch.tensor([self._seed & 0x7FFFFFFFFFFFFFFF, 0], dtype=torch.int64).view(torch.uint8)

    def set_rng_state(self, new_state: torch.Tensor, device: Any = None) -> None:
        """Take the seed out of a state."""
        self._seed = int(new_state.view(torch.int64)[0])

    def get_rng_state_all(self) -> list[torch.Tensor]:
        """The state of the one device."""
        return [self.get_rng_state()]

    def set_rng_state_all(self, new_states: list[torch.Tensor]) -> None:
        """Set the state of the one device."""
        self.set_rng_state(new_states[0])


_WARP_SIZE = 32


@dataclass(frozen=True)
class DeviceProperties:
    """What `torch.sim.get_device_properties` returns: the fields of `torch.cuda`'s that are known."""

    name: str
    total_memory: int
    multi_processor_count: int
    major: int
    minor: int
    warp_size: int = _WARP_SIZE
    is_integrated: int = 0
    is_multi_gpu_board: int = 0


def drain() -> None:
    """Block the CPU until the device is idle, as `synchronize` does; it orders nothing for the sanitizer."""
    ACCELERATOR.require_started()
    timeline = ACCELERATOR.timeline
    start = timeline.cpu
    timeline.cpu += ACCELERATOR.cpu_costs.synchronize_ns
    timeline.drain()
    if ACCELERATOR.trace is not None:
        ACCELERATOR.trace.device_synchronize(start, timeline.cpu)


class DeviceModule(MemoryFunctions, RandomNumbers, types.ModuleType):
    """The module object that torch finds under ``torch.sim``. Device arguments are taken and not needed."""

    def __init__(self, memory: types.ModuleType) -> None:
        types.ModuleType.__init__(
            self, "torch.sim", "The simulated accelerator, with the functions of torch.cuda."
        )
        self.Stream = Stream
        self.Event = Event
        self.StreamContext = StreamContext
        self.OutOfMemoryError = torch.OutOfMemoryError
        self.memory = memory
        self.use_mem_pool = use_pool

    # ------------------------------------------------------------------------------------- devices

    def init(self) -> None:
        """Nothing to do: `Simulation.start` has done it."""

    _lazy_init = init

    def is_initialized(self) -> bool:
        """Whether the simulation has been started."""
        return ACCELERATOR.started

    def is_available(self) -> bool:
        """Always: the device needs no hardware."""
        return True

    def is_bf16_supported(self, including_emulation: bool = True) -> bool:
        """All profiles are of accelerators with bf16."""
        return True

    def _is_in_bad_fork(self) -> bool:
        return False

    def device_count(self) -> int:
        """GPUs a node."""
        return ACCELERATOR.device_count

    def current_device(self) -> int:
        """The process has one device, whatever its rank."""
        return 0

    def set_device(self, device: Any) -> None:
        """The process has one device: all indices mean it."""

    def device(self, device: Any) -> StreamContext:
        """A context that does nothing, since there is one device."""
        return StreamContext(None)

    def get_device_name(self, device: Any = None) -> str:
        """Title of the hardware profile."""
        return ACCELERATOR.kernel_costs.profile.title

    def get_device_properties(self, device: Any = None) -> DeviceProperties:
        """Name, memory, multiprocessors and capability of the hardware profile."""
        profile = ACCELERATOR.kernel_costs.profile
        capability = self.get_device_capability()
        return DeviceProperties(profile.title, profile.memory_bytes, profile.sm_count, *capability)

    def get_device_capability(self, device: Any = None) -> tuple[int, int]:
        """(major, minor) of the hardware profile's GPU; an unknown title is taken for an A100."""
        chip = chip_of(ACCELERATOR.kernel_costs.profile.title)
        return (8, 0) if chip is None else chip.capability

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        """Types that autocast may choose."""
        return [torch.bfloat16, torch.float16]

    # ------------------------------------------------------------------------------------- streams

    def current_stream(self, device: Any = None) -> Stream:
        """The stream that operators are queued on."""
        ACCELERATOR.require_started()
        if ACCELERATOR.backward.is_active:
            ACCELERATOR.backward.arrive()
        return self._stream(ACCELERATOR.stream)

    def default_stream(self, device: Any = None) -> Stream:
        """The stream that is current in the beginning."""
        return self._stream(DEFAULT_STREAM)

    def _stream(self, number: int) -> Stream:
        return ACCELERATOR.streams.get(number) or Stream(stream_id=number)

    def stream(self, stream: Stream | None) -> StreamContext:
        """Context that makes a stream current."""
        return StreamContext(stream)

    def set_stream(self, stream: Stream | None) -> None:
        """Make a stream current."""
        if stream is not None:
            if ACCELERATOR.backward.is_active:
                ACCELERATOR.backward.arrive()
            switch_to(stream.stream_id)

    def synchronize(self, device: Any = None) -> None:
        """Block the CPU until the device is idle."""
        drain()
        if ACCELERATOR.sanitizer is not None:
            ACCELERATOR.sanitizer.host_waits_for_all()
