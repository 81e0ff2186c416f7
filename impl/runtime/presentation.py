"""What a front end decides: how the parameters and gradients of a unit look from outside."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Protocol

import torch
from torch import nn

from ..shared.shown import Assignments, ModulePlace, assignments, show
from ..shared.torch_internals import DisableTorchFunction, current_graph_task_id
from .gradient_state import GradientState

TRAINS = attrgetter("requires_grad")
VERSION = attrgetter("_version")
"""How often a tensor was written to."""


class WholeForm(Protocol):
    """How a parameter looks while it is gathered, where that is not a plain tensor (``placement.py``)."""

    def unsharded(self, local: torch.Tensor) -> torch.Tensor:
        """What the modules see for the gathered ``local``."""

    def local_gradient(self, gradient: torch.Tensor) -> torch.Tensor:
        """The plain tensor of this rank that is reduced for ``gradient``."""


@dataclass
class UnitParameter:
    """A parameter of a unit: its name in the root, its places and whether it is trained."""

    fqn: str
    places: tuple[ModulePlace, ...]
    requires_grad: bool
    whole: WholeForm | None = None


class HoldsGradients(Protocol):
    """Where unsharded gradients are between two backward passes: a unit."""

    plain: bool
    gradients: GradientState
    unsharded: list[nn.Parameter]


class Unreduced(Protocol):
    """What a presentation shows of a unit's unsharded gradients between two backward passes."""

    shown: bool

    def show(self, unit: HoldsGradients) -> None:
        """Backward ended without reducing: show what it left, if anything."""

    def take_back(self, unit: HoldsGradients) -> None:
        """Another backward starts: follow what the user did, and show reduced gradients again."""

    def check_hidden(self) -> None:
        """Raise AssertionError where sharded gradients are needed and others are shown."""


class Presentation(Protocol):
    """What a front end decides: how a unit's parameters and gradients look from outside."""

    def show_sharded(self) -> None:
        """Let the modules show the sharded parameters."""

    def show_unsharded(self) -> None:
        """Let the modules show the unsharded parameters."""

    @property
    def unreduced(self) -> Unreduced | None:
        """Shows gradients that were not reduced yet, where the front end does."""

    writes: int
    """How often the shard was written to, as far as optimizers, version counters and new data show."""

    def take_up_changes(self, before_write: Callable[[], None]) -> bool:
        """Follow what the user did to the sharded parameters; whether new data was written to the shard.

        Called before each gather. ``before_write`` is called before the shard is written to.
        """

    def changed(self) -> bool:
        """Whether the user wrote to the sharded parameters since, as far as that can be seen."""

    def trained(self) -> Sequence[nn.Parameter]:
        """The parameters that an optimizer sees: those that hold this rank's part."""

    def adopt_unsharded(self, parameters: Sequence[nn.Parameter]) -> None:
        """Learn the unsharded parameters; called once, when they first exist."""

    def deliver(self, gradient: torch.Tensor, which: Sequence[int], offsets: Sequence[int]) -> None:
        """Add the parts of a reduced flat gradient to the sharded parameters' ``grad``.

        Args:
            gradient: 1-D, the reduced local shard in the delivered dtype.
            which: indices of the parameters that take part, in order.
            offsets: start of each one's part in ``gradient``.
        """

    def readopt(self) -> torch.Tensor | None:
        """Take up what the modules show now, after they were moved, materialised or loaded into.

        Returns a new flat shard if the parameters left the old one, else ``None``.
        """

    def deliver_local(self, gradients: Sequence[torch.Tensor], which: Sequence[int]) -> None:
        """World size 1: the unsharded gradients of parameters ``which`` are the result."""


class ShownInPlace:
    """Shows parameters where they are registered: the sharded ones, or the unsharded ones in their stead.

    Its heirs set ``sharded`` and call ``_sharded_changed``.
    """

    sharded: list[nn.Parameter]
    writes = 0
    follows_freezing = False
    """Whether unsharded parameters are frozen and thawed as they are shown."""

    def __init__(self, parameters: Sequence[UnitParameter]) -> None:
        self._parameters = parameters
        self._unsharded: list[nn.Parameter] = []
        self._show_sharded: Assignments = []
        self._show_unsharded: Assignments = []

    def show_sharded(self) -> None:
        show(self._show_sharded)

    def show_unsharded(self) -> None:
        show(self._show_unsharded)
        # In backward nothing is frozen or thawed: a recomputation has to see what forward saw.
        if self.follows_freezing and current_graph_task_id() == -1:
            with DisableTorchFunction():
                trains = list(map(TRAINS, self.sharded))
                if trains != list(map(TRAINS, self._unsharded)):
                    for trained, unsharded in zip(trains, self._unsharded, strict=True):
                        unsharded.requires_grad_(trained)

    def trained(self) -> Sequence[nn.Parameter]:
        return self.sharded

    def adopt_unsharded(self, parameters: Sequence[nn.Parameter]) -> None:
        self._unsharded = list(parameters)
        self._show_unsharded = self._places_of(parameters)

    def _sharded_changed(self) -> None:
        """``sharded`` are other objects than before: show these."""
        self._show_sharded = self._places_of(self.sharded)

    def _places_of(self, values: Sequence[nn.Parameter]) -> Assignments:
        return assignments(self._parameters, values, lambda module: module._parameters)
