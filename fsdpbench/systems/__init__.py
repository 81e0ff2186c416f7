"""The systems under test, by name."""

from __future__ import annotations

from fsdpbench.errors import unknown
from fsdpbench.systems.base import BuildContext, System
from fsdpbench.systems.fsdp1 import ImplFsdp1, TorchFsdp1
from fsdpbench.systems.fsdp2 import ImplFsdp2, TorchFsdp2
from fsdpbench.systems.unsharded import Single, TorchDdp

SYSTEMS: dict[str, System] = {
    system.name: system
    for system in (ImplFsdp2(), ImplFsdp1(), TorchFsdp2(), TorchFsdp1(), TorchDdp(), Single())
}


def get_system(name: str) -> System:
    """The system of that name. Raises `UsageError` with the nearest names."""
    if name not in SYSTEMS:
        raise unknown("system", name, SYSTEMS, "fsdpbench list systems")
    return SYSTEMS[name]


__all__ = ["SYSTEMS", "BuildContext", "System", "get_system"]
