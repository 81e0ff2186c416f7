"""Parts of fms-acceleration's Llamas in the bench's own.

Its kernels in Triton (of unsloth) turn queries and keys in place: one pass over them forward, one backward.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from fsdpbench.torch_internals import replaced


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
