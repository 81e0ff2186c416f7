"""What the atlas covers, known without torch."""

from __future__ import annotations

from dataclasses import dataclass

SYSTEM = "torch-fsdp2"
"""What most new scripts use."""


@dataclass(frozen=True)
class Extent:
    """Models, chips and numbers of GPUs; a cell is one of each."""

    models: tuple[str, ...]
    hardware: tuple[str, ...]
    gpus: tuple[int, ...]


WHOLE = Extent(
    (
        *("gpt-2.8b", "mistral-7b", "llama3-8b", "llama2-13b", "gemma3-27b", "qwen3-30b-a3b"),
        *("qwen3-32b", "mixtral-8x7b", "llama3-70b", "llama3-405b"),
    ),
    ("a100-40gb", "a100-80gb", "h100-80gb", "h200", "b200", "gb200", "l40s", "rtx-pro-6000"),
    (8, 16, 32, 64, 128, 256, 512, 1024),
)
SMALL = Extent(("llama3-8b", "qwen3-32b", "llama3-70b"), ("a100-80gb", "h100-80gb", "b200"), (8, 16, 64, 256))
"""What the documentation's workflow builds."""
