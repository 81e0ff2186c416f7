"""Published runs whose settings are not published in full: shown with what had to be assumed, without a bar.

The FSDP paper's figures 6a, 6c, 7a and 8a (arXiv 2304.11277), the runs of PyTorch 1.11's announcement (2022),
and an issue of PyTorch (104509). Figure 2 stands in `paper_network.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from fsdpbench.configuration.settings import Value
from fsdpbench.validation.case import Case, Figure

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
# Where the paper does not say bf16, its step times are those of fp32 (5 to 10 times as long). Convolutions
# are then in TF32, matrix products are not: torch's defaults.
_FP32: Mapping[str, Value] = {**_COMMON, "param_dtype": "fp32", "reduce_dtype": "fp32"}
# The rate limiter, on and off.
_LIMITS: tuple[Value, Value] = (2, "off")


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
    """Figure 6a. 148.5 TFLOPS of T5-11B are those of figure 7c at batch 8 on 64 GPUs."""
    ways: dict[str, tuple[str, dict[str, Value]]] = {
        "full sharding": (_OF_2022, {}),
        "hybrid sharding": (_OF_2022, {"strategy": "HYBRID_SHARD"}),
        "full replication": (_OF_2022, {"strategy": "NO_SHARD"}),
        "DDP": ("torch-ddp", {}),
    }
    published = {
        "t5-611m": (15.18, 15.28, 14.61, 14.65),
        "t5-2.28b": (27.40, 27.70, 25.76, 26.04),
        "t5-11b": (148.48, 145.81),
    }
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
            published={Figure.HARDWARE_TFLOPS: tflops},
            assumed="64 GPUs, batch 8, sequences of 512, recomputation; T5-11B in bf16, the others in fp32; "
            "shapes of the small T5s",
        )
        for model, figures in published.items()
        for (way, (system, settings)), tflops in zip(ways.items(), figures, strict=False)
    ]


def _rate_limiter() -> list[Case]:
    """Figure 6c: seconds a batch with the rate limiter and without."""
    published = {
        ("regnet-9b", 16, 48): (14.81, 14.80),
        ("regnet-9b", 32, 72): (21.70, 21.81),
        ("t5-11b", 16, 2): (8.36, 18.61),
        ("t5-11b", 32, 2): (5.02, 15.33),
        ("deepvit-8b", 16, 105): (18.78, 18.00),
        ("deepvit-8b", 32, 120): (22.79, 21.64),
    }
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
            gpus=gpus,
            system=_OF_2022,
            settings={**_FP32, **fits[model], "batch": batch, "limit_all_gathers": limit},
            published={Figure.SECONDS: seconds},
            assumed="80 GB GPUs on 2 Tb/s RoCE; fp32, DeepViT bf16; recomputation where nothing fits "
            "without: RegNet, DeepViT",
        )
        for (model, gpus, batch), pair in published.items()
        for limit, seconds in zip(_LIMITS, pair, strict=True)
    ]


def _recommendation() -> list[Case]:
    """Figures 7a and 8a: DHEN, with resharding after forward (RAF) and without (NRAF)."""
    ways = {
        "full RAF": "FULL_SHARD",
        "full NRAF": "SHARD_GRAD_OP",
        "hybrid RAF": "HYBRID_SHARD",
        "hybrid NRAF": "_HYBRID_SHARD_ZERO2",
    }
    samples = {
        32: (4263, 4447, 4298, 4424),
        64: (4078, 4300, 4190, 4301),
        128: (3553, 3662, 3609, 3735),
        256: (3817, 3951, 3915, 3910),
        512: (2876, 3049, 3084, 3176),
    }
    memory = {32: (72.9, 73.9), 64: (46.1, 46.6), 128: (35.3, 36.5), 256: (34.3, 36.2), 512: (29.1, 32.0)}
    cases = []
    for gpus, row in samples.items():
        for index, (way, strategy) in enumerate(ways.items()):
            published = {Figure.SAMPLES: float(row[index])}
            if index < len(memory[gpus]):
                published[Figure.RESERVED] = memory[gpus][index]
            cases.append(
                Case(
                    name=f"DHEN, {gpus} GPUs, {way}",
                    group="FSDP paper, Fig 7a and 8a",
                    source=_PAPER,
                    model="dhen",
                    hardware=_ROCE,
                    gpus=gpus,
                    system=_OF_2022,
                    settings={**_FP32, "batch": 1024, "strategy": strategy},
                    published=published,
                    assumed="the model's shape, fp32, peak memory is reserved memory",
                )
            )
    return cases


def _announcement() -> list[Case]:
    """159 and 84 TFLOPS (81 on 512 GPUs). They kept parameters on the host, which is left out here."""
    runs: dict[tuple[str, int, str], tuple[dict[str, Value], float]] = {
        ("gpt-175b", 128, "a100-40gb"): ({"batch": 20, "seq": 512}, 159.0),
        ("gpt-1t", 128, "a100-80gb"): ({"batch": 4, "seq": 2048}, 84.0),
        ("gpt-1t", 512, "a100-80gb"): ({"batch": 4, "seq": 2048}, 81.0),
    }
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
        for (model, gpus, hardware), (sizes, tflops) in runs.items()
    ]


def _issue() -> list[Case]:
    published = (5.0, 0.0), (7.3, 46.0)
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
            published={Figure.SECONDS: seconds, Figure.RETRIES: retries},
            assumed="40 GB GPUs, sequences of 2048, fused attention, recomputation, bf16 reduction",
        )
        for limit, (seconds, retries) in zip(_LIMITS, published, strict=True)
    ]
