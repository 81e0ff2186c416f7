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
                text = "float('inf')" if value == float("inf") else repr(value)
                shown.append(f"{each.name}={text}")
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


@dataclass(frozen=True, repr=False)
class NoSync(Operation):
    """Enters ``no_sync()`` (``fully_shard``: no gradient sync), or leaves it."""

    on: bool = True


@dataclass(frozen=True, repr=False)
class Setting(Operation):
    """Calls a ``set_...`` method of the root or of a block."""

    name: str = "set_requires_gradient_sync"
    value: Any = False
    block: int | None = None


@dataclass(frozen=True, repr=False)
class Unshard(Operation):
    block: int | None = None
    asynchronous: bool = False


@dataclass(frozen=True, repr=False)
class Reshard(Operation):
    block: int | None = None


@dataclass(frozen=True, repr=False)
class ResetIterState(Operation):
    """What torch asks for after an exception in forward or backward."""


@dataclass(frozen=True, repr=False)
class RequireGrad(Operation):
    """Freezes or thaws a block's parameters: all, or those whose name ends so."""

    block: int = 0
    ending: str = ""
    value: bool = False


@dataclass(frozen=True, repr=False)
class Write(Operation):
    """Changes a parameter by hand.

    ``how``: ``data`` assigns ``.data``, ``wrong`` the same of another shape, ``data_copy`` copies into
    ``.data``, ``in_place`` multiplies without gradients, ``replace`` registers a new ``nn.Parameter``.
    """

    how: str = "data"
    index: int = 0


@dataclass(frozen=True, repr=False)
class Summon(Operation):
    """``summon_full_params``; ``change`` halves what is shown."""

    writeback: bool = True
    rank0_only: bool = False
    offload: bool = False
    with_grads: bool = False
    recurse: bool = True
    change: bool = False


@dataclass(frozen=True, repr=False)
class SaveState(Operation):
    """A state dict, kept for a later load."""

    kind: str = "full"
    """``full``, ``sharded`` or ``local``; with ``fully_shard`` ``plain`` too."""
    offload: bool = False
    rank0_only: bool = False


@dataclass(frozen=True, repr=False)
class LoadState(Operation):
    """Loads the state dict kept last; ``other`` is that of the other side."""

    other: bool = False
    assign: bool = False
    missing: bool = False
    """Its first entry is left out."""


@dataclass(frozen=True, repr=False)
class SaveOptimizer(Operation):
    kind: str = "full"


@dataclass(frozen=True, repr=False)
class LoadOptimizer(Operation):
    other: bool = False


@dataclass(frozen=True, repr=False)
class Clip(Operation):
    norm: float = 2.0
    to: float = 0.01


@dataclass(frozen=True, repr=False)
class Copy(Operation):
    """A deep copy, looked at and dropped."""


@dataclass(frozen=True, repr=False)
class RemakeGroups(Operation):
    """Destroys all process groups, makes new ones, and builds the model anew."""


@dataclass(frozen=True, repr=False)
class OptimizerInBackward(Operation):
    """Steps as soon as a gradient is there; ``applied`` is ``_apply_optimizer_in_backward``."""

    applied: bool = False


@dataclass(frozen=True, repr=False)
class Patch(Operation):
    """Replaces a block's ``forward``, on the instance or on the class."""

    of_class: bool = False


@dataclass(frozen=True, repr=False)
class Convert(Operation):
    """``model.to(dtype)``."""

    dtype: str = "float64"


@dataclass(frozen=True, repr=False)
class Apply(Operation):
    """``model.apply`` of something that writes to parameters."""


@dataclass(frozen=True, repr=False)
class Attributes(Operation):
    """What an instance says of itself."""


@dataclass(frozen=True, repr=False)
class Misuse(Operation):
    """Something that one of the sides refuses: see ``misuse.py``."""

    what: str = "wrap_again"
