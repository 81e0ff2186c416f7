"""Rehearsal of `--device cuda` without a GPU, on the simulated "cuda" of scripts; processes start with it.

    FSDPBENCH_SIMULATED_CUDA=h100-80gb fsdpbench run --device cuda --gpus 1 --model gpt-tiny

Everything above torch's C++ runs as on a GPU: the device `cuda`, the worker, NCCL's setup, events, memory
statistics, `calibrate`. The simulated device replaces the GPU, with one rank per process;
each rank assumes that the other ranks hold the same data. Its trace replaces the profiler's. So this cannot
show whether CUDA, NCCL, CUPTI and real numbers behave as expected.
"""

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.cuda
import torch.profiler
from torch.profiler import ProfilerAction

from fsdpbench.base.configuration.simulated_cuda import simulated_cuda
from fsdpbench.base.torch_internals import replace
from fsdpbench.engine.devices.base import Placement
from fsdpbench.script.cuda.cuda_module import map_cuda_module
from fsdpbench.script.cuda.device_names import map_amp, map_device_names
from fsdpbench.script.cuda.distributed import map_distributed
from fsdpbench.script.cuda.profiling import ProfilerRequests, SimulatedProfile
from fsdpbench.script.cuda.refusals import Replacements
from fsdpbench.sim import Simulation
from fsdpbench.sim.model.profile import load_profile

_USERS = ("engine", "systems", "workloads", "lab.calibrate")
"""Parts of the bench that hold references to torch's functions; the simulation needs torch's own."""


def rehearse_where_asked(placement: Placement, gpus_per_node: int, *, host_clock: bool = False) -> bool:
    """Map "cuda" to the simulated device in this process, if the environment asks for it.

    `host_clock`: the host's clock shows simulated time too. Raises `UsageError`, `ProfileError`.
    """
    asked = simulated_cuda()
    if asked is None:
        return False
    profile = load_profile(asked.profile)
    simulation = Simulation.start(profile, placement.world_size, gpus_per_node, rank=placement.rank)
    simulation.accelerator.follows_numbers = True  # the bench sends its own numbers through the device
    replacements = Replacements()
    map_device_names(replacements, placement.local_rank)
    map_cuda_module(simulation.accelerator, placement.local_rank)
    map_amp(replacements)
    map_distributed(replacements, simulation)
    _Recording.simulation, _Recording.requests = simulation, ProfilerRequests()
    replacements.add(torch.profiler.profile, _Recording)
    _map_out_of_memory(simulation)
    replace(torch.cuda, device_count=lambda: asked.gpus)
    replacements.apply(also=tuple(f"fsdpbench.{name}." for name in _USERS))
    if host_clock:
        replace(time, perf_counter_ns=simulation.cpu_ns)
    return True


class _Recording(SimulatedProfile):
    """`torch.profiler.profile` for the simulated device: one recording, by the schedule."""

    simulation: Simulation

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._trace: Any = None
        self._folder = tempfile.TemporaryDirectory(prefix="fsdpbench-trace-")
        self._path = Path(self._folder.name) / "trace.json.gz"

    def step(self) -> None:
        """End a step of the schedule."""
        recorded, ends = self._trace, self.current_action is ProfilerAction.RECORD_AND_SAVE
        if recorded is not None:
            recorded.step()
        if recorded is not None and ends:
            recorded.__exit__(None, None, None)
            self._trace = None
        super().step()
        if self._trace is None and self.current_action in (
            ProfilerAction.RECORD,
            ProfilerAction.RECORD_AND_SAVE,
        ):
            self._trace = self.simulation.trace(self._path)
            self._trace.__enter__()

    def __exit__(self, *exc_info: object) -> None:
        if self._trace is not None:
            self._trace.__exit__(*exc_info)

    def export_chrome_trace(self, path: str, *args: Any, **kwargs: Any) -> None:
        """Write the recording, compressed if the name says so."""
        wanted = ProfilerRequests()
        wanted.export(path)
        wanted.copy(self._path)


def _map_out_of_memory(simulation: Simulation) -> None:
    """Replace the observers of CUDA's allocator, which builds of torch without CUDA lack."""
    import fsdpbench.engine.devices.real as device

    def attach(observe: Callable[[int, int, int, int], None]) -> None:
        def report(message: str) -> None:
            free, total = torch.cuda.mem_get_info()
            observe(0, 0, total, free)

        simulation.accelerator.on_out_of_memory = report

    replace(device, cuda_attach_out_of_memory_observer=attach)
