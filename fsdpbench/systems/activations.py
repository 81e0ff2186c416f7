"""The setting `activation_offload`: on which modules it is put, and with what it cannot be."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from fsdpbench.configuration.config import Config
from fsdpbench.configuration.degrees import PARALLEL


def offload_if_asked(units: Iterable[nn.Module], config: Config) -> None:
    """Offload what `units`, not yet wrapped, save for backward, if `config` asks for it."""
    if config.settings.activation_offload:
        from fsdpbench.impl import offload_activations

        offload_activations(units)


def refuse_offload(config: Config) -> dict[str, str]:
    """Why `config` cannot offload activations: setting -> reason."""
    settings = config.settings
    if not settings.activation_offload:
        return {}
    name = "activation_offload"
    if settings.wrap == "root":
        return {name: "there are no units below the root, which would fetch all of it back together"}
    if settings.compile:
        return {name: "a compiled block keeps its saved tensors to itself: leave compile out"}
    if settings.cpu_offload and config.device == "sim":
        return {
            name: "copies of shards (cpu_offload) and of activations share a link, and simulated ones do not "
            "slow each other: use one of them"
        }
    for other in PARALLEL:
        if getattr(settings, other) > 1:
            return {name: f"tensors that {other} saves are parts of others: leave {other} at 1"}
    return {}
