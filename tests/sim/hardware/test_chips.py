"""One table of chips: found by the driver's names, agreeing with the packaged profiles, never a near miss."""

from __future__ import annotations

import pytest

from fsdpbench.engine.devices.detection import peak_flops_of, profile_like, roofs
from fsdpbench.sim.model.chips import CHIPS, OPERATOR_CHIPS, chip_of, peaks_source
from fsdpbench.sim.model.profile import load_profile, profile_names

GIB = 1 << 30
# The driver's name of the GPU that a packaged profile describes, and its bf16 peak.
DEVICES = {
    "a100-64gb": ("NVIDIA A100-SXM-64GB", 358),
    "a800-80gb": ("NVIDIA A800-SXM4-80GB", 312),
    "gh200-96gb": ("NVIDIA GH200 480GB", 989),
    "h100-64gb": ("NVIDIA H100 64GB HBM2", 989),
    "h20-96gb": ("NVIDIA H20", 148),
    "h800-80gb": ("NVIDIA H800", 989),
    "mi300x": ("AMD Instinct MI300X", 1307.4),
    "rtx-3090": ("NVIDIA GeForce RTX 3090", 71),
    "rtx-4090": ("NVIDIA GeForce RTX 4090", 165.2),
    "a100-40gb": ("NVIDIA A100-SXM4-40GB", 312),
    "a100-80gb": ("NVIDIA A100-SXM4-80GB", 312),
    "a100-80gb-roce2000": ("NVIDIA A100-SXM4-80GB", 312),
    "b200": ("NVIDIA B200", 2250),
    "b300": ("NVIDIA B300 SXM6 AC", 2250),
    "gb200": ("NVIDIA GB200", 2500),
    "gb300": ("NVIDIA GB300", 2500),
    "h100-80gb": ("NVIDIA H100 80GB HBM3", 989),
    "h100-80gb-cuda13": ("NVIDIA H100 80GB HBM3", 989),
    "h100-96gb": ("NVIDIA H100 96GB HBM3", 989),
    "h100-96gb-hbm2e": ("NVIDIA H100 96GB HBM2e", 989),
    "h200": ("NVIDIA H200", 989),
    "l40s": ("NVIDIA L40S", 362),
    "rtx-pro-6000": ("NVIDIA RTX PRO 6000 Blackwell Server Edition", 504),
}


@pytest.mark.parametrize("name", profile_names())
def test_every_profile_has_peaks_on_real_devices(name: str) -> None:
    device, bf16 = DEVICES[name]
    profile, chip = load_profile(name), chip_of(device)
    assert chip is not None
    assert chip == chip_of(profile.title)
    assert peak_flops_of(device, "bf16") == bf16 * 1e12
    for dtype, peak in profile.peak_flops.items():
        assert peak_flops_of(device, dtype) == pytest.approx(peak, rel=0.002)
    for dtype, peak in profile.narrow_peak_flops.items():
        assert peak_flops_of(device, dtype) == pytest.approx(peak, rel=0.002)
    assert chip.sm_count == profile.sm_count
    assert chip.bandwidth_gb_s == profile.memory.bandwidth_gb_s
    assert 0.92 < profile.memory.capacity_gib / chip.memory_gb[0] <= 1
    bare = name.removesuffix("-roce2000").removesuffix("-hbm2e").removesuffix("-cuda13")
    assert profile_like(device, profile.memory_bytes) == bare


@pytest.mark.parametrize("device", ["NVIDIA A100-SXM4-40GB", "NVIDIA H100 PCIe"])
def test_a_trace_of_a_real_device_has_roofs(device: str) -> None:
    """`analyze` knows a device as its driver names it, packaged or not."""
    _, chips = roofs(None)
    known = chip_of(device)
    assert known is not None
    assert chips[device].memory_bandwidth == known.memory_bandwidth
    assert chips[device].peak_flops["bf16"] == peak_flops_of(device, "bf16")
    assert "NVIDIA Unheard-of" not in chips


def test_every_profile_named_in_the_table_is_packaged() -> None:
    named = {chip.profile for chip in CHIPS if chip.profile}
    assert named == set(profile_names()) - {"a100-80gb-roce2000", "h100-80gb-cuda13"}
    assert all(chip.profile for chip in OPERATOR_CHIPS.values())
    assert all(chip.source and chip.peak_tflops for chip in CHIPS)
    assert len({(chip.words, chip.memory_gb) for chip in CHIPS}) == len(CHIPS)


@pytest.mark.parametrize("chip", CHIPS, ids=lambda chip: f"{' '.join(chip.words)} {chip.memory_gb[0]}")
def test_a_row_is_found_by_its_own_words(chip: object) -> None:
    """None is hidden by one above it."""
    assert isinstance(chip, type(CHIPS[0]))
    assert chip_of(f"NVIDIA {' '.join(chip.words)} {chip.memory_gb[-1]}GB") == chip


@pytest.mark.parametrize(
    ("device", "dtype", "tflops"),
    [
        ("NVIDIA H100 PCIe", "bf16", 756),
        ("NVIDIA H100 NVL", "bf16", 835.5),
        ("NVIDIA H200 NVL", "fp8", 1671),
        ("NVIDIA H20", "bf16", 148),
        ("NVIDIA H20-3e", "fp8", 296),
        ("NVIDIA A100-PCIE-40GB", "bf16", 312),
        ("NVIDIA A100 80GB PCIe", "tf32", 156),
        ("NVIDIA GH200 480GB", "bf16", 989),
        ("NVIDIA GH200 144G HBM3e", "bf16", 989),
        ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", "bf16", 439),
        ("AMD Instinct MI300X", "bf16", 1307.4),
        ("AMD Instinct MI300X OAM", "fp8", 2614.9),
        ("NVIDIA GB200", "nvfp4", 10000),
        ("Tesla V100-PCIE-16GB", "fp16", 112),
        ("Tesla V100-SXM2-32GB", "fp16", 125),
    ],
)
def test_variants_have_rates_of_their_own(device: str, dtype: str, tflops: float) -> None:
    assert peak_flops_of(device, dtype) == pytest.approx(tflops * 1e12)


@pytest.mark.parametrize(
    "device",
    [
        "", "NVIDIA", "NVIDIA H1000", "NVIDIA H100L", "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
        "NVIDIA A100-SXM-48GB", "NVIDIA A100X", "NVIDIA A10G", "GRID A100D-40C", "NVIDIA H100 64GB HBM3",
        "NVIDIA H200 PCIe", "NVIDIA GB10", "NVIDIA B100", "NVIDIA RTX PRO 6000",
        "NVIDIA RTX PRO 6000 Blackwell", "NVIDIA RTX PRO 5000 Blackwell", "NVIDIA L40G", "NVIDIA L4 L40S",
        "Tesla V100-SXM3-32GB", "NVIDIA GH200", "AMD Instinct MI300A", "h-100", "NVIDIA Graphics Device",
        "NVIDIA GeForce RTX 4090 D", "NVIDIA Thor", "NVIDIA H100 80GB HBM2e",
    ],
)  # fmt: skip
def test_a_near_miss_is_none_with_a_reason(device: str) -> None:
    assert chip_of(device) is None
    assert peak_flops_of(device, "bf16") is None
    assert peaks_source(device).startswith(f"none: {device!r} is not in the table")
