"""How much jitter a simulation has; what it does with it: `sim/timing/jitter.py`."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from fsdpbench.numbers import finite_number, whole_number


class JitterError(ValueError):
    """A text that says no jitter; the message names it and how to write it."""


@dataclass(frozen=True)
class JitterSettings:
    """How much of it. ``kernels`` and ``straggler`` are shares, ``arrival_us`` is in microseconds."""

    seed: int
    kernels: float = 0.02
    arrival_us: float = 20.0
    straggler: float = 0.0

    def __post_init__(self) -> None:
        limits = (("kernels", 0.25), ("arrival_us", 1e6), ("straggler", 10.0))
        for name, most in limits:
            value = getattr(self, name)
            if not 0 <= value <= most:
                raise JitterError(f"jitter: {name}={value} must be from 0 to {most:g}")

    @classmethod
    def parse(cls, text: str) -> JitterSettings:
        """``7``, or ``seed=7,kernels=0.03,arrival_us=50,straggler=0.05``. Raises `JitterError`."""
        fields = {field.name: field for field in dataclasses.fields(cls)}
        values: dict[str, Any] = {}
        for part in text.split(","):
            name, equals, value = part.partition("=")
            name, value = (name.strip(), value.strip()) if equals else ("seed", name.strip())
            if name not in fields:
                raise JitterError(f"jitter: unknown {name!r}; known are {', '.join(fields)}")
            try:
                values[name] = whole_number(value, 0) if name == "seed" else finite_number(value)
            except ValueError:
                raise JitterError(
                    f"jitter: {part.strip()!r} is not a number; write a seed, or seed=7,kernels=0.03"
                ) from None
        if "seed" not in values:
            raise JitterError(f"jitter: {text!r} has no seed; write seed=7,{text}")
        return cls(**values)

    def to_text(self) -> str:
        """As `parse` reads it."""
        return ",".join(f"{name}={value:g}" for name, value in dataclasses.asdict(self).items())
