"""`torch.sim`: the device module, with the functions of `torch.cuda` that training code uses."""

import types
from dataclasses import dataclass
from typing import Any
from uuid import NAMESPACE_OID, UUID, uuid5

import torch

from fsdpbench.base.torch_internals import DeviceGuard, private_use_1
from fsdpbench.sim.model.chips import chip_of
from fsdpbench.sim.model.timeline import DEFAULT_STREAM, Marker
from fsdpbench.sim.model.trace_recorder import EventRecord, WaitRecord, trace_stream
from fsdpbench.sim.torch_device.accelerator import ACCELERATOR, separate_threads
from fsdpbench.sim.torch_device.backward_streams import take_error
from fsdpbench.sim.torch_device.distributed.symmetric import use_pool
from fsdpbench.sim.torch_device.strict.words import error_text


class MemoryFunctions:
    """Memory functions of `torch.cuda`. Device arguments are accepted and ignored."""

    memory: Any

    def memory_stats(self, device: Any = None) -> dict[str, int]:
        """Return counters of the caching allocator, with the keys of `torch.cuda.memory_stats`."""
        ACCELERATOR.require_started()
        return ACCELERATOR.allocator.memory_stats()

    def reset_peak_memory_stats(self, device: Any = None) -> None:
        """Reset peaks to the current values."""
        ACCELERATOR.require_started()
        ACCELERATOR.allocator.reset_peak_memory_stats()

    def memory_allocated(self, device: Any = None) -> int:
        """Return the bytes of live tensors, after the allocator's rounding."""
        return self.memory_stats()["allocated_bytes.all.current"]

    def max_memory_allocated(self, device: Any = None) -> int:
        """Return the peak of `memory_allocated`."""
        return self.memory_stats()["allocated_bytes.all.peak"]

    def memory_reserved(self, device: Any = None) -> int:
        """Return the bytes that the allocator has reserved."""
        return self.memory_stats()["reserved_bytes.all.current"]

    def max_memory_reserved(self, device: Any = None) -> int:
        """Return the peak of `memory_reserved`."""
        return self.memory_stats()["reserved_bytes.all.peak"]

    def reset_accumulated_memory_stats(self, device: Any = None) -> None:
        """Do nothing: fsdpbench counts retries by totals since the start."""

    def memory_snapshot(self, *args: Any, **kwargs: Any) -> list[dict[str, Any]]:
        """Return the allocator's segments and blocks."""
        segments: list[dict[str, Any]] = self.memory.memory_snapshot()
        return segments

    def empty_cache(self) -> None:
        """Return cached blocks to the device."""
        ACCELERATOR.require_started()
        ACCELERATOR.allocator.empty_cache()

    def mem_get_info(self, device: Any = None) -> tuple[int, int]:
        """Return (free, total) bytes of the device."""
        total = ACCELERATOR.kernel_costs.profile.memory_bytes
        usable = ACCELERATOR.kernel_costs.profile.usable_memory_bytes
        return usable - self.memory_reserved(), total


class RandomNumbers:
    """Random-number functions of `torch.cuda`."""

    _seed = 0

    def manual_seed(self, seed: int) -> None:
        """Store the seed; no numbers are drawn from it."""
        self._seed = int(seed)

    manual_seed_all = manual_seed

    def seed(self) -> None:
        """Do nothing, so that simulations are reproducible."""

    seed_all = seed

    def initial_seed(self) -> int:
        """Return the seed."""
        return self._seed

    def get_rng_state(self, device: Any = None) -> torch.Tensor:
        """Return a CPU state as long as CUDA's (seed and offset)."""
        return torch.tensor([self._seed & 0x7FFFFFFFFFFFFFFF, 0], dtype=torch.int64).view(torch.uint8)

    def set_rng_state(self, new_state: torch.Tensor, device: Any = None) -> None:
        """Set the seed from a state."""
        self._seed = int(new_state.view(torch.int64)[0])

    def get_rng_state_all(self) -> list[torch.Tensor]:
        """Return the state of the one device."""
        return [self.get_rng_state()]

    def set_rng_state_all(self, new_states: list[torch.Tensor]) -> None:
        """Set the state of the one device."""
        self.set_rng_state(new_states[0])


_WARP_SIZE = 32
_UUID = uuid5(NAMESPACE_OID, "simulated")


@dataclass(frozen=True)
class DeviceProperties:
    """The fields of `torch.cuda`'s device properties that are known (`torch.sim.get_device_properties`)."""

    name: str
    total_memory: int
    multi_processor_count: int
    major: int
    minor: int
    L2_cache_size: int
    shared_memory_per_block: int = 48 << 10
    regs_per_multiprocessor: int = 1 << 16
    warp_size: int = _WARP_SIZE
    is_integrated: int = 0
    is_multi_gpu_board: int = 0
    uuid: UUID = _UUID


def drain() -> None:
    """Block the CPU until the device is idle, like `synchronize`; it orders nothing for the sanitizer."""
    ACCELERATOR.require_started()
    timeline = ACCELERATOR.timeline
    start = timeline.cpu
    timeline.cpu += ACCELERATOR.cpu_costs.synchronize_ns
    timeline.drain()
    if ACCELERATOR.trace is not None:
        ACCELERATOR.trace.device_synchronize(start, timeline.cpu)


class DeviceModule(MemoryFunctions, RandomNumbers, types.ModuleType):
    """The module `torch.sim`. Device arguments are accepted and ignored."""

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

    def init(self) -> None:
        """Do nothing: `Simulation.start` initialises the device."""

    _lazy_init = init

    def is_initialized(self) -> bool:
        """Return whether the simulation was started."""
        return ACCELERATOR.started

    def is_available(self) -> bool:
        """Return True: the device needs no hardware."""
        return True

    def is_bf16_supported(self, including_emulation: bool = True) -> bool:
        """Return True: all profiles are of accelerators with bf16."""
        return True

    def _is_in_bad_fork(self) -> bool:
        return False

    def device_count(self) -> int:
        """Return the number of GPUs per node."""
        return ACCELERATOR.device_count

    def current_device(self) -> int:
        """Return 0: the process has one device, whatever its rank."""
        return 0

    def set_device(self, device: Any) -> None:
        """Accept any index: the process has one device."""

    def device(self, device: Any) -> "StreamContext":
        """Return a context manager that does nothing, because there is one device."""
        return StreamContext(None)

    def get_device_name(self, device: Any = None) -> str:
        """Return the title of the hardware profile."""
        return ACCELERATOR.kernel_costs.profile.title

    def get_device_properties(self, device: Any = None) -> DeviceProperties:
        """Return name, memory, multiprocessors, capability and cache from the hardware profile."""
        profile = ACCELERATOR.kernel_costs.profile
        capability, chip = self.get_device_capability(), chip_of(profile.title)
        cache = int((40 if chip is None else chip.cache_mib) * 2**20)  # an A100's if the title is unknown
        return DeviceProperties(profile.title, profile.memory_bytes, profile.sm_count, *capability, cache)

    def get_device_capability(self, device: Any = None) -> tuple[int, int]:
        """Return (major, minor) of the profile's GPU, or an A100's if its title is unknown."""
        chip = chip_of(ACCELERATOR.kernel_costs.profile.title)
        return (8, 0) if chip is None else chip.capability

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        """Return the dtypes that autocast supports."""
        return [torch.bfloat16, torch.float16]

    def current_stream(self, device: Any = None) -> "Stream":
        """Return the stream on which operators are queued."""
        ACCELERATOR.require_started()
        if ACCELERATOR.backward.is_active:
            ACCELERATOR.backward.arrive()
        return self._stream(ACCELERATOR.stream)

    def default_stream(self, device: Any = None) -> "Stream":
        """Return the stream that is current at the start."""
        return self._stream(DEFAULT_STREAM)

    def _stream(self, number: int) -> "Stream":
        return ACCELERATOR.streams.get(number) or Stream(stream_id=number)

    def stream(self, stream: "Stream | None") -> "StreamContext":
        """Return a context manager that makes a stream current."""
        return StreamContext(stream)

    def set_stream(self, stream: "Stream | None") -> None:
        """Make a stream current."""
        if stream is not None:
            _make_current(stream.stream_id)

    def synchronize(self, device: Any = None) -> None:
        """Block the CPU until the device is idle."""
        drain()
        if ACCELERATOR.sanitizer is not None:
            ACCELERATOR.sanitizer.host_waits_for_all()


class SimulatedDeviceGuard(DeviceGuard):
    """torch's guard for a device written in Python.

    The engine also calls it while a hook's error leaves a backward node. Python cannot call anything then,
    and torch would abort the process. So the guard stores the error, which is raised again after it returns.
    """

    @staticmethod
    def type_() -> Any:
        """Return the type of the device."""
        if (error := take_error()) is not None:
            ACCELERATOR.backward.errors.append(error)
        return private_use_1


_PRIVATE_USE_1 = 20  # c10::DeviceType::PrivateUse1


class Stream(torch.Stream):
    """A queue of device work. `device` and `priority` are accepted as by `torch.cuda.Stream`.

    Priorities have no effect: simulated kernels do not preempt each other.
    """

    number: int

    def __new__(cls, device: Any = None, priority: int = 0, **kwargs: Any) -> "Stream":
        number = kwargs.get("stream_id")
        if number is None:
            ACCELERATOR.require_started()
            number = ACCELERATOR.timeline.add_stream()
        elif number in ACCELERATOR.streams:
            return ACCELERATOR.streams[number]
        stream = super().__new__(cls, stream_id=number, device_index=0, device_type=_PRIVATE_USE_1)
        stream.number = number
        ACCELERATOR.streams[number] = stream
        return stream

    def __init__(self, device: Any = None, priority: int = 0, **kwargs: Any) -> None:
        self.priority = priority

    def wait_event(self, event: "Event") -> None:  # type: ignore[override]
        """Make work that is queued from now on wait for the event."""
        event.wait(self)

    def wait_stream(self, stream: "Stream") -> None:  # type: ignore[override]
        """Make work that is queued from now on wait for all work queued on another stream so far."""
        self.wait_event(stream.record_event())

    def record_event(self, event: "Event | None" = None) -> "Event":  # type: ignore[override]
        """Record an event (by default a new one) at this point."""
        event = Event() if event is None else event
        event.record(self)
        return event

    def query(self) -> bool:
        """Return whether all queued work is complete."""
        ACCELERATOR.timeline.cpu += ACCELERATOR.cpu_costs.event_ns
        return ACCELERATOR.timeline.is_idle(self.number)

    def synchronize(self) -> None:
        """Block the CPU until all queued work is complete."""
        timeline = ACCELERATOR.timeline
        start = timeline.cpu
        timeline.cpu += ACCELERATOR.cpu_costs.synchronize_ns
        timeline.wait_for_stream(self.number)
        if ACCELERATOR.trace is not None:
            ACCELERATOR.trace.stream_synchronize(trace_stream(self.number), start, timeline.cpu)

    def __enter__(self) -> "Stream":
        self._previous = [*getattr(self, "_previous", ()), _make_current(self.number)]
        return self

    def __exit__(self, *exc_info: object) -> None:
        switch_to(self._previous.pop())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, torch.Stream) and other.stream_id == self.stream_id

    def __hash__(self) -> int:
        return hash(("sim", self.stream_id))

    def __repr__(self) -> str:
        return f"<torch.sim.Stream {self.number}>"


class StreamContext:
    """Context manager of `torch.sim.stream(stream)`, which makes a stream current; None changes nothing."""

    __slots__ = ("_previous", "_stream")

    def __init__(self, stream: Stream | None) -> None:
        self._stream = stream
        self._previous = DEFAULT_STREAM

    def __enter__(self) -> "StreamContext":
        if self._stream is not None:
            self._previous = _make_current(self._stream.stream_id)
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._stream is not None:
            switch_to(self._previous)


class Event:
    """A point in a stream. As in CUDA, events that were never recorded count as passed."""

    def __init__(
        self,
        enable_timing: bool = False,
        blocking: bool = False,
        interprocess: bool = False,
        external: bool = False,
        device: Any = None,
    ) -> None:
        self.enable_timing = enable_timing
        self.marker: Marker | None = None
        self._trace: EventRecord | None = None

    def record(self, stream: torch.Stream | None = None) -> None:
        """Move the event to the current end of a stream (by default the current one)."""
        timeline = ACCELERATOR.timeline
        number = _number(stream)
        start = timeline.cpu
        timeline.cpu += ACCELERATOR.cpu_costs.event_ns
        self.marker = timeline.record(number)
        if ACCELERATOR.trace is not None:
            ACCELERATOR.events_traced += 1
            self._trace = EventRecord.write(
                ACCELERATOR.trace, ACCELERATOR.events_traced, number, start, timeline.cpu
            )

    def wait(self, stream: torch.Stream | None = None) -> None:
        """Make a stream (by default the current one) wait for the event."""
        timeline = ACCELERATOR.timeline
        start = timeline.cpu
        timeline.cpu += ACCELERATOR.cpu_costs.event_ns
        if self.marker is None:
            return
        number = _number(stream)
        payload = None
        if ACCELERATOR.trace is not None and self._trace is not None:
            payload = WaitRecord(self._trace, start, timeline.cpu)
        timeline.make_wait(number, self.marker, payload)

    def query(self) -> bool:
        """Return whether the device has reached the event."""
        ACCELERATOR.timeline.cpu += ACCELERATOR.cpu_costs.event_ns
        return self.marker is None or ACCELERATOR.timeline.has_passed(self.marker)

    def synchronize(self) -> None:
        """Block the CPU until the device reaches the event."""
        timeline = ACCELERATOR.timeline
        start = timeline.cpu
        timeline.cpu += ACCELERATOR.cpu_costs.event_ns
        if self.marker is not None:
            timeline.wait_for(self.marker)
        if ACCELERATOR.trace is not None and self._trace is not None:
            trace = self._trace
            ACCELERATOR.trace.event_synchronize(
                trace.event_id, trace.stream, trace.correlation, start, timeline.cpu
            )

    def elapsed_time(self, end_event: "Event") -> float:
        """Return milliseconds between two recorded events created with `enable_timing=True`."""
        if not (self.enable_timing and end_event.enable_timing):
            raise RuntimeError(error_text("device_module.elapsed_time"))
        if self.marker is None or end_event.marker is None:
            raise RuntimeError("both events must be recorded before the time between them is known")
        for marker in (self.marker, end_event.marker):
            if not ACCELERATOR.timeline.has_passed(marker):
                raise RuntimeError("both events must have completed: synchronize first")
        return (end_event.marker.time - self.marker.time) / 1e6


def _number(stream: torch.Stream | None) -> int:
    """Return a stream's number; None means the current stream."""
    if stream is not None:
        return int(stream.stream_id)
    if ACCELERATOR.backward.is_active:
        ACCELERATOR.backward.arrive()
    return ACCELERATOR.stream


def _make_current(number: int) -> int:
    """Make a stream current in the calling thread; return the number of the previous one."""
    if ACCELERATOR.backward.is_active:
        ACCELERATOR.backward.arrive()
    separate_threads()
    before = ACCELERATOR.stream
    switch_to(number)
    return before


def switch_to(number: int) -> None:
    """Make a stream current."""
    ACCELERATOR.stream = number
    ACCELERATOR.backward.note_switch(number)
    ACCELERATOR.timeline.cpu += ACCELERATOR.cpu_costs.stream_ns
