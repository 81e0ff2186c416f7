"""Launches of kernels that torch does not know, Triton's for example, as one operator of the device.

A kernel's effect is unknown: it may write all its tensors. Its price is a user's (`operator_price`), a known
library's, or by the bytes of its arguments, counted as unknown.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fsdpbench.sim.torch_device.accelerator import ACCELERATOR
from fsdpbench.sim.torch_device.operators.known_values import forget
from fsdpbench.sim.torch_device.operators.plans import Plan, carry_out, inputs_text
from fsdpbench.sim.torch_device.prices.families import price_of_kernel
from fsdpbench.sim.torch_device.tensors import is_on_device, meta_twin, record_of

_SCHEMA = "launch(str kernel, str[] names, Tensor(a!)[] tensors, str[] numbered, Scalar[] numbers) -> ()"


def register_launches() -> torch.library.Library:
    """Define the operator `fsdpbench::launch`; the caller must keep the returned library."""
    library = torch.library.Library("fsdpbench", "FRAGMENT")
    library.define(_SCHEMA)
    library.impl("launch", _launch, "PrivateUse1")
    library.impl("launch", lambda *args: None, "Meta")
    return library


def _launch(
    kernel: str,
    names: Sequence[str],
    tensors: Sequence[torch.Tensor],
    numbered: Sequence[str],
    numbers: Sequence[float],
) -> None:
    """Launch `kernel` with named tensors and numbers on the current stream."""
    accelerator = ACCELERATOR
    accelerator.require_started()
    if accelerator.backward.is_active:
        accelerator.backward.arrive(tensors)
    on_device = [tensor for tensor in tensors if is_on_device(tensor)]
    arguments = dict(zip((*names, *numbered), (*map(meta_twin, tensors), *numbers), strict=True))
    plan = Plan(kernel, [], None, price_of_kernel(kernel, arguments, accelerator.kernel_costs))
    plan.cpu_ns = accelerator.cpu_costs.operator_ns
    if accelerator.sanitizer is not None:
        operator: Any = torch.ops.fsdpbench.launch.default
        plan.uses = accelerator.sanitizer.uses_of(operator, (kernel, names, tensors, numbered, numbers), {})
    if accelerator.known_values:
        for tensor in on_device:
            forget(record_of(tensor.untyped_storage()))
    carry_out(accelerator, plan, list(tensors), inputs_text(tensors) if accelerator.trace is not None else "")
