"""The operations of programs. Each is one thing that a training script does."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any


class Plain:
    """Prints what is not the default."""

    def __repr__(self) -> str:
        shown: list[str] = []
        for each in fields(self):  # type: ignore[arg-type]
            value: Any = getattr(self, each.name)
            if value != each.default:
                shown.append(f"{each.name}={value!r}")
        return f"{type(self).__name__}({', '.join(shown)})"


@dataclass(frozen=True, repr=False)
class Operation(Plain):
    """The base of all."""


@dataclass(frozen=True, repr=False)
class Forward(Operation):
    """The model's loss on the next batch; waits for its backward if it has gradients."""

    mode: str = "grad"
    """``grad``, ``no_grad`` or ``inference``."""
    skip: tuple[int, ...] = ()
    """Blocks that are left out this time."""
    branch: bool = True
    fail: int | None = None
    """This block's forward raises."""
    input_grad: bool = False


@dataclass(frozen=True, repr=False)
class Backward(Operation):
    """Backward of the latest loss that waits for it."""

    oldest: bool = False
    retain: bool = False
    fail: int | None = None
    """This block's backward raises; told to the forward before."""


@dataclass(frozen=True, repr=False)
class MakeOptimizer(Operation):
    kind: str = "SGD"


@dataclass(frozen=True, repr=False)
class Step(Operation):
    """One step of the optimizer, made at the first of them as SGD."""


@dataclass(frozen=True, repr=False)
class ZeroGrad(Operation):
    to_none: bool = True
    of_model: bool = False


@dataclass(frozen=True, repr=False)
class SetTraining(Operation):
    training: bool = False
