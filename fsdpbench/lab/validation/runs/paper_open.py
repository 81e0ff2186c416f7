"""Published runs whose settings are not published in full: shown with what had to be assumed, without a bar.

The FSDP paper's figures 6a, 6c, 7a and 8a (arXiv 2304.11277), the runs of PyTorch 1.11's announcement (2022),
and an issue of PyTorch (104509). Figure 2 is in `paper_network.py`.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping

from fsdpbench.base.settings import Value
from fsdpbench.lab.validation.runs.case import Case, Figure
from fsdpbench.lab.validation.runs.paper import published

_PAPER = "arXiv 2304.11277"
_OF_2022 = "torch-fsdp1-1.13"
_ROCE = "a100-80gb-roce2000"
_COMMON: Mapping[str, Value] = {
    "param_dtype": "bf16",
    "reduce_dtype": "bf16",
    "limit_all_gathers": 2,
    "optimizer": "adamw-loop",
    "zero_grad": "fill",
}
# Where the paper does not say bf16 (Fig 6), its step times are those of fp32 (5 to 10 times as long). Convolutions
# are then in TF32, matrix products are not: torch's defaults.
_FP32: Mapping[str, Value] = {**_COMMON, "param_dtype": "fp32", "reduce_dtype": "fp32"}
# The rate limiter, on and off.
_LIMITS: Mapping[Value, str] = {2: "limiter on", "off": "limiter off"}


def open_cases() -> list[Case]:
    """All of them, in the order of the module's docstring."""
    cases = [
        *_full_sharding_and_replication(),
        *_rate_limiter(),
        *_recommendation(),
        *_announcement(),
        *_issue(),
    ]
    return [dataclasses.replace(case, open=True) for case in cases]


def _full_sharding_and_replication() -> list[Case]:
    """Figure 6a. The TFLOPS of T5-11B are those of figure 7c at batch 8 on 64 GPUs."""
    ways: dict[str, tuple[str, dict[str, Value]]] = {
        "full sharding": (_OF_2022, {}),
        "hybrid sharding": (_OF_2022, {"strategy": "HYBRID_SHARD"}),
        "full replication": (_OF_2022, {"strategy": "NO_SHARD"}),
        "DDP": ("torch-ddp", {}),
    }
    figure = published("6a")
    return [
        Case(
            name=f"{model}, {way}",
            group="FSDP paper, Fig 6a",
            source=_PAPER,
            model=model,
            hardware=_ROCE,
            gpus=64,
            system=system,
            settings={
                **(_COMMON if model == "t5-11b" else _FP32),
                "seq": 512,
                "batch": 8,
                "activation_checkpointing": "full",
                **settings,
            },
            published={} if tflops is None else {Figure.HARDWARE_TFLOPS: tflops},
            ran_out=tflops is None,
            assumed="64 GPUs, batch 8, sequences of 512, recomputation; T5-11B in bf16, the others in fp32; "
            "shapes of the small T5s",
        )
        for model in map(str, figure.x)
        for way, (system, settings) in ways.items()
        for tflops in (figure.at(way, model),)
    ]


def _rate_limiter() -> list[Case]:
    """Figure 6c: seconds a batch with the rate limiter and without."""
    figure = published("6c")
    recomputed: dict[str, Value] = {"activation_checkpointing": "full"}
    fits: dict[str, dict[str, Value]] = {
        "regnet-9b": recomputed,
        "t5-11b": {},
        "deepvit-8b": {**recomputed, "param_dtype": "bf16", "reduce_dtype": "bf16"},
    }
    return [
        Case(
            name=f"{model}, {gpus} GPUs, batch {batch}, limiter {'on' if limit == 2 else 'off'}",
            group="FSDP paper, Fig 6c",
            source=_PAPER,
            model=model,
            hardware=_ROCE,
            gpus=int(gpus),
            system=_OF_2022,
            settings={**_FP32, **fits[model], "batch": batch, "limit_all_gathers": limit},
            published={Figure.SECONDS: seconds},
            assumed="80 GB GPUs on 2 Tb/s RoCE; fp32, DeepViT bf16; recomputation where nothing fits "
            "without: RegNet, DeepViT",
        )
        for place, batch in zip(figure.x, figure.batch, strict=True)
        for model, gpus in (re.findall(r"[^ ,]+", str(place))[:2],)
        for limit, series in _LIMITS.items()
        if (seconds := figure.at(series, place)) is not None
    ]


def _recommendation() -> list[Case]:
    """Figures 7a and 8a: DHEN, with resharding after forward (RAF) and without (NRAF).

    Section 5.4 states BF16 mixed precision and activation checkpointing for these figures.
    """
    ways = {
        "full RAF": "FULL_SHARD",
        "full NRAF": "SHARD_GRAD_OP",
        "hybrid RAF": "HYBRID_SHARD",
        "hybrid NRAF": "_HYBRID_SHARD_ZERO2",
    }
    samples, memory = published("7a"), published("8a")
    cases = []
    for gpus in map(int, samples.x):
        for way, strategy in ways.items():
            found = {
                Figure.SAMPLES: samples.at(way, gpus),
                Figure.RESERVED: memory.at(way, gpus) if way in memory.series else None,
            }
            cases.append(
                Case(
                    name=f"DHEN, {gpus} GPUs, {way}",
                    group="FSDP paper, Fig 7a and 8a",
                    source=_PAPER,
                    model="dhen",
                    hardware=_ROCE,
                    gpus=gpus,
                    system=_OF_2022,
                    settings={
                        **_COMMON,
                        "batch": 1024,
                        "strategy": strategy,
                        "activation_checkpointing": "full",
                    },
                    published={figure: value for figure, value in found.items() if value is not None},
                    assumed="the model's shape, peak memory is reserved memory",
                )
            )
    return cases


def _announcement() -> list[Case]:
    """GPT-175B and GPT-1T on AWS. They kept parameters on the host, which is left out here."""
    runs: dict[tuple[str, int, str], dict[str, Value]] = {
        ("gpt-175b", 128, "a100-40gb"): {"batch": 20, "seq": 512},
        ("gpt-1t", 128, "a100-80gb"): {"batch": 4, "seq": 2048},
        ("gpt-1t", 512, "a100-80gb"): {"batch": 4, "seq": 2048},
    }
    figure = published("2022")
    return [
        Case(
            name=f"{model}, {gpus} GPUs, batch {sizes['batch']}, fp16, SGD",
            group="PyTorch 1.11 on AWS",
            source="pytorch.org/blog, 2022",
            model=model,
            hardware=hardware,
            gpus=gpus,
            system=_OF_2022,
            settings={
                **_COMMON,
                **sizes,
                "param_dtype": "fp16",
                "reduce_dtype": "fp16",
                "optimizer": "sgd",
                "activation_checkpointing": "full",
            },
            published={Figure.HARDWARE_TFLOPS: tflops},
            assumed="no CPU offload (the runs had it), fused attention, GPT-1T on 80 GB GPUs",
        )
        for (model, gpus, hardware), sizes in runs.items()
        if (tflops := figure.at("FSDP", f"{model}, {gpus} GPUs")) is not None
    ]


def _issue() -> list[Case]:
    figure = published("104509")
    return [
        Case(
            name=f"7B GPT, 16 GPUs, batch 8, limiter {'off' if limit == 'off' else 'on'}",
            group="pytorch#104509",
            source="github.com/pytorch/pytorch/issues/104509",
            model="gpt-6.7b",
            system=_OF_2022,
            hardware="a100-40gb",
            gpus=16,
            settings={
                "seq": 2048,
                "batch": 8,
                "limit_all_gathers": limit,
                "reduce_dtype": "bf16",
                "activation_checkpointing": "full",
            },
            published={Figure.SECONDS: seconds, Figure.RETRIES: figure.along("retries")[series]},
            assumed="40 GB GPUs, sequences of 2048, fused attention, recomputation, bf16 reduction",
        )
        for limit, series in _LIMITS.items()
        for seconds in (figure.along("step")[series],)
    ]
