"""Facade that starts the simulated device of a process, its process group and its traces."""

import datetime
import importlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist

from fsdpbench.base.configuration.config import JitterSettings
from fsdpbench.base.torch_internals import set_is_profiler_enabled, setup_privateuseone
from fsdpbench.sim.followers.jitter import Jitter
from fsdpbench.sim.followers.memory_history import MemoryModule
from fsdpbench.sim.followers.sanitizer import Sanitizer
from fsdpbench.sim.model.allocator import AllocatorConf, CachingAllocator
from fsdpbench.sim.model.allocator.conf import AllocatorCosts, conf_in
from fsdpbench.sim.model.allocator.stats import HostStats
from fsdpbench.sim.model.allocator.types import AllocatorAction, AllocatorEvent
from fsdpbench.sim.model.coupling import Link
from fsdpbench.sim.model.kernel_costs import CpuCosts, KernelCosts
from fsdpbench.sim.model.network import Network
from fsdpbench.sim.model.profile import HardwareProfile, of_slowest
from fsdpbench.sim.model.software import CURRENT, SoftwareProfile, load_software
from fsdpbench.sim.model.timeline import DEFAULT_STREAM, Contention, Coupling, Timeline, TimelineClock
from fsdpbench.sim.model.trace_recorder import TraceRecorder
from fsdpbench.sim.torch_device.accelerator import ACCELERATOR, DEVICE_TYPE, Accelerator, SharedPlans
from fsdpbench.sim.torch_device.backward_streams import BackwardStreams
from fsdpbench.sim.torch_device.device_module import DeviceModule, SimulatedDeviceGuard, Stream, drain
from fsdpbench.sim.torch_device.distributed.process_group import BACKEND, register_backend
from fsdpbench.sim.torch_device.operators.attention import register_attention, register_shape_rules
from fsdpbench.sim.torch_device.operators.autocast import register_autocast
from fsdpbench.sim.torch_device.operators.host_memory import register_host_optimizer
from fsdpbench.sim.torch_device.operators.kernels import forget_plans, register_kernels, register_launches
from fsdpbench.sim.torch_device.patches.dynamo import import_config
from fsdpbench.sim.torch_device.patches.torch_patches import apply_patches
from fsdpbench.sim.torch_device.software import Mechanism, install
from fsdpbench.sim.torch_device.tensors import use_on_stream

# Kept alive until the process ends: a library unregisters its kernels when it is destroyed.
_REGISTERED: list[torch.library.Library] = []


def preload() -> None:
    """Register the device `sim`, its kernels and its backend (idempotent).

    It leaves no thread and no open file, so a process that forks its workers can call it once before forking.
    Workers that use another device find torch unchanged, except for the additional device.
    """
    if _REGISTERED:
        return
    # torch imports these late. Import them here once, not in every fork.
    importlib.import_module("torch.distributed.tensor")
    import_config()
    setup_privateuseone(
        DEVICE_TYPE, DeviceModule(MemoryModule(ACCELERATOR)), device_guard=SimulatedDeviceGuard()
    )
    register_backend()
    _REGISTERED.extend(register_kernels())
    _REGISTERED.append(register_attention())
    _REGISTERED.append(register_shape_rules())
    _REGISTERED.append(register_launches())
    _REGISTERED.extend(register_autocast())
    register_host_optimizer()


@contextmanager
def sharing_plans(path: str) -> Iterator[None]:
    """Share operators' plans through the log at `path`; without an error, new plans are added at the end."""
    plans = ACCELERATOR.shared_plans = SharedPlans(path)
    try:
        yield
        plans.leave()
    finally:
        ACCELERATOR.shared_plans = None


class Simulation:
    """One simulated rank out of `world_size`: the simulated device of this process."""

    def __init__(self, profile: HardwareProfile, world_size: int, gpus_per_node: int, rank: int) -> None:
        self.profile = profile
        self.world_size = world_size
        self.gpus_per_node = gpus_per_node
        self.rank = rank
        self.accelerator = ACCELERATOR
        """The device of this process, for observers and for code that adds costs to it."""

    @classmethod
    def start(
        cls,
        profile: HardwareProfile,
        world_size: int,
        gpus_per_node: int,
        rank: int = 0,
        *,
        allocator_conf: AllocatorConf | None = None,
        jitter: JitterSettings | None = None,
        sanitize: bool = False,
        software: SoftwareProfile | None = None,
        attention: str = "auto",
        of_models: Mapping[str, Mechanism] = MappingProxyType({}),
    ) -> "Simulation":
        """Start (or restart) the simulated device of this process.

        Autograd runs on the calling thread from now on. `allocator_conf` defaults to
        `PYTORCH_CUDA_ALLOC_CONF`. Without `jitter`, kernel times have no noise and no rank is late. With
        `sanitize`, the sanitizer follows every use of memory. `software` (default: the installed one) applies
        until the next start or `end`, with the mechanisms of `of_models` that it enables. `attention`: a
        value of that setting. Raises `ValueError` for an invalid world size or rank.
        """
        _check_world(world_size, gpus_per_node, rank)
        preload()
        apply_patches(ACCELERATOR)
        software = software or load_software(CURRENT)
        simulation = cls(profile, world_size, gpus_per_node, rank)
        accelerator = simulation.accelerator
        accelerator.undo_software()
        conf = AllocatorConf.parse(conf_in(os.environ)) if allocator_conf is None else allocator_conf
        _end_followers(accelerator)
        accelerator.timeline = _make_timeline(accelerator, profile)
        accelerator.allocator = _make_allocator(profile, accelerator.timeline, conf)
        sanitizer = _begin_followers(accelerator, jitter, sanitize)
        simulation._price(software, attention)
        accelerator.forget_run()
        accelerator.collectives_on_own_streams = software.collectives.own_streams
        accelerator.timeline.add_stream()
        if sanitizer is not None:
            sanitizer.stream_made(DEFAULT_STREAM, "default")
        accelerator.backward = BackwardStreams(accelerator, use_on_stream)
        simulation._begin_plans(None if sanitize else software, attention)
        accelerator.undo_software = install(software, accelerator, of_models).close
        accelerator.started = True
        if sanitizer is not None:
            sanitizer.begin(accelerator)
        Stream(stream_id=DEFAULT_STREAM)
        torch.autograd.set_multithreading_enabled(False)
        return simulation

    def _begin_plans(self, software: SoftwareProfile | None, attention: str) -> None:
        """Clear operators' plans and costs; load other processes' ones, unless `software` is None.

        The sanitizer's plans hold more than others and are not shared.
        """
        forget_plans()
        shared = self.accelerator.shared_plans
        if shared is not None:
            surroundings = (self.profile, software, attention, self.world_size, self.gpus_per_node)
            shared.begin(None if software is None else repr(surroundings))

    def _price(self, software: SoftwareProfile, attention: str) -> None:
        """Set the costs of work on this hardware and this number of ranks."""
        accelerator, profile = self.accelerator, self.profile
        accelerator.device_count = self.gpus_per_node
        applied = software.applied_to(profile, attention)
        accelerator.kernel_costs = KernelCosts(of_slowest(applied, self.world_size))
        accelerator.cpu_costs = CpuCosts.of(profile)
        accelerator.network = Network(profile, self.world_size, self.gpus_per_node)
        accelerator.host_link_ns = _host_link(profile)
        accelerator.host = HostStats(most=profile.host_link.memory_gb * 1e9)
        accelerator.host_ns_per_byte = 1.0 / profile.host_link.memory_gb_s

    def init_process_group(self) -> None:
        """Initialise `torch.distributed` with the backend `sim` and a store local to this process."""
        store = dist.HashStore()
        store.set_timeout(datetime.timedelta(seconds=5))
        dist.init_process_group(BACKEND, store=store, rank=self.rank, world_size=self.world_size)

    def couple(self, link: Link | None) -> None:
        """Run with the other ranks of `link`; if there are none, the program can request them by it."""
        self.accelerator.link = link
        if link is not None and len(link.ranks) > 1:
            Coupling(self.accelerator.timeline, link)

    def end(self) -> None:
        """Undo the software profile's changes; safe to call twice."""
        self.accelerator.undo_software()
        self.accelerator.python.end_step()
        self.accelerator.collectives_on_own_streams = False

    def cpu_ns(self) -> int:
        """Return the CPU's simulated time in nanoseconds."""
        return self.accelerator.timeline.cpu

    def synchronize(self) -> None:
        """Block the simulated CPU until the device is idle."""
        torch.get_device_module(DEVICE_TYPE).synchronize()

    @property
    def sanitizer(self) -> Sanitizer | None:
        """Return the observer of memory uses, if requested."""
        found = self.accelerator.sanitizer
        return found if isinstance(found, Sanitizer) else None

    @property
    def unknown_operators(self) -> dict[str, int]:
        """Return the launches by name of operators without a cost model, which were priced by their bytes."""
        return dict(sorted(self.accelerator.unknown_operators.items()))

    def take_launched(self) -> dict[str, float]:
        """Return seconds of kernels, of host-link copies and of optimizer steps on the host since the last
        call, as if each ran alone."""
        timeline = self.accelerator.timeline
        (kernels, _, copies), timeline.launched_ns = timeline.launched_ns, [0, 0, 0]
        stepping, self.accelerator.host_optimizer_ns = self.accelerator.host_optimizer_ns, 0
        return {"kernels": kernels / 1e9, "host_copies": copies / 1e9, "host_optimizer": stepping / 1e9}

    def slow_host_link(self, work: Mapping[str, float]) -> bool:
        """Double the time of host-link copies from now on, and enlarge the device's memory (running out of
        it would hide the link's effect). Return False if a step's `work` has few copies."""
        if work["host_copies"] < 0.03 * work["kernels"]:
            return False
        accelerator, alone_ns = self.accelerator, self.accelerator.host_link_ns
        accelerator.host_link_ns = lambda nbytes: 2 * alone_ns(nbytes)
        accelerator.allocator.device.capacity_bytes *= 64
        return True

    def drain(self) -> None:
        """Block the simulated CPU like `synchronize`, for measurements; the sanitizer ignores it."""
        drain()

    def trace(self, path: Path | str) -> "SimulatedTrace":
        """Return a context manager that records the work inside and writes a Kineto trace at its end."""
        return SimulatedTrace(self, Path(path))


class SimulatedTrace(AbstractContextManager["SimulatedTrace"]):
    """Trace used like `torch.profiler.profile`: call `step` after each step. Leaving writes the file.

    The device is idle when the trace begins and ends. Nothing is written if the block raises.
    """

    def __init__(self, simulation: "Simulation", path: Path) -> None:
        self._simulation = simulation
        self._accelerator = simulation.accelerator
        self._path = path
        self._index = 0
        self._step_start = 0

    def __enter__(self) -> "SimulatedTrace":
        if self._accelerator.trace is not None:
            raise RuntimeError("a trace is running already: traces do not nest")
        self._simulation.drain()
        simulation = self._simulation
        self._accelerator.trace = TraceRecorder(
            simulation.rank,
            simulation.world_size,
            simulation.profile,
            _described(self._accelerator.process_groups),
            simulation.gpus_per_node,
        )
        self._accelerator.listen(self._report_memory, completions=False)
        self._accelerator.allocator.device.call_listener = self._accelerator.trace.runtime
        set_is_profiler_enabled(True)
        self._accelerator.bytes_traced = 0
        self._step_start = self._accelerator.timeline.cpu
        return self

    def step(self) -> None:
        """End a step (``ProfilerStep#k``; it began at the previous call or on entry), begin the next."""
        assert self._accelerator.trace is not None
        now = self._accelerator.timeline.cpu
        self._accelerator.trace.step(self._index, self._step_start, now)
        self._index += 1
        self._step_start = now

    def __exit__(self, exc_type: type[BaseException] | None, *exc_info: object) -> None:
        recorder = self._accelerator.trace
        if exc_type is None:
            self._accelerator.timeline.drain()
        self._accelerator.trace = None
        self._accelerator.stop_listening(self._report_memory)
        self._accelerator.allocator.device.call_listener = None
        set_is_profiler_enabled(
            self._accelerator.sanitizer is not None or self._accelerator.account is not None
        )
        if exc_type is None and recorder is not None:
            for name, start in recorder.open_spans:  # a script's last step ends inside its optimizer's span
                recorder.annotation(name, start, max(start, self._step_start))
            recorder.write(self._path)

    def _report_memory(self, event: AllocatorEvent) -> None:
        """Add allocator events to the trace, as torch.profiler(profile_memory=True) writes them."""
        trace = self._accelerator.trace
        if trace is None:
            return
        if event.action in (AllocatorAction.ALLOC, AllocatorAction.FREE):
            nbytes = event.size if event.action is AllocatorAction.ALLOC else -event.size
            active = self._accelerator.allocator.stats.active_bytes
            trace.memory(event.address, nbytes, event.allocated, event.reserved, event.time_ns, active)
        elif event.action is AllocatorAction.RETRY:
            trace.alloc_retry(event.size, event.freed, event.time_ns)


def _described(groups: Sequence[Any]) -> list[dict[str, object]]:
    """Return the process groups in the format of torch.profiler."""
    return [
        {
            "pg_name": group.group_name,
            "pg_desc": group.group_desc,
            "backend_config": "cuda:nccl",
            "pg_size": group.size(),
        }
        for group in groups
    ]


def _check_world(world_size: int, gpus_per_node: int, rank: int) -> None:
    if world_size < 1 or gpus_per_node < 1:
        raise ValueError(f"world_size {world_size}, gpus_per_node {gpus_per_node}: both must be at least 1")
    if not 0 <= rank < world_size:
        raise ValueError(f"rank {rank} is not in a world of {world_size}")


def _end_followers(accelerator: Accelerator) -> None:
    """End the observers of the previous simulation."""
    if accelerator.sanitizer is not None:
        accelerator.sanitizer.end()
    if accelerator.account is not None:
        accelerator.account.end()


def _begin_followers(
    accelerator: Accelerator, jitter: JitterSettings | None, sanitize: bool
) -> Sanitizer | None:
    accelerator.jitter = accelerator.sanitizer = None
    if jitter is not None:
        noise = accelerator.jitter = Jitter(jitter)
        accelerator.follow(noise)
    if not sanitize:
        return None
    sanitizer = accelerator.sanitizer = Sanitizer()
    accelerator.follow(sanitizer.order)
    return sanitizer


def _make_timeline(accelerator: Accelerator, profile: HardwareProfile) -> Timeline:
    contention = Contention(
        round(profile.contention.compute_slowdown * 1000),
        round(profile.contention.communication_slowdown * 1000),
        round(profile.contention.kernel_share * 1000),
    )
    return Timeline(contention, accelerator.report_finished)


def _make_allocator(profile: HardwareProfile, timeline: Timeline, conf: AllocatorConf) -> CachingAllocator:
    cpu = profile.cpu
    costs = AllocatorCosts(
        malloc_ns=round(cpu.cuda_malloc_us * 1000),
        malloc_ns_per_gib=round(cpu.cuda_malloc_us_per_gib * 1000),
        free_ns=round(cpu.cuda_free_us * 1000),
        free_ns_per_gib=round(cpu.cuda_free_us_per_gib * 1000),
        event_ns=round(cpu.event_us * 1000),
    )
    return CachingAllocator(
        profile.usable_memory_bytes,
        TimelineClock(timeline),
        conf,
        costs=costs,
        total_bytes=profile.memory_bytes,
    )


def _host_link(profile: HardwareProfile) -> Callable[[int], int]:
    """Return a function from the bytes of a host-device copy to its nanoseconds."""
    latency_ns = profile.host_link.latency_us * 1e3
    ns_per_byte = 1.0 / profile.host_link.gb_s
    return lambda nbytes: round(latency_ns + nbytes * ns_per_byte)


__all__ = ["SimulatedTrace", "Simulation", "preload"]
