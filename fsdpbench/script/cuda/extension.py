"""Functions of `torch._C` that torch's builds without CUDA lack, for torch's own code and for libraries.

`extension.toml` says which are functions of `torch.cuda`, settings that are only kept, fixed answers, or
refused by name. The rest is here.
"""

from __future__ import annotations

import functools
import operator
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from fsdpbench.base.torch_internals import find
from fsdpbench.script.cuda.refusals import refusal
from fsdpbench.sim.torch_device.accelerator import Accelerator
from fsdpbench.sim.torch_device.operators.plans import Plan, carry_out
from fsdpbench.sim.torch_device.prices import OperatorCost

_PREFIX = "_cuda_"


def extend(accelerator: Accelerator) -> None:
    """Give `torch._C` the functions that it lacks."""
    extension = find("c_extension")
    for name, function in functions(accelerator).items():
        if not hasattr(extension, _PREFIX + name):
            setattr(extension, _PREFIX + name, function)


def functions(accelerator: Accelerator) -> dict[str, Callable[..., Any]]:
    """Return the functions by their names, without `_cuda_`."""
    table: Any = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
    made: dict[str, Callable[..., Any]] = {
        "getArchFlags": lambda: " ".join(torch.cuda.get_arch_list()),
        "getCurrentRawStream": lambda device: torch.cuda.current_stream(device).cuda_stream,
        "getCurrentStream": lambda device: _as_numbers(torch.cuda.current_stream(device)),
        "getDefaultStream": lambda device: _as_numbers(torch.cuda.default_stream(device)),
        "setStream": lambda stream_id, **device: torch.cuda.set_stream(
            torch.cuda.Stream(stream_id=stream_id)
        ),
        "memoryStats": lambda device: _nested(torch.cuda.memory_stats(device)),
        "sleep": functools.partial(_spin, accelerator),
    }
    for name, public in table["public"].items():
        made[name] = functools.partial(lambda path, *args, **kw: _called(path, args, kw), public)
    kept: dict[str, Any] = {}
    for getter, (setter, kept[getter]) in table["kept"].items():
        made[getter] = functools.partial(kept.__getitem__, getter)
        made[setter] = functools.partial(lambda name, to, *rest: operator.setitem(kept, name, to), getter)
    for name, answer in table["answers"].items():
        made[name] = functools.partial(lambda answer, *args: answer, answer)
    nothing = dict.fromkeys(table["nothing"], lambda *args: None)
    refused = {name: refusal(f"torch._C.{_PREFIX}{name}", out) for name, out in table["refused"].items()}
    return made | nothing | refused


def _called(path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return operator.attrgetter(path)(torch.cuda)(*args, **kwargs)


def _as_numbers(stream: Any) -> tuple[int, int, int]:
    return stream.stream_id, stream.device_index, stream.device_type


def _nested(flat: dict[str, int]) -> dict[str, Any]:
    """Return counters named "a.b.c" as dictionaries in dictionaries."""
    whole: dict[str, Any] = {}
    for name, value in flat.items():
        *outer, last = name.split(".")
        functools.reduce(lambda place, part: place.setdefault(part, {}), outer, whole)[last] = value
    return whole


def _spin(accelerator: Accelerator, cycles: int) -> None:
    """Launch a kernel that takes so many cycles of the data sheet's clock (`torch.cuda._sleep`)."""
    profile = accelerator.kernel_costs.profile
    hertz = profile.peak_flops["fp32"] / (2 * profile.sm_count * profile.compute.fp32_lanes)
    plan = Plan("sleep", [], None, OperatorCost("spin_kernel", round(cycles / hertz * 1e9)))
    plan.cpu_ns = accelerator.cpu_costs.operator_ns
    carry_out(accelerator, plan, [])
