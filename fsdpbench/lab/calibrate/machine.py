"""The machine under measurement: one device, its clock and the host's clock.

A kernel is timed with events around many runs of it, all queued behind a long kernel. So the host is ahead,
and the device never waits for it:

    host     [filler][e0][k][k][k][e1]
    device   [====== filler ======][k][k][k]
                                  e0       e1

Real and simulated GPUs have the same interface. Calibrating a simulated machine must return its own
profile; that tests the calibration without a GPU.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from fsdpbench.base.errors import UsageError
from fsdpbench.engine.devices.detection import number_of_launcher, profile_like
from fsdpbench.sim.model.profile import HardwareProfile, load_profile, profile_names

_FILLER = 8192
_ROUNDS = 5


@dataclass(frozen=True)
class Machine:
    """One device of a machine, and its rank.

    ``host_ns`` reads the host's clock. ``ranks_per_node`` of the ``world_size`` ranks run on each node.
    """

    device: torch.device
    host_ns: Callable[[], int]
    rank: int = 0
    world_size: int = 1
    ranks_per_node: int = 1
    module: Any = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "module", torch.get_device_module(self.device))

    @property
    def name(self) -> str:
        """Return the driver's name of the device."""
        return str(self.module.get_device_name(self.device))

    @property
    def simulated(self) -> bool:
        """Return whether the device is simulated."""
        return self.device.type == "sim"

    def normal(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        """Return standard normal values. With zeros a GPU would draw less power and keep a higher clock."""
        return torch.randn(shape, dtype=dtype, device=self.device)

    def device_seconds(self, run: Callable[[], object], repeats: int = 10) -> float:
        """Return device seconds of one ``run``: the median over several rounds of ``repeats``."""
        run()
        filler = self.normal(_FILLER, _FILLER)
        rounds = [self._round(run, repeats, filler) for _ in range(_ROUNDS)]
        return statistics.median(rounds)

    def host_seconds(self, run: Callable[[], object], repeats: int = 100) -> float:
        """Return host seconds of one ``run``, which must not wait for the device."""
        run()
        rounds = []
        for _ in range(_ROUNDS):
            self.module.synchronize()
            start = self.host_ns()
            for _ in range(repeats):
                run()
            rounds.append((self.host_ns() - start) / 1e9 / repeats)
        self.module.synchronize()
        return statistics.median(rounds)

    def blocking_seconds(self, run: Callable[[], object]) -> float:
        """Return the seconds until one ``run`` and its device work are done; the device is idle before."""
        self.module.synchronize()
        start = self.host_ns()
        run()
        self.module.synchronize()
        return (self.host_ns() - start) / 1e9

    def _round(self, run: Callable[[], object], repeats: int, filler: torch.Tensor) -> float:
        start, end = (self.module.Event(enable_timing=True) for _ in range(2))
        filler @ filler
        start.record()
        for _ in range(repeats):
            run()
        end.record()
        self.module.synchronize()
        milliseconds: float = start.elapsed_time(end)
        return milliseconds / 1e3 / repeats


def cuda_machine() -> Machine:
    """Return this process's GPU, and its rank in torchrun's environment (without it, a single rank)."""
    local = number_of_launcher("LOCAL_RANK", 0)
    device = torch.device("cuda", local)
    torch.cuda.set_device(device)
    world = number_of_launcher("WORLD_SIZE", 1)
    return Machine(
        device,
        time.perf_counter_ns,
        rank=number_of_launcher("RANK", 0),
        world_size=world,
        ranks_per_node=number_of_launcher("LOCAL_WORLD_SIZE", world),
    )


def simulated_machine(hardware: str, gpus: int) -> Machine:
    """Return a simulated GPU of a profile, with its process group."""
    from fsdpbench.sim import Simulation

    profile = load_profile(hardware)
    gpus_per_node = profile.gpus_per_node
    simulation = Simulation.start(profile, gpus, gpus_per_node)
    if not dist.is_initialized():
        simulation.init_process_group()
    return Machine(
        torch.device("sim", 0), simulation.cpu_ns, world_size=gpus, ranks_per_node=min(gpus, gpus_per_node)
    )


def base_for(machine: Machine, named: str | None) -> HardwareProfile:
    """Return the profile `named`, by default the packaged one nearest to `machine`. Raises `UsageError`."""
    if named:
        return load_profile(named)
    found = profile_like(machine.name, machine.module.mem_get_info()[1])
    return packaged(found, f"no packaged profile is near {machine.name!r}: name one by --base")


def packaged(name: str | None, otherwise: str) -> HardwareProfile:
    """Return the packaged profile `name`. Raises `UsageError` with `otherwise` and the known names."""
    if name not in profile_names():
        raise UsageError(f"{otherwise} ({', '.join(profile_names())})")
    return load_profile(name)
