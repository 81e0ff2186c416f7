"""Inductor's own GPU lowering of a graph, and its metrics: nothing of the simulator's plans is used here.

What a machine without GPU lacks is put in place again, and as little of it as this needs.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import torch


class Metrics(NamedTuple):
    """``torch._inductor.metrics`` of one graph: `generated_kernel_count` and `num_bytes_accessed`."""

    kernels: int
    nbytes: int


def metrics_of(gm: Any, inputs: Sequence[Any], is_backward: bool) -> Metrics:
    """Lower a copy of a graph of the device `sim` for "cuda", with Inductor's own scheduling and wrapper."""
    from torch._inductor import config, metrics
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.graph import GraphLowering

    module = torch.fx.GraphModule(gm, copy.deepcopy(gm.graph))
    module.meta.update(gm.meta)
    found: list[int] = []

    def codegen_only(self: Any) -> Any:
        self.codegen()
        found.append(self.count_bytes()[0])
        raise _GeneratedError

    before = metrics.generated_kernel_count
    settings = {"compile_threads": 1, "force_disable_caches": True, "triton.autotune_at_compile_time": False}
    with _gpu(), mock.patch.object(GraphLowering, "compile_to_module", codegen_only), config.patch(settings):
        moved = _on_gpu(module, inputs)
        try:
            compile_fx_inner(module, moved, is_backward=is_backward)
        except Exception as error:
            if "_GeneratedError" not in repr(error):
                raise
    return Metrics(metrics.generated_kernel_count - before, sum(found))


class _GeneratedError(Exception):
    """The code is there; it is not compiled."""


def _on_gpu(module: Any, inputs: Sequence[Any]) -> list[Any]:
    gpu = torch.device("cuda", 0)
    for node in module.graph.nodes:
        device = node.kwargs.get("device")
        if device is not None and device.type == "sim":
            node.kwargs = {**node.kwargs, "device": gpu}
    module.recompile()
    mode = torch._guards.detect_fake_mode(inputs)
    assert mode is not None
    with mode, torch.no_grad():
        return [
            torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=gpu)
            if isinstance(value, torch.Tensor) and value.device.type == "sim"
            else value
            for value in inputs
        ]


@contextmanager
def _gpu() -> Iterator[None]:
    """An H100 with Triton, as far as Inductor looks."""
    from torch._dynamo import device_interface

    h100 = SimpleNamespace(
        major=9,
        minor=0,
        multi_processor_count=132,
        max_threads_per_multi_processor=2048,
        warp_size=32,
        regs_per_multiprocessor=65536,
        gcnArchName="",
        total_memory=80 * 2**30,
        name="H100",
    )
    interface = mock.MagicMock()
    interface.get_device_properties.return_value = interface.Worker.get_device_properties.return_value = h100
    interface.get_compute_capability.return_value = 90
    interface.current_device.return_value = 0
    interface.device_count.return_value = 1
    answers = {
        "get_device_properties": lambda device=None: h100,
        "get_device_capability": lambda device=None: (9, 0),
        "current_device": lambda: 0,
        "device_count": lambda: 1,
        "get_rng_state": lambda device="cuda": torch.empty(16, dtype=torch.uint8),
        "set_rng_state": lambda state, device="cuda": None,
    }
    with ExitStack() as stack:
        for module in list(sys.modules.values()):
            if getattr(module, "__name__", "").startswith("torch.") and "has_triton" in vars(module):
                stack.enter_context(mock.patch.object(module, "has_triton", return_value=True))
        for name, answer in answers.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, answer))
        stack.enter_context(mock.patch.dict(device_interface.device_interfaces, {"cuda": interface}))
        stack.enter_context(mock.patch("torch.utils._triton.triton_hash_with_backend", return_value=""))
        stack.enter_context(mock.patch.object(torch.version, "cuda", "12.8"))
        invert = mock.patch.object(
            torch.Tensor, "__invert__", lambda self: torch.bitwise_not(self), create=True
        )
        stack.enter_context(invert)
        yield
