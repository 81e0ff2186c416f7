"""`torch.cuda`, mapped function by function, in place, to the simulated device's module.

In place, because torch and libraries hold the module already. Functions that mean nothing without a GPU stay
torch's own, which answer that CUDA is unavailable.
"""

import os
import sys
import tomllib
import types
from collections.abc import Callable
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any, Self

import torch
import torch.cuda.amp.common
import torch.cuda.memory
import torch.cuda.nccl
import torch.cuda.nvtx
import torch.cuda.profiler
import torch.cuda.random
import torch.cuda.streams

from fsdpbench.base.torch_internals import INTERNALS, expect, find, last_part, patch, replace
from fsdpbench.script.cuda.device_names import Generator
from fsdpbench.script.cuda.refusals import refusal
from fsdpbench.sim.torch_device.accelerator import DEVICE_TYPE, Accelerator
from fsdpbench.sim.torch_device.operators.plans import Plan, carry_out
from fsdpbench.sim.torch_device.patches.dynamo import as_function
from fsdpbench.sim.torch_device.prices import OperatorCost

_SUBMODULES = (torch.cuda.memory, torch.cuda.random, torch.cuda.streams)
_AS_IN_SIMULATION = ("cuda_lazy_init", "cuda_is_in_bad_fork")
_EXCHANGING = ("cuda_exchange_device", "cuda_maybe_exchange_device")
_CUDA_VERSION = torch.version.cuda or "12.8"  # torchvision compares it with its own
_VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"
_OF_ACCELERATOR = {name for name in torch.accelerator.memory.__all__ if hasattr(torch.cuda, name)}
_ONLY_SIMULATED = ("get_amp_supported_dtype",)


def map_cuda_module(accelerator: Accelerator, local_rank: int) -> None:
    """Give `torch.cuda` the functions of `torch.sim`, and a few that only CUDA has. The single device,
    `accelerator`, has the index `local_rank`."""
    os.environ[_VISIBLE_DEVICES] = ""  # real GPUs, if any, are not used
    module = torch.get_device_module(DEVICE_TYPE)
    functions = {name: as_function(getattr(module, name)) for name in _public_names(module)}
    functions |= _ONLY_CUDA | {
        "current_device": lambda: local_rank,
        "is_current_stream_capturing": lambda: _is_capturing(accelerator),
        "default_generators": tuple(_DefaultGenerator() for _ in range(module.device_count())),
    }
    for name in ("memory", "device"):  # a module and a class: only what they use is replaced
        functions.pop(name)
    for name in _ONLY_SIMULATED:  # torch calls it for every device but CUDA
        setattr(torch.cuda, name, functions.pop(name))
    private: dict[str, Any] = {name: getattr(module, last_part(name)) for name in _AS_IN_SIMULATION}
    # Two functions: Dynamo's table of torch's functions must not contain one of them twice.
    private |= {name: lambda index: local_rank for name in _EXCHANGING}
    for name, function in (private | _ONLY_CUDA_PRIVATE).items():
        find(name)
        functions[last_part(name)] = function
    originals = {name: expect(torch.cuda, name) for name in functions}
    replace(torch.cuda, **functions)
    for submodule in _SUBMODULES:
        copies = {name for name in functions if getattr(submodule, name, None) is originals[name]}
        replace(submodule, **{name: functions[name] for name in copies})
    for name in ("cuda_record_memory_history", "cuda_snapshot", "cuda_dump_snapshot"):
        patch(name, _taking_its_place(getattr(module.memory, last_part(name))))
    replace(torch.cuda.memory, memory_snapshot=module.memory.memory_snapshot)
    functions["Stream"].cuda_stream = property(lambda stream: stream.number)
    functions["Stream"].priority_range = staticmethod(lambda: (0, -3))
    for name in ("ipc_handle", "from_ipc_handle"):
        setattr(functions["Event"], name, refusal(f"torch.cuda.Event.{name}", "share tensors by collectives"))
    extend(accelerator)
    _map_submodules(accelerator)


def _taking_its_place(simulated: Any) -> Callable[[Any], Any]:
    return lambda original: simulated


def _public_names(module: Any) -> list[str]:
    kinds = [kind for kind in type(module).__mro__ if kind not in (types.ModuleType, object)]
    names = {name for owner in (*kinds, module) for name in vars(owner)}
    return [name for name in names if not name.startswith("_")]


def _map_submodules(accelerator: Accelerator) -> None:
    patch("cuda_nvtx", _taking_its_place(_Ranges(accelerator)))
    replace(torch.cuda.profiler, **dict.fromkeys(("start", "stop"), lambda: None))
    replace(torch.version, cuda=_CUDA_VERSION)
    linalg = torch.backends.cuda.preferred_linalg_library
    replace(
        torch.backends.cuda, is_flash_attention_available=lambda: True,
        preferred_linalg_library=lambda backend=None: linalg(),
        cufft_plan_cache=types.SimpleNamespace(size=0, max_size=4096, clear=lambda: None),
    )  # fmt: skip
    replace(torch.backends.cudnn, is_available=lambda: True, version=lambda: 91002)
    replace(
        torch.accelerator, is_available=lambda: True, device_count=torch.cuda.device_count,
        current_device_index=torch.cuda.current_device, set_device_index=torch.cuda.set_device,
        get_memory_info=torch.cuda.mem_get_info, empty_host_cache=lambda: None,
        **{name: getattr(torch.cuda, name) for name in _OF_ACCELERATOR},
    )  # fmt: skip


class _Ranges:
    """NVTX ranges, recorded as annotations of the trace."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._open: list[tuple[str, int]] = []

    def rangePushA(self, name: str) -> int:  # noqa: N802 (torch's names)
        self._open.append((name, self._accelerator.timeline.cpu))
        return len(self._open) - 1

    def rangePop(self) -> int:  # noqa: N802
        name, start = self._open.pop()
        if self._accelerator.trace is not None:
            self._accelerator.trace.annotation(name, start, self._accelerator.timeline.cpu)
        return len(self._open)

    rangeStartA = rangePushA  # noqa: N815

    def rangeEnd(self, handle: int) -> None:  # noqa: N802
        if self._open:
            self.rangePop()

    def markA(self, name: str) -> None:  # noqa: N802
        if self._accelerator.trace is not None:
            now = self._accelerator.timeline.cpu
            self._accelerator.trace.annotation(name, now, now)


class _DefaultGenerator(Generator):
    """The device's own generator, with the state of `torch.cuda.get_rng_state`."""

    def get_state(self) -> torch.Tensor:
        return torch.cuda.get_rng_state()

    def set_state(self, new_state: torch.Tensor) -> Self:
        torch.cuda.set_rng_state(new_state)
        return self

    def manual_seed(self, seed: int) -> Self:
        torch.cuda.manual_seed(seed)
        return self

    def initial_seed(self) -> int:
        return torch.cuda.initial_seed()


def _is_capturing(accelerator: Accelerator) -> bool:
    """Return whether a CUDA graph is being recorded: False, since none ever is, but True for `SyncBatchNorm`.

    With True it skips three masks for ranks with empty inputs, whose results have no shape without data.
    The CPU's waits for these masks are simulated.
    """
    if sys._getframe(2).f_globals.get("__name__") != INTERNALS["sync_batch_norm_module"].path:
        return False
    for _ in range(3):
        accelerator.copy_over_host_link("DtoH", 8, blocking=True)
    return True


_CALLS_OF_RUNTIME = ("cudaProfilerStart", "cudaProfilerStop", "cudaHostRegister", "cudaHostUnregister")
_RUNTIME = types.SimpleNamespace(
    cudaMemGetInfo=lambda device: torch.cuda.mem_get_info(device),
    **dict.fromkeys(_CALLS_OF_RUNTIME, lambda *args: 0),
)
"""`torch.cuda.cudart()`: scripts start and stop external profilers with it, checkpoints pin their staging
memory. All host memory counts as pinned."""
_ONLY_CUDA_PRIVATE: dict[str, Any] = {
    "cuda_is_compiled": lambda: True,
    "cuda_lazy_call": lambda callable, **kwargs: callable(),
}
_ONLY_CUDA: dict[str, Any] = {
    "cudart": lambda: _RUNTIME,
    "is_tf32_supported": lambda: True,
    "get_arch_list": lambda: [f"sm_{''.join(map(str, torch.cuda.get_device_capability()))}"],
}


def extend(accelerator: Accelerator) -> None:
    """Add the functions that `torch._C` lacks; in a build for CUDA, replace those of the real device."""
    for name, function in functions(accelerator).items():
        setattr(find("c_extension"), name, function)


def functions(accelerator: Accelerator) -> dict[str, Callable[..., Any]]:
    """Return the functions by their names in `torch._C`."""
    table: Any = tomllib.loads(Path(__file__).with_name("extension.toml").read_text(encoding="utf-8"))
    pairs = table["kept"].items()
    cuda, kept = torch.cuda, {getter: value for getter, (_, value) in pairs}
    made: dict[str, Callable[..., Any]] = {
        "getCurrentRawStream": lambda device: cuda.current_stream(device).cuda_stream,
        "getCurrentStream": lambda device: _NUMBERS(cuda.current_stream(device)),
        "getDefaultStream": lambda device: _NUMBERS(cuda.default_stream(device)),
        "setStream": lambda stream_id, **_: cuda.set_stream(cuda.Stream(stream_id=stream_id)),
        "memoryStats": lambda device: tomllib.loads(  # a table for each part of a dotted name
            "\n".join(f"{name} = {count}" for name, count in cuda.memory_stats(device).items())
        ),
        "sleep": partial(_spin, accelerator),
        "hostMemoryStats": lambda: accelerator.host.nested(),
        "setMemoryFraction": lambda fraction, device: accelerator.allocator.limit(fraction),
        "getMemoryFraction": lambda device: accelerator.allocator.conf.per_process_memory_fraction or 1.0,
        "resetAccumulatedHostMemoryStats": lambda: accelerator.host.reset(peaks=False),
        "resetPeakHostMemoryStats": lambda: accelerator.host.reset(peaks=True),
        **{
            name: partial(lambda find, *args, **kwargs: find(cuda)(*args, **kwargs), attrgetter(public))
            for name, public in table["public"].items()
        },
        **{name: partial(lambda name, *_: kept[name], name) for name in kept},
        **{put: partial(lambda name, to, *_: kept.update({name: to}), name) for name, (put, _) in pairs},
        **{name: partial(lambda answer, *_: answer, answer) for name, answer in table["answers"].items()},
        **dict.fromkeys(table["nothing"], lambda *_: None),
        **{name: refusal(f"{name} of torch's C extension", out) for name, out in table["refused"].items()},
    }
    return {f"_cuda_{name}": function for name, function in made.items()}


_NUMBERS = attrgetter("stream_id", "device_index", "device_type")


def _spin(accelerator: Accelerator, cycles: int) -> None:
    """Launch a kernel that takes `cycles` cycles of the data sheet's clock (`torch.cuda._sleep`)."""
    profile = accelerator.kernel_costs.profile
    hertz = profile.peak_flops["fp32"] / (2 * profile.sm_count * profile.compute.fp32_lanes)
    plan = Plan("sleep", [], None, OperatorCost("spin_kernel", round(cycles / hertz * 1e9)))
    plan.cpu_ns = accelerator.cpu_costs.operator_ns
    carry_out(accelerator, plan, [])
