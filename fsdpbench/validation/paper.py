"""The FSDP paper's runs of minGPT-175B (arXiv 2304.11277; PVLDB 16:12), figures 6b, 7b and 8b.

Its setup: 8 A100-80GB a host, 2 Tb/s RoCE, full sharding, backward prefetch, two all-gathers in flight,
activation checkpointing, BF16, Adam, sequences of 2048 tokens; minGPT writes its attention out, with dropout
of 0.1. TFLOPS are taken as counted with recompute. Read off the figures, within 0.4 TFLOPS (7b), 0.15 (6b)
and 1 GB (8b).
"""

from __future__ import annotations

from fsdpbench.configuration.settings import Value
from fsdpbench.validation.case import Case, Figure

_SOURCE = "arXiv 2304.11277"
_HARDWARE = "a100-80gb-roce2000"

# GPUs: (TFLOPS, GB allocated, active, reserved)
_BATCH_1 = {
    128: (173.5, 47, 63, 78),
    192: (173.8, 40, 56, 71),
    256: (173.3, 35, 51, 64),
    384: (173.0, 33, 49, 60),
    512: (170.4, 31, 46, 57),
}
_BATCH_2 = {
    128: (90.0, 54, 69, 80),
    192: (186.4, 47, 63, 79),
    256: (186.2, 42, 58, 73),
    384: (185.4, 39, 54, 69),
    512: (184.7, 37, 52, 67),
}
_WITHOUT_PREFETCH = {128: 142.4, 256: 141.7, 512: 138.2}


def paper_cases() -> list[Case]:
    """The runs of minGPT-175B with all that was published of them."""
    cases = []
    for batch, points in ((1, _BATCH_1), (2, _BATCH_2)):
        for gpus, (tflops, allocated, active, reserved) in points.items():
            published = {
                Figure.HARDWARE_TFLOPS: tflops,
                Figure.ALLOCATED: float(allocated),
                Figure.ACTIVE: float(active),
                Figure.RESERVED: float(reserved),
            }
            cases.append(
                _case(
                    f"GPT-175B, {gpus} GPUs, batch {batch}",
                    "FSDP paper, Fig 7b and 8b",
                    gpus,
                    {"batch": batch},
                    published,
                    collapsed=(gpus, batch) == (128, 2),
                )
            )
    for gpus, tflops in _WITHOUT_PREFETCH.items():
        cases.append(
            _case(
                f"GPT-175B, {gpus} GPUs, batch 1, no backward prefetch",
                "FSDP paper, Fig 6b",
                gpus,
                {"batch": 1, "backward_prefetch": "none"},
                {Figure.HARDWARE_TFLOPS: tflops},
            )
        )
    return cases


def _case(
    name: str,
    group: str,
    gpus: int,
    settings: dict[str, Value],
    published: dict[Figure, float],
    collapsed: bool = False,
) -> Case:
    return Case(
        name=name,
        group=group,
        source=_SOURCE,
        model="gpt-175b",
        system="torch-fsdp1-1.13",
        shape={"attention": "explicit", "dropout": 0.1},
        hardware=_HARDWARE,
        gpus=gpus,
        settings={
            "seq": 2048,
            "activation_checkpointing": "full",
            "limit_all_gathers": 2,
            "param_dtype": "bf16",
            "reduce_dtype": "bf16",
            # PyTorch of 2022: Adam parameter by parameter, gradients kept and filled with zeros.
            "optimizer": "adamw-loop",
            "zero_grad": "fill",
            **settings,
        },
        published=published,
        collapsed=collapsed,
    )
