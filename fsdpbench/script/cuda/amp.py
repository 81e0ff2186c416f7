"""`torch.autocast("cuda")` is the simulated device's autocast; `GradScaler` needs no more than that.

The scaler asks the device whether gradients were finite, gets the placeholder (zero: they were), and steps.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from fsdpbench.script.cuda.device_names import CUDA
from fsdpbench.script.cuda.refusals import Replacements
from fsdpbench.sim.torch_device.accelerator import DEVICE_TYPE
from fsdpbench.torch_internals import is_autocast_available, replace

_TAKE_DEVICE_TYPE = (
    "get_autocast_dtype",
    "set_autocast_dtype",
    "is_autocast_enabled",
    "set_autocast_enabled",
)


def map_amp(replacements: Replacements) -> None:
    """Map the names of devices that autocast takes as strings."""
    for name in _TAKE_DEVICE_TYPE:
        replacements.wrap(torch, name, _naming_device)
    replacements.add(is_autocast_available, _naming_device(is_autocast_available))
    replacements.add(torch.get_autocast_gpu_dtype, functools.partial(torch.get_autocast_dtype, DEVICE_TYPE))
    replacements.add(torch.set_autocast_gpu_dtype, functools.partial(torch.set_autocast_dtype, DEVICE_TYPE))
    autocast: Any = torch.amp.autocast_mode.autocast
    original = autocast.__init__

    @functools.wraps(original)
    def init(self: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
        original(self, _device_type(device_type), *args, **kwargs)

    replace(autocast, __init__=init)


def _device_type(name: Any) -> Any:
    return DEVICE_TYPE if name == CUDA else name


def _naming_device(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function whose first argument is a device's name. Without it torch means "cuda"."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not args or not isinstance(args[0], str):
            return function(DEVICE_TYPE, *args, **kwargs)
        return function(_device_type(args[0]), *args[1:], **kwargs)

    return call
