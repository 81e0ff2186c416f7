"""The values that open settings of publications may have had: the variants behind each band.

One thing is changed at a time, to values that the authors may have used in 2022. No variant is chosen, and
none is left out, by how near it comes to what was published.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fsdpbench.base.files.documents import to_toml
from fsdpbench.base.files.whole_files import write_whole
from fsdpbench.base.settings import Value
from fsdpbench.lab.reproduce.figure import Variant
from fsdpbench.lab.validation.paper_network import network_predictions
from fsdpbench.lab.validation.runs.case import Case

Chosen = Callable[[Case], bool]


def changed(words: str, of: Chosen = lambda case: True, *, contradicts: str = "", **fields: Any) -> Variant:
    """The cases that `of` chooses, with other `fields`; of settings and shape those that are named change."""

    def change(case: Case) -> Case | None:
        if not of(case):
            return None
        merged: Any = {
            name: {**getattr(case, name), **value} if isinstance(value, Mapping) else value
            for name, value in fields.items()
        }
        return dataclasses.replace(case, **merged)

    return Variant(words, change, contradicts=contradicts)


@dataclasses.dataclass(frozen=True)
class Machine:
    """The differences of a machine: `keys` of its profile by section."""

    name: str
    keys: Mapping[str, Mapping[str, object]]

    def on(self, case: Case, folder: Path) -> Case:
        """The case on its own machine with these keys, whose profile is written to `folder`."""
        name = f"{case.hardware}-{self.name}"
        path = (folder / f"{name}.toml").resolve()
        text = to_toml({"base": case.hardware, "name": name, **self.keys})
        if not path.is_file() or path.read_text() != text:
            folder.mkdir(parents=True, exist_ok=True)
            write_whole(path, text)
        return dataclasses.replace(case, hardware=str(path), chip=case.profile)


def on_machine(
    words: str, machine: Machine, folder: Path, of: Chosen, contradicts: str = "", **settings: Value
) -> Variant:
    """The cases that `of` chooses, with other settings, on another machine, whose profile is in `folder`."""

    def change(case: Case) -> Case | None:
        other = dataclasses.replace(case, settings={**case.settings, **settings})
        return machine.on(other, folder) if of(case) else None

    return Variant(words, change, contradicts=contradicts)


# Matrix products in fp32 were rounded to TF32 by default until torch 1.12.
TF32 = Machine("tf32", {"compute": {"peak_tflops": {"bf16": 312, "fp16": 312, "tf32": 156, "fp32": 156}}})
ROOMY = Machine("roomy", {"memory": {"capacity_gib": 320.0}})
"""As if keeping parameters on the host cost no time."""
_800_GBIT = Machine("roce800", {"nic": {"gb_s_per_node": 100.0}})
_TODAYS = Machine("todays", {"memory": {"context_mib": 550, "nccl_mib_per_communicator": 2400}})
HALF = {"param_dtype": "bf16", "reduce_dtype": "bf16"}
FULL = {"param_dtype": "fp32", "reduce_dtype": "fp32"}
_DHEN_GPUS = (32, 128, 512)
_NEARLY_FULL = 192


def of_network(folder: Path, stated: Mapping[str, Case]) -> tuple[Variant, ...]:
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


def of_sharding(folder: Path, stated: Mapping[str, Case]) -> tuple[Variant, ...]:
    """Figure 6a: dtype, batch, GPUs, attention."""

    def small(case: Case) -> bool:
        return case.model in ("t5-611m", "t5-2.28b")

    def large(case: Case) -> bool:
        return case.model == "t5-11b" and not case.ran_out

    def in_fp32(case: Case) -> Case | None:
        return dataclasses.replace(case, hardware=case.chip) if small(case) else None

    return (
        changed("the small models in bf16", small, settings=HALF),
        changed("the small models in bf16, batch 1", small, settings={"batch": 1, **HALF}),
        changed("the small models with batch 1", small, settings={"batch": 1}),
        Variant(
            "the small models in fp32", in_fp32, contradicts="27.4 TFLOPS exceed the A100's 19.5 in fp32"
        ),
        changed("T5-11B with batch 16", large, settings={"batch": 16}),
        changed("T5-11B on 16 GPUs", large, gpus=16),
        *of_attention(folder, stated),
    )


def of_attention(folder: Path, stated: Mapping[str, Case]) -> tuple[Variant, ...]:
    """T5: attention in one kernel."""
    fused = {"attention": "fused"}
    return (changed("T5 with fused attention", lambda case: case.model.startswith("t5"), shape=fused),)


def of_limiter(folder: Path, stated: Mapping[str, Case]) -> tuple[Variant, ...]:
    """Figure 6c: dtype, recomputation, attention."""
    models = {"t5-11b": "T5-11B", "regnet-9b": "RegNet", "deepvit-8b": "DeepViT"}
    varied = (_of_limited(model, words, folder) for model, words in models.items())
    return (*itertools.chain.from_iterable(varied), *of_attention(folder, stated))


def _of_limited(model: str, words: str, folder: Path) -> tuple[Variant, ...]:
    def of(case: Case) -> bool:
        return case.model == model

    without = {"activation_checkpointing": "none"}
    return (
        changed(f"{words} in fp32", of, settings=FULL),
        on_machine(f"{words} in TF32", TF32, folder, of, **FULL),
        changed(f"{words} without recomputation", of, settings=without),
    )


def of_dhen(folder: Path, stated: Mapping[str, Case]) -> tuple[Variant, ...]:
    """Figures 7a and 8a, on some of the numbers of GPUs: sparse features, and what contradicts the paper."""

    def some(case: Case) -> bool:
        return case.gpus in _DHEN_GPUS

    fewer = {"features": 256, "rows": 23_437_500}
    return (
        changed("a quarter of the features, larger tables", some, shape=fewer),
        changed("tables in fp32", some, shape={"table_dtype": "fp32"}),
        on_machine("dense part in TF32", TF32, folder, some, "BF16 mixed precision is stated", **FULL),
        on_machine("800 Gb/s a host", _800_GBIT, folder, some, "2 Tb/s is stated"),
    )


def of_gpt(folder: Path, stated: Mapping[str, Case]) -> tuple[Variant, ...]:
    """Figures 7b and 8b: what CUDA and NCCL hold outside the allocator, where memory is nearly full."""

    def nearly_full(case: Case) -> bool:
        return case.settings["batch"] == 2 and case.gpus <= _NEARLY_FULL

    return (on_machine("less memory held by CUDA and NCCL, as by today's", _TODAYS, folder, nearly_full),)


def of_announcement(folder: Path, stated: Mapping[str, Case]) -> tuple[Variant, ...]:
    """The runs of 2022: attention, and the memory that GPUs had."""
    return (
        changed("attention written out", shape={"attention": "explicit"}),
        Variant("as much memory as stated, nothing kept on the host", lambda case: stated[case.name]),
    )


def of_issue(folder: Path, stated: Mapping[str, Case]) -> tuple[Variant, ...]:
    """The issue: dtype of the reduction, length, memory."""
    return (
        changed("fp32 reduction", settings={"reduce_dtype": "fp32"}),
        changed("sequences of 1024", settings={"seq": 1024}),
        changed("80 GB GPUs", hardware="a100-80gb"),
    )
