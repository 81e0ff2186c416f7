"""TorchTitan's runs of Llama 3.1 8B with FSDP2 alone (arXiv 2410.06511, tables 1 and 2): no bar.

H100 of 96 GB HBM2e, sequences of 8192 tokens, 2 samples a GPU, every second matrix product recomputed (its
"selective op"), bf16 with fp32 reduction. Memory there is in GiB.
The four published figures were written down without the paper at hand.

Assumed: the paper's Llama had its norms and rotary positions composed of operators, in fp32; ours has torch's
fused norm, and positions in bf16.
"""

from __future__ import annotations

from fsdpbench.validation.runs.case import Case, Figure

_GIB_IN_GB = 2**30 / 1e9


def torchtitan_cases() -> list[Case]:
    """The two runs, with tokens a second and memory."""
    published = {8: (6258.0, 81.9), 128: (5645.0, 67.0)}
    return [
        Case(
            name=f"Llama 3.1 8B, {gpus} GPUs",
            group="TorchTitan",
            source="arXiv 2410.06511",
            model="llama3-8b",
            hardware="h100-96gb-hbm2e",
            gpus=gpus,
            system="torch-fsdp2",
            settings={"seq": 8192, "batch": 2, "activation_checkpointing": "op", "reduce_dtype": "fp32"},
            published={Figure.TOKENS: tokens, Figure.RESERVED: gib * _GIB_IN_GB},
            open=True,
            assumed="fused norms, rotary positions in bf16, no gradient clipping",
        )
        for gpus, (tokens, gib) in published.items()
    ]
