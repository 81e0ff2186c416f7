"""Functions of `torch._C` that drive CUDA, and that builds without it lack: `extension.toml` says which are
functions of `torch.cuda`, settings that are only kept, fixed answers, or refused by name."""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch

from fsdpbench.base.torch_internals import find
from fsdpbench.script.cuda.refusals import refusal
from fsdpbench.sim.torch_device.accelerator import Accelerator
from fsdpbench.sim.torch_device.operators.plans import Plan, carry_out
from fsdpbench.sim.torch_device.prices import OperatorCost


def extend(accelerator: Accelerator) -> None:
    """Give `torch._C` the functions that it lacks; in a build for CUDA, instead of those of a real device."""
    for name, function in functions(accelerator).items():
        setattr(find("c_extension"), name, function)


def functions(accelerator: Accelerator) -> dict[str, Callable[..., Any]]:
    """Return the functions by their names in `torch._C`."""
    table: Any = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
    pairs = table["kept"].items()
    cuda, kept = torch.cuda, {getter: value for getter, (_, value) in pairs}
    made: dict[str, Callable[..., Any]] = {
        "getCurrentRawStream": lambda device: cuda.current_stream(device).cuda_stream,
        "getCurrentStream": lambda device: _NUMBERS(cuda.current_stream(device)),
        "getDefaultStream": lambda device: _NUMBERS(cuda.default_stream(device)),
        "setStream": lambda stream_id, **_: cuda.set_stream(cuda.Stream(stream_id=stream_id)),
        "sleep": partial(_spin, accelerator),
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
    """Launch a kernel that takes so many cycles of the data sheet's clock (`torch.cuda._sleep`)."""
    profile = accelerator.kernel_costs.profile
    hertz = profile.peak_flops["fp32"] / (2 * profile.sm_count * profile.compute.fp32_lanes)
    plan = Plan("sleep", [], None, OperatorCost("spin_kernel", round(cycles / hertz * 1e9)))
    plan.cpu_ns = accelerator.cpu_costs.operator_ns
    carry_out(accelerator, plan, [])
