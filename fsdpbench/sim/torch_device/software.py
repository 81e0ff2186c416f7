"""Mechanisms: behaviour of other software that has to be put instead of the installed one's.

Each belongs to one key of a software profile and is a context manager: `install` enters those that a profile
switches on, and closing what it returns puts everything back.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch
from torch import Tensor

from fsdpbench.sim.model.software_profile import SoftwareProfile
from fsdpbench.sim.torch_device import gpt_parts, torch_1_13
from fsdpbench.torch_internals import replaced

# Parts of fms-acceleration's Llamas in the bench's own.
# Its kernels in Triton (of unsloth) turn queries and keys in place: one pass over them forward, one backward.


def fused_rotary() -> AbstractContextManager[None]:
    """Llamas turn queries and keys by one kernel each."""
    from fsdpbench.workloads import rotations

    one_pass = rotations.Rotation(rotations.rotary_tables, turn_in_one_pass)
    return replaced(rotations, ROTATIONS={**rotations.ROTATIONS, "halves": one_pass})


def turn_in_one_pass(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """What the kernel reads and writes; a simulated tensor holds no numbers to turn."""
    result: Tensor = _OnePass.apply(x)
    return result


class _OnePass(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return -x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return -gradient


Mechanism = Callable[[], AbstractContextManager[None]]

MECHANISMS: dict[str, Mechanism] = {
    "fsdp1.copies_gradients": torch_1_13.copied_gradients,
    "fsdp1.limits_prefetched_units": torch_1_13.limited_prefetched_units,
    "fsdp1.views_on_compute_stream": torch_1_13.views_on_compute_stream,
    "checkpointing.reentrant": torch_1_13.reentrant_checkpoints,
    "operators.composed_rms_norm": torch_1_13.composed_rms_norm,
    "operators.fused_rotary": fused_rotary,
    "attention.unpads": gpt_parts.unpadded_attention,
    "trainer.fused_loss": gpt_parts.fused_loss,
}
"""By key of a profile; the other keys are read where they count."""


def install(software: SoftwareProfile) -> ExitStack:
    """Put in place what `software` switches on. Closing the stack undoes all of it.

    Raises `TorchInternalError` where the installed torch lacks what has to be replaced; nothing is left in
    place then.
    """
    with ExitStack() as entered:
        for key in software.changes:
            if key in MECHANISMS:
                entered.enter_context(MECHANISMS[key]())
        return entered.pop_all()
