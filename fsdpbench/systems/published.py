"""PyTorch's FSDP1 under the software of published runs (simulated only).

What training does is the installed torch; the software profile that each names lays over it what differed in
time and memory (`fsdpbench/sim/software`).
"""

from __future__ import annotations

from fsdpbench.systems.fsdp1 import TorchFsdp1


class TorchFsdp1Of2022(TorchFsdp1):
    """Torch 1.13's, in which the FSDP paper's runs were made."""

    name = "torch-fsdp1-1.13"
    summary = "PyTorch's FSDP1 as torch 1.13 had it: collectives, gradient copy, rate limiter, checkpointing"
    devices = frozenset({"sim"})
    software = "fsdp1-2022"


class LlmFoundry01(TorchFsdp1):
    """Composer's trainer and metrics around torch 1.13's FSDP1."""

    name = "llm-foundry-0.1"
    summary = "llm-foundry 0.1 (Composer 0.14, torch 1.13's FSDP1, attention in Triton)"
    devices = frozenset({"sim"})
    software = "composer-2023-spring"


class LlmFoundry04(TorchFsdp1):
    """Composer's trainer and metrics around torch 2.1's FSDP1, collectives on streams of their own."""

    name = "llm-foundry-0.4"
    summary = "llm-foundry 0.4 (Composer 0.17, torch 2.1's FSDP1, flash attention 2 with unpadding)"
    devices = frozenset({"sim"})
    software = "composer-2023-autumn"
