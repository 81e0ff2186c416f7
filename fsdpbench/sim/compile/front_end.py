"""`torch.compile` of programs on the simulated device, from the moment that something compiles."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fsdpbench.sim.compile.refusals import refuse_options
from fsdpbench.sim.dynamo import use_real_dynamo
from fsdpbench.sim.tensors import is_on_device
from fsdpbench.torch_internals import compiler_config, patch, trace_rules


@functools.cache
def install() -> None:
    """Have Inductor compile graphs of simulated tensors into plans. The first call of a process does it."""
    use_real_dynamo()
    patch("compile_fx", _compile_by_device)
    _hide_the_simulator()


def _hide_the_simulator() -> None:
    """Dynamo looks into every frame of Python while something compiled runs, so into the device's kernels
    where an eager operator calls them. A GPU's are no frames of Python; these are to be none."""
    trace_rules.add("fsdpbench.sim")
    trace_rules.add("fsdpbench.torch_internals")


def _compile_by_device(original: Callable[..., Any]) -> Callable[..., Any]:
    def compile_fx(model: Any, inputs: Sequence[Any], *args: Any, **options: Any) -> Any:
        simulated = any(isinstance(value, torch.Tensor) and is_on_device(value) for value in inputs)
        if not simulated or args or "inner_compile" in options:
            return original(model, inputs, *args, **options)
        from fsdpbench.sim.compile.lowering import cache_tag, lower

        refuse_options(options.get("config_patches") or {})
        with compiler_config.patch(cache_key_tag=cache_tag()):
            return original(model, inputs, inner_compile=lower, **options)

    return compile_fx
