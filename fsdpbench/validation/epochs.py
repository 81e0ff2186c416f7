"""What is known of the software of published sources, beyond what their rows say.

Each source with the settings of its optimizer and its loss, and the software profile of its time; a source
that is not named here is taken as of today.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from fsdpbench.configuration.config import ShapeValue
from fsdpbench.configuration.settings import Value


@dataclass(frozen=True)
class Epoch:
    """The software of a source: its profile (`None`: today's), settings, and fields of the shape."""

    software: str | None = None
    settings: Mapping[str, Value] = field(default_factory=dict)
    shape: Mapping[str, ShapeValue] = field(default_factory=dict)


_SOURCES: dict[str, Epoch] = {
    "torchtitan-A100": Epoch(),
    "torchtitan-H100": Epoch(),
    "IBM-fms": Epoch(settings={"optimizer": "adamw-foreach"}, shape={"fp32_loss": False}),
    "fms-accel": Epoch(settings={"optimizer": "adamw-foreach"}, shape={"fp32_loss": False}),
}


def software_of(source: str) -> str | None:
    """The software profile of the source's time; `None` for today's."""
    return _SOURCES.get(source, Epoch()).software


def settings_of(source: str) -> dict[str, Value]:
    """Settings that the source's training loop had."""
    return dict(_SOURCES.get(source, Epoch()).settings)


def shape_of(source: str) -> dict[str, ShapeValue]:
    """Fields of the shape that the source's models had."""
    return dict(_SOURCES.get(source, Epoch()).shape)
