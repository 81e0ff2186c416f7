"""Mapping of "cuda" and "nccl" to the simulated device and its backend, in this process.

Scripts name their device in many ways; each has a file here. Nothing is undone: the process is the script's.
"""

from typing import TYPE_CHECKING

import torch

from fsdpbench.script.cuda.compiling import compile_notes, leave_cache_alone, map_compile, wants_compiled
from fsdpbench.script.cuda.cuda_module import map_cuda_module
from fsdpbench.script.cuda.device_names import map_amp, map_device_names
from fsdpbench.script.cuda.distributed import map_distributed
from fsdpbench.script.cuda.profiling import ProfilerRequests, map_profiler
from fsdpbench.script.cuda.refusals import Replacements, refuse_what_cannot_be_simulated
from fsdpbench.script.triton_kernels import map_triton
from fsdpbench.sim.torch_device.operators.attention import fits_flash

if TYPE_CHECKING:
    from fsdpbench.sim import Simulation


def map_cuda(simulation: "Simulation") -> ProfilerRequests:
    """Map "cuda" and "nccl" to the started simulation; return the script's requests to the profiler."""
    replacements = Replacements()
    local_rank = simulation.rank % simulation.gpus_per_node
    map_device_names(replacements, local_rank)
    map_cuda_module(simulation.accelerator, local_rank)
    map_amp(replacements)
    map_distributed(replacements, simulation)
    map_triton()
    map_compile(replacements, simulation.accelerator)
    requests = map_profiler(replacements)
    replacements.add(torch.backends.cuda.can_use_flash_attention, fits_flash)
    refuse_what_cannot_be_simulated(replacements)
    replacements.apply()
    return requests


__all__ = ["ProfilerRequests", "compile_notes", "leave_cache_alone", "map_cuda", "wants_compiled"]
