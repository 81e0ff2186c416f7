"""The FSDP paper's runs of minGPT-175B (arXiv 2304.11277; PVLDB 16:12), figures 6b, 7b and 8b.

Its setup: 8 A100-80GB a host, 2 Tb/s RoCE, full sharding, backward prefetch, two all-gathers in flight,
activation checkpointing, BF16, Adam, sequences of 2048 tokens; minGPT writes its attention out, with dropout
of 0.1. TFLOPS are taken as counted with recompute.
"""

from __future__ import annotations

from fsdpbench.configuration.settings import Value
from fsdpbench.validation.runs.case import Case, Figure
from fsdpbench.validation.runs.published import published

_SOURCE = "arXiv 2304.11277"
_HARDWARE = "a100-80gb-roce2000"

_MEMORY = {"allocated": Figure.ALLOCATED, "active": Figure.ACTIVE, "reserved": Figure.RESERVED}


def paper_cases() -> list[Case]:
    """The runs of minGPT-175B with all that was published of them."""
    speeds, memory = published("7b"), published("8b")
    cases = []
    for batch in (1, 2):
        for gpus, tflops in speeds.along(f"batch {batch}").items():
            peaks = {
                figure: value
                for kind, figure in _MEMORY.items()
                if (value := memory.at(f"batch {batch}, {kind}", gpus)) is not None
            }
            cases.append(
                _case(
                    f"GPT-175B, {gpus} GPUs, batch {batch}",
                    "FSDP paper, Fig 7b and 8b",
                    int(gpus),
                    {"batch": batch},
                    {Figure.HARDWARE_TFLOPS: tflops, **peaks},
                    collapsed=(gpus, batch) == (128, 2),
                )
            )
    for gpus, tflops in published("6b").along("no backward prefetch").items():
        cases.append(
            _case(
                f"GPT-175B, {gpus} GPUs, batch 1, no backward prefetch",
                "FSDP paper, Fig 6b",
                int(gpus),
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
    figures: dict[Figure, float],
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
        published=figures,
        collapsed=collapsed,
    )
