"""What a simulated tensor answers when Python asks for its value: what is known of it, else zero."""

from __future__ import annotations

import torch

from fsdpbench.sim.torch_device.accelerator import ACCELERATOR
from fsdpbench.sim.torch_device.operators.choices import numbers_in
from fsdpbench.sim.torch_device.operators.known_values import Number, known_of


def placeholder(tensor: torch.Tensor) -> tuple[Number, bool]:
    """The value of a tensor with one element, of its dtype; and whether that is the truth."""
    numbers = numbers_in(tensor) if ACCELERATOR.known_values else None
    if numbers is not None:
        return numbers.item(), True
    known = known_of(tensor) if ACCELERATOR.known_values else None
    if known is not None:
        return known.value.item(), not known.assumed
    return torch.zeros((), dtype=tensor.dtype).item(), False
