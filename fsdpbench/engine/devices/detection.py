"""Device detection: the device of `--device auto`, and chips by the names that drivers report."""

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fsdpbench.base.configuration.simulated_cuda import VARIABLE, simulated_cuda
from fsdpbench.base.errors import UsageError, error_text
from fsdpbench.base.numbers import whole_number
from fsdpbench.sim.model.chips import chip_of
from fsdpbench.sim.model.profile import HardwareProfile, ProfileError, load_profile, profile_names

if TYPE_CHECKING:
    from fsdpbench.reports.analysis.peaks import Chip, Links

    Roofs = tuple[Mapping[str, Links], Mapping[str, Chip]]

_DRIVER_NODES = ("/dev/nvidia0", "/dev/kfd", "/dev/nvidiactl")


@dataclass(frozen=True)
class Choice:
    """A device and the reason for choosing it, in words."""

    device: str
    reason: str


def has_gpu_driver() -> bool:
    """Return whether a GPU driver is installed, without importing torch."""
    return simulated_cuda() is not None or any(Path(node).exists() for node in _DRIVER_NODES)


def visible_gpus() -> int:
    """Return the number of GPUs that torch sees; import torch only if a driver is installed."""
    asked = simulated_cuda()
    if asked is not None:
        return asked.gpus
    if not has_gpu_driver():
        return 0
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def number_of_launcher(name: str, otherwise: int) -> int:
    """Return a number that torchrun sets in the environment. Raises `UsageError` if it is not one."""
    text = os.environ.get(name, str(otherwise))
    try:
        return whole_number(text, 0)
    except ValueError:
        raise UsageError(f"{name}={text!r} in the environment is not a whole number from 0") from None


def choose_device(asked: str, gpus: int, hardware: str | None, *, elsewhere: bool = False) -> Choice:
    """Resolve `asked` (also `auto`) for `gpus` ranks. `elsewhere`: they may run on other machines.

    Raises `UsageError` if the device is not available.
    """
    if asked == "sim":
        return Choice("sim", "as asked")
    if asked == "cpu":
        return Choice("cpu", "as asked")
    found, launched = visible_gpus(), number_of_launcher("WORLD_SIZE", 0)
    enough = found >= gpus or (found > 0 and launched >= gpus)
    if asked == "cuda":
        if not enough and not elsewhere:
            raise UsageError(error_text("detection.too_few_gpus", gpus, found, found or 1))
        pretended = f"simulated: {VARIABLE} is set, and nothing is measured"
        return Choice("cuda", "as asked" if simulated_cuda() is None else pretended)
    if hardware is not None:
        return Choice("sim", f"--hardware {hardware} names a profile to simulate")
    if enough:
        return Choice("cuda", f"found {found} GPUs")
    return Choice("sim", f"found {found} of {gpus} GPUs")


def peak_flops_of(device_name: str, dtype: str) -> float | None:
    """Return the dense FLOP/s of a GPU by the driver's name (`NVIDIA H200`); None if unknown.

    `dtype` is `bf16`, `fp16`, `tf32`, `fp32`, `fp8` or `nvfp4`.
    """
    chip = chip_of(device_name)
    peak = None if chip is None else chip.peak_tflops.get(dtype)
    return None if peak is None else peak * 1e12


@dataclass(frozen=True)
class ChipsByDevice(Mapping[str, "Chip"]):
    """Chips by device name: the ``packaged`` ones by their own names, others by a driver's name."""

    packaged: "Mapping[str, Chip]"

    def __getitem__(self, name: str) -> "Chip":
        from fsdpbench.reports.analysis.peaks import Chip

        if name in self.packaged:
            return self.packaged[name]
        chip = chip_of(name)
        if chip is None:
            raise KeyError(name)
        peaks = {dtype: peak * 1e12 for dtype, peak in chip.peak_tflops.items()}
        return self.packaged.get(chip.profile) or Chip(name, peaks, chip.memory_bandwidth)

    def __iter__(self) -> Iterator[str]:
        return iter(self.packaged)

    def __len__(self) -> int:
        return len(self.packaged)


def roofs(hardware: str | None) -> "Roofs":
    """Return links and chips by device name: of all profiles, or the profile `hardware` for any device."""
    from fsdpbench.reports.analysis.peaks import ANY_DEVICE, Chip, Links

    def links_of(profile: HardwareProfile) -> "Links":
        nic = profile.nic.gb_s_per_node * 1e9
        return Links(profile.name, profile.gpus_per_node, profile.link_gb_s * 1e9, nic)

    def chip_of(profile: HardwareProfile) -> "Chip":
        peaks = {**profile.peak_flops, **profile.narrow_peak_flops}
        return Chip(profile.name, peaks, profile.memory_bandwidth)

    if hardware is None:
        profiles = [load_profile(name) for name in profile_names()]
        links = {profile.title: links_of(profile) for profile in profiles}
        chips = {name: chip_of(profile) for profile in profiles for name in (profile.title, profile.name)}
        return links, ChipsByDevice(chips)
    try:
        profile = load_profile(hardware)
    except ProfileError as error:
        raise UsageError(f"{error} (`fsdpbench list hardware` lists them all)") from None
    return {ANY_DEVICE: links_of(profile)}, {ANY_DEVICE: chip_of(profile)}


def profile_like(device_name: str, memory_bytes: int) -> str | None:
    """Return the profile of the device with the closest memory, then the shortest name; None if unknown."""
    words = device_name.lower().replace("-", " ").split()
    alike = [each for each in profile_names() if {*re.sub(r"-\d+gb.*", "", each).split("-")} <= {*words}]
    gib = memory_bytes / 2**30
    whole = {name: round(abs(load_profile(name).memory.capacity_gib - gib)) for name in alike}
    return min(alike, key=lambda name: (whole[name], len(name)), default=None)


def profile_of_this_machine() -> str | None:
    """Return the profile of this machine's first GPU; None if there is none or it is unknown."""
    asked = simulated_cuda()
    if asked is not None:
        return asked.profile
    if not visible_gpus():
        return None
    import torch

    properties = torch.cuda.get_device_properties(0)
    return profile_like(properties.name, properties.total_memory)
