"""The FSDP paper's runs of T5-11B (arXiv 2304.11277; PVLDB 16:12), figure 7c.

Its setup is that of `paper.py`, with Hugging Face's t5-11b (whose configuration has a dropout of 0.1) and
sequences of 512 tokens; TFLOPS are taken as counted with recompute, read off within 0.1. How attention was
computed, and how long the decoder's sequences were, is not published: here it is fused, and they are as long
as the encoder's. (Written out as in Hugging Face's T5 of that time, the simulated step takes 1.4 times as
long as the published one.)
"""

from __future__ import annotations

from fsdpbench.validation.case import Case, Figure

MODEL = "t5-11b"
GROUP = "FSDP paper, Fig 7c"
# GPUs: TFLOPS at batch 8 and 16
_TFLOPS = {
    8: (149.8, 155.1),
    16: (149.3, 154.4),
    32: (148.9, 154.4),
    64: (148.7, 153.9),
    128: (148.2, 153.4),
    256: (145.8, 152.8),
    512: (141.0, 149.9),
}


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
            gpus=gpus,
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
        )
        for batch, index in ((8, 0), (16, 1))
        for gpus, figures in _TFLOPS.items()
        for tflops in (figures[index],)
    ]
