"""The packaged hardware profile that looks most like a GPU that is here."""

from __future__ import annotations

import itertools

from fsdpbench.configuration.simulated_cuda import simulated_cuda
from fsdpbench.devices.detection import visible_gpus


def profile_like(device_name: str, memory_bytes: int) -> str | None:
    """By the driver's name of the device and, among those, the size of its memory; None if none is alike."""
    from fsdpbench.sim.model.profile import load_profile, profile_names

    words = device_name.lower().replace("-", " ").split()
    alike = [name for name in profile_names() if all(part in words for part in _chip_of(name))]
    gib = memory_bytes / 2**30
    return min(alike, key=lambda name: abs(load_profile(name).memory.capacity_gib - gib), default=None)


def _chip_of(profile: str) -> list[str]:
    """The parts of a profile's name before its memory: `a100` of `a100-80gb`, `rtx`, `pro`, `6000`."""
    return list(itertools.takewhile(lambda part: not part.endswith("gb"), profile.split("-")))


def profile_of_this_machine() -> str | None:
    """The profile of this machine's first GPU; None if there is none or it is not known."""
    asked = simulated_cuda()
    if asked is not None:
        return asked.profile
    if not visible_gpus():
        return None
    import torch

    properties = torch.cuda.get_device_properties(0)
    return profile_like(properties.name, properties.total_memory)
