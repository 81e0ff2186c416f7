"""A graph of the simulated device, lowered by Inductor as if for its GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fsdpbench.sim.torch_device.compile.plan_cache import of_compiler
from fsdpbench.sim.torch_device.compile.pretended import pretended_gpu, properties
from fsdpbench.sim.torch_device.compile.refusals import refuse_graph
from fsdpbench.sim.torch_device.compile.scheduling import PlanScheduling
from fsdpbench.sim.torch_device.compile.wrapper import PlanWrapper
from fsdpbench.sim.torch_device.tensors import is_on_device, is_simulated
from fsdpbench.torch_internals import (
    compiler_config,
    detect_fake_mode,
    inductor_compile_fx,
    inductor_config,
)

_GPU = ("cuda", 0)
SETTINGS: dict[str, Any] = {
    "compile_threads": 1,
    "benchmark_harness": False,
    "triton.autotune_at_compile_time": False,
}


def lower(gm: Any, example_inputs: Sequence[Any], captures: bool = False, **about: Any) -> Any:
    """What Inductor calls to have one graph compiled (forward or backward, fake inputs): the callable graph.
    Sizes may be symbols. `captures`: as a CUDA graph. Raises CompileRefusedError, naming what cannot be
    simulated.
    """
    refuse_graph(gm.graph)
    inputs = _retarget(gm, example_inputs)
    static = tuple(about.get("static_input_idxs") or ()) if captures else None
    with (
        pretended_gpu(PlanScheduling, PlanWrapper.capturing(static)),
        inductor_config.patch(SETTINGS),
        compiler_config.patch(cache_key_tag=cache_tag(captures)),
    ):
        return inductor_compile_fx.compile_fx_inner(gm, inputs, **about)


def _retarget(gm: Any, inputs: Sequence[Any]) -> list[Any]:
    """Write the GPU's device into the graph, and return its (fake) inputs on that device."""
    gpu = torch.device(*_GPU)
    mode = detect_fake_mode(inputs)

    def moved(value: Any) -> Any:
        return gpu if isinstance(value, torch.device) and is_simulated(value) else value

    for node in gm.graph.nodes:
        node.args = torch.fx.node.map_aggregate(node.args, moved)
        node.kwargs = torch.fx.node.map_aggregate(node.kwargs, moved)
    gm.recompile()
    if mode is None:
        return list(inputs)
    with mode, torch.no_grad():
        return [
            torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=gpu)
            if isinstance(value, torch.Tensor) and is_on_device(value)
            else value
            for value in inputs
        ]


def cache_tag(captures: bool) -> str:
    """What a plan depends on beside the graph, torch and its settings: these sources, the GPU, and whether it
    is captured."""
    return f"simulated {of_compiler()} {properties()}{' captured' if captures else ''}"
