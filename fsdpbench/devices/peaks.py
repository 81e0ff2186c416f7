"""Peak FLOP/s of GPUs, for MFU and HFU."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fsdpbench.sim.model.chips import chip_of

if TYPE_CHECKING:
    from fsdpbench.reports.analysis.peaks import Chip


def peak_flops_of(device_name: str, dtype: str) -> float | None:
    """Dense FLOP/s of the GPU that the driver calls `device_name` (`NVIDIA H200`); None if it is not known.

    `dtype` is `bf16`, `fp16`, `tf32`, `fp32`, `fp8` or `nvfp4`.
    """
    chip = chip_of(device_name)
    peak = None if chip is None else chip.peak_tflops.get(dtype)
    return None if peak is None else peak * 1e12


@dataclass(frozen=True)
class ChipsByDevice(Mapping[str, "Chip"]):
    """Chips by the name of a device: ``packaged`` ones, and those of the table by a driver's name."""

    packaged: Mapping[str, Chip]

    def __getitem__(self, name: str) -> Chip:
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
