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


_SOURCES: dict[str, Epoch] = {
    "torchtitan-A100": Epoch("torchtitan-2024-summer"),
    "torchtitan-H100": Epoch("torchtitan-2024-winter"),
    "IBM-fms": Epoch("fms-fsdp-2024", {"optimizer": "adamw-foreach"}),
    "fms-accel": Epoch("fms-acceleration-2024", {"optimizer": "adamw-foreach"}),
}


def software_of(source: str) -> str | None:
    """The software profile of the source's time; `None` for today's."""
    return _SOURCES.get(source, Epoch()).software


def settings_of(source: str) -> dict[str, Value]:
    """Settings that the source's training loop had."""
    return dict(_SOURCES.get(source, Epoch()).settings)
