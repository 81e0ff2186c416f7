"""Data-sheet figures of chips: one table for peak rates of real devices, profiles, capabilities, calibration.

The table is `chips.csv`: dense rates in TFLOPS (half the rates that makers print with sparsity), GB as the
maker counts them. A chip is looked up by the device name that the driver reports. A name with a word that is
not in the table is unknown, because variants differ (bf16: H100 SXM 989, H100 PCIe 756 TFLOPS).
"""

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from fsdpbench.base.files.documents import rows_beside

_PEAKS = ("bf16", "fp16", "tf32", "fp32", "fp8", "nvfp4")
# Words that drivers and profiles add to a chip's name and that do not affect rates.
_ADDED = re.compile(r"nvidia|amd|instinct|tesla|sxm\d?|oam|hbm3e?|ac")
_SIZE = re.compile(r"(\d+)gb?")


@dataclass(frozen=True)
class Chip:
    """A row of the table. Device names contain all `words`, with or without the memory size.

    `profile`: name of the packaged profile; `operators`: name in tables of measured operators. Chips of one
    `family` use the same kernels. NCCL reduces in the NVLink switch from `switch_from` GPUs on (0: never).
    """

    words: tuple[str, ...]
    memory_gb: tuple[int, ...]
    profile: str
    operators: str
    family: str
    capability: tuple[int, int]
    sm_count: int
    bandwidth_gb_s: float
    cache_mib: float
    switch_from: int
    peak_tflops: Mapping[str, float]
    source: str

    @property
    def memory_bandwidth(self) -> float:
        """Return the peak memory bandwidth in bytes/s."""
        return self.bandwidth_gb_s * 1e9

    def explains(self, words: list[str]) -> bool:
        """Return whether a device name with these words denotes this chip."""
        rest = [word for word in words if word not in self.words]
        sizes = [int(found[1]) for word in rest if (found := _SIZE.fullmatch(word))]
        others = [word for word in rest if not _SIZE.fullmatch(word) and not _ADDED.fullmatch(word)]
        return set(self.words) <= set(words) and not others and set(sizes) <= set(self.memory_gb)


@functools.lru_cache(maxsize=256)
def chip_of(device_name: str) -> Chip | None:
    """Return the chip that a driver's name (`NVIDIA H100 80GB HBM3`) or a profile's title denotes, or None.

    Text after a comma is ignored.
    """
    words = re.findall(r"[a-z0-9]+", device_name.lower().partition(",")[0])
    return next((chip for chip in CHIPS if chip.explains(words)), None)


def peaks_source(device_name: str) -> str:
    """Return the source of a device's peak rates, or the reason why there are none."""
    chip = chip_of(device_name)
    if chip is not None:
        return chip.source
    return f"none: {device_name!r} is not in the table of chips, and relatives have other rates"


def _chip(row: Mapping[str, str]) -> Chip:
    lists = {name: row[name].split() for name in ("words", "memory_gb")}
    peaks = {dtype: row[dtype] for dtype in _PEAKS if row[dtype]}
    whole = {**row, **lists, "capability": row["capability"].split("."), "peak_tflops": peaks}
    return msgspec.convert(whole, Chip, strict=False)


CHIPS = tuple(map(_chip, rows_beside(__file__, "chips.csv")))
"""Rows of the table, from the most specific name to the most general."""
OPERATOR_CHIPS: Mapping[str, Chip] = {chip.operators: chip for chip in CHIPS if chip.operators}
"""Chips by their name in tables of measured operators."""
