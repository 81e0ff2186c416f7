"""Operators that are computed again in backward, and must draw the same random numbers.

The partitioner wraps them, attention among them whether it drops anything or not: one wrapper keeps the
generator's state, the other puts it back. torch has both for the devices that it knows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fsdpbench.sim.torch_device.tensors import is_on_device, tensors_in
from fsdpbench.torch_internals import DispatchKey, run_and_save_rng_state, run_with_rng_state

_STATE_BYTES = 16
"""Of a CUDA generator's state: seed and offset."""


def install_random_numbers() -> None:
    """Let both wrappers take tensors of the device, whose operators draw nothing."""
    select: Any = DispatchKey.BackendSelect
    for wrapper, make in ((run_and_save_rng_state, _saving), (run_with_rng_state, _restoring)):
        # `py_impl` forgets what calls before, on the CPU, have found.
        wrapper.py_impl(select)(make(wrapper.py_kernels.pop(select)))


def _saving(original: Callable[..., Any]) -> Callable[..., Any]:
    def run(operator: Any, *args: Any, **kwargs: Any) -> Any:
        if not any(map(is_on_device, tensors_in(args, kwargs))):
            return original(operator, *args, **kwargs)
        return torch.zeros(_STATE_BYTES, dtype=torch.uint8), operator(*args, **kwargs)

    return run


def _restoring(original: Callable[..., Any]) -> Callable[..., Any]:
    def run(state: Any, operator: Any, *args: Any, **kwargs: Any) -> Any:
        if not any(map(is_on_device, tensors_in(args, kwargs))):
            return original(state, operator, *args, **kwargs)
        return operator(*args, **kwargs)

    return run
