"""The state of DTensor's random numbers stays on the host.

torch copies the state to the device, so that rank 0's can be sent to all, and back before each random
operator. Simulated tensors lose their values on that way, and what torch then decided was reported as the
script's decision. All simulated ranks are one: their states agree, and nothing is sent.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fsdpbench.sim.torch_device.tensors import is_simulated
from fsdpbench.torch_internals import OffsetBasedRNGTracker, expect, replace


def install_random_state() -> None:
    """Keep the state on the host, and do not compare the ranks' states, where the device is simulated."""
    copied = expect(OffsetBasedRNGTracker, "_get_device_state")
    replace(
        OffsetBasedRNGTracker,
        __init__=_without_comparing(expect(OffsetBasedRNGTracker, "__init__")),
        _get_device_state=_on_the_host(copied),
    )


def _without_comparing(original: Callable[..., None]) -> Callable[..., None]:
    def init(self: Any, device_mesh: Any, run_state_sync: bool = True) -> None:
        original(self, device_mesh, run_state_sync=False)
        if run_state_sync and not is_simulated(self._device):
            original(self, device_mesh)

    return init


def _on_the_host(original: Callable[[Any], torch.Tensor]) -> Callable[[Any], torch.Tensor]:
    def state(self: Any) -> torch.Tensor:
        copied = original(self)
        if not is_simulated(self._device):
            return copied
        on_host: torch.Tensor = self._device_handle.get_rng_state()
        return on_host

    return state
