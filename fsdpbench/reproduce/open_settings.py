"""What the settings may have been that publications leave open: the variants behind each band.

One thing is changed at a time, to values that the authors may have used in 2022.
"""

from __future__ import annotations

from pathlib import Path

from fsdpbench.reproduce.building import (
    Machine,
    with_gpus,
    with_machine,
    with_profile,
    with_settings,
    with_shape,
)
from fsdpbench.reproduce.figure import Variant
from fsdpbench.validation.paper_network import network_predictions
from fsdpbench.validation.runs.case import Case

# Matrix products in fp32 were rounded to TF32 by default until torch 1.12.
TF32 = Machine("tf32", {"compute": {"peak_tflops": {"bf16": 312, "fp16": 312, "tf32": 156, "fp32": 156}}})
ROOMY = Machine("roomy", {"memory": {"capacity_gib": 320.0}})
"""As if keeping parameters on the host cost no time."""
_200_GBIT = Machine("roce200", {"nic": {"gb_s_per_node": 25.0}})
_800_GBIT = Machine("roce800", {"nic": {"gb_s_per_node": 100.0}})
_HALF = {"param_dtype": "bf16", "reduce_dtype": "bf16"}
_FULL = {"param_dtype": "fp32", "reduce_dtype": "fp32"}
_DHEN_GPUS = (32, 128, 512)


def of_network() -> tuple[Variant, ...]:
    """Figure 2: how many hosts of 8 GPUs, and what their NICs carry."""
    hosts = {"4 hosts": 32, "32 hosts": 256, "64 hosts": 512}
    return (
        *(_network(words, gpus=gpus) for words, gpus in hosts.items()),
        _network("4 x 100 Gb/s at 95 % of line rate", efficiency=0.95),
        _network("8 x 200 Gb/s a host", nic_gb_s=200.0),
    )


def _network(
    words: str, gpus: int = 128, nic_gb_s: float | None = None, efficiency: float | None = None
) -> Variant:
    found = network_predictions(gpus, nic_gb_s, efficiency)
    return Variant(words, ready={each.case.name: each for each in found})


def of_sharding(folder: Path) -> tuple[Variant, ...]:
    """Figure 6a: dtype, batch, GPUs."""

    def small(case: Case) -> bool:
        return case.model in ("t5-611m", "t5-2.28b")

    def large(case: Case) -> bool:
        return case.model == "t5-11b" and not case.ran_out

    return (
        with_machine("the small models in TF32", TF32, folder, small),
        with_settings("the small models in bf16", small, **_HALF),
        with_settings("the small models in bf16, batch 1", small, batch=1, **_HALF),
        with_settings("the small models in fp32, batch 1", small, batch=1),
        with_settings("T5-11B with batch 16", large, batch=16),
        with_gpus("T5-11B on 16 GPUs", 16, large),
    )


def of_limiter(folder: Path) -> tuple[Variant, ...]:
    """Figure 6c: dtype and network."""

    def t5(case: Case) -> bool:
        return case.model == "t5-11b"

    def regnet(case: Case) -> bool:
        return case.model == "regnet-9b"

    def deepvit(case: Case) -> bool:
        return case.model == "deepvit-8b"

    def in_tf32(case: Case) -> Case | None:
        return deepvit_fp32.change(TF32.on(case, folder)) if deepvit_fp32.change and deepvit(case) else None

    deepvit_fp32 = with_settings("DeepViT in fp32", deepvit, **_FULL)
    return (
        with_settings("T5-11B in bf16", t5, **_HALF),
        with_machine("T5-11B in TF32", TF32, folder, t5),
        with_settings("RegNet in bf16", regnet, **_HALF),
        deepvit_fp32,
        Variant("DeepViT in TF32", in_tf32),
        with_machine("T5-11B, 200 Gb/s a host", _200_GBIT, folder, t5),
    )


def of_dhen(folder: Path) -> tuple[Variant, ...]:
    """Figures 7a and 8a: dtype and network, on some of the numbers of GPUs."""

    def some(case: Case) -> bool:
        return case.gpus in _DHEN_GPUS

    return (
        with_machine("TF32", TF32, folder, some),
        with_settings("bf16", some, **_HALF),
        with_machine("800 Gb/s a host", _800_GBIT, folder, some),
        with_machine("200 Gb/s a host", _200_GBIT, folder, some),
    )


def of_announcement(cases_as_stated: dict[str, Case]) -> tuple[Variant, ...]:
    """The runs of 2022: attention, and the memory that GPUs had."""
    return (
        with_shape("attention written out", attention="explicit"),
        Variant("as much memory as stated, nothing kept on the host", lambda c: cases_as_stated[c.name]),
    )


def of_issue() -> tuple[Variant, ...]:
    """The issue: dtype of the reduction, length, memory."""
    return (
        with_settings("fp32 reduction", reduce_dtype="fp32"),
        with_settings("sequences of 1024", seq=1024),
        with_profile("80 GB GPUs", "a100-80gb"),
    )
