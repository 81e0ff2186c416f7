"""What is known of the software of published sources, beyond what their rows say.

Each source with the software profile of its time and the settings of its training loop; a source that is
not named here is taken as of today.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from fsdpbench.configuration.settings import Value


@dataclass(frozen=True)
class Epoch:
    """The software of a source: its profile (`None`: today's) and settings."""

    software: str | None = None
    settings: Mapping[str, Value] = field(default_factory=dict)


# TorchTitan's train.py and parallelize_llama.py of 2024: max_norm = 1.0, the last block is not resharded.
_TORCHTITAN: dict[str, Value] = {"clip": 1.0, "keep_last_unsharded": True}
# fms-fsdp: grad_clip_thresh = 1.0; transformers' Trainer: max_grad_norm = 1.0. AdamW with torch's defaults.
_DEFAULT_ADAMW: dict[str, Value] = {"clip": 1.0, "optimizer": "adamw-foreach"}
_SOURCES: dict[str, Epoch] = {
    "torchtitan-A100": Epoch("torchtitan-2024-summer", _TORCHTITAN),
    "torchtitan-H100": Epoch("torchtitan-2024-winter", _TORCHTITAN),
    "IBM-fms": Epoch("fms-fsdp-2024", _DEFAULT_ADAMW),
    "fms-accel": Epoch("fms-acceleration-2024", _DEFAULT_ADAMW),
}


def software_of(source: str) -> str | None:
    """The software profile of the source's time; `None` for today's."""
    return _SOURCES.get(source, Epoch()).software


def settings_of(source: str) -> dict[str, Value]:
    """Settings that the source's training loop had."""
    return dict(_SOURCES.get(source, Epoch()).settings)
