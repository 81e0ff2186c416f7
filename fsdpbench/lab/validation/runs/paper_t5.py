"""The FSDP paper's runs of T5-11B (arXiv 2304.11277; PVLDB 16:12), figure 7c.

Its setup is that of `paper.py`, with Hugging Face's t5-11b (whose configuration has a dropout of 0.1) and
sequences of 512 tokens; TFLOPS are taken as counted with recompute. How attention was
computed, and how long the decoder's sequences were, is not published: here it is fused, and they are as long
as the encoder's. (Written out as in Hugging Face's T5 of that time, the simulated step takes 1.4 times as
long as the published one.)
"""

from __future__ import annotations

from fsdpbench.lab.validation.runs.case import Case, Figure
from fsdpbench.lab.validation.runs.paper import published

MODEL = "t5-11b"
GROUP = "FSDP paper, Fig 7c"


def t5_cases() -> list[Case]:
    """The runs of T5-11B, at every number of GPUs and both batches."""
    return [
        Case(
            name=f"T5-11B, {gpus} GPUs, batch {batch}",
            group=GROUP,
            source="arXiv 2304.11277",
            model=MODEL,
            shape={"dropout": 0.1},
            system="torch-fsdp1-1.13",
            hardware="a100-80gb-roce2000",
            gpus=int(gpus),
            settings={
                "seq": 512,
                "batch": batch,
                "activation_checkpointing": "full",
                "limit_all_gathers": 2,
                "param_dtype": "bf16",
                "reduce_dtype": "bf16",
                "optimizer": "adamw-loop",
                "zero_grad": "fill",
            },
            published={Figure.HARDWARE_TFLOPS: tflops},
            assumed="attention is fused, target as long as source",
            chosen=True,
        )
        for batch in (8, 16)
        for gpus, tflops in published("7c").along(f"batch {batch}").items()
    ]
