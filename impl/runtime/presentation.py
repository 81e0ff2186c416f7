"""The look of a unit from outside, which a front end decides: its parameters, gradients and names."""

from collections.abc import Callable, Iterable, MutableMapping, Sequence
from dataclasses import dataclass
from functools import cache
from operator import attrgetter, is_
from typing import Any, Protocol
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ..shared import error_text
from ..shared.layout import Cuts, UnitLayout
from ..shared.placement import TensorParallel
from ..shared.torch_internals import DisableTorchFunction, current_graph_task_id
from .gradient_state import GradientState, any_gradient

# The name under which an FSDP1 wrapper registers what it wraps.
WRAPPED = "_fsdp_wrapped_module"
# The name under which the module that an FSDP1 wrapper wraps registers the flat parameter.
FLAT_NAME = "_flat_param"
# The name under which a wrapper for activation checkpointing does.
CHECKPOINTED = "_checkpoint_wrapped_module"
# What state dicts do not show. They do show the compiler's `_orig_mod`, as torch's do.
INSERTED = (WRAPPED, CHECKPOINTED)
# What people need not see in a unit's name.
NOT_SHOWN = (*INSERTED, "_orig_mod")


def plain_name(name: str, without: Sequence[str] = INSERTED) -> str:
    """Return ``name`` without these parts; a trailing dot stays."""
    if "_" not in name:
        return name
    return ".".join(part for part in name.split(".") if part not in without)


# -- where modules show parameters ---------------------------------------------------------------------------

TRAINS = attrgetter("requires_grad")
# How often a tensor was written to.
VERSION = attrgetter("_version")


@dataclass(frozen=True)
class ModulePlace:
    """Where a parameter is registered; a parameter tied inside its unit has several places."""

    module: nn.Module
    name: str


@dataclass
class UnitParameter:
    """A parameter of a unit: its name in the root, its places and whether it is trained."""

    fqn: str
    places: tuple[ModulePlace, ...]
    requires_grad: bool
    # Its form while it is gathered, where that is not a plain tensor.
    whole: TensorParallel | None = None


# For each module, its registry and the parameters to show there, by name.
Assignments = list[tuple[dict[str, Any], dict[str, torch.Tensor]]]


def assignments(
    parameters: Iterable[UnitParameter],
    values: Sequence[torch.Tensor],
    registry_of: Callable[[nn.Module], dict[str, Any]],
) -> Assignments:
    """Show each value at all places of its parameter, in the order of the parameters."""
    by_module: dict[nn.Module, dict[str, torch.Tensor]] = {}
    for parameter, value in zip(parameters, values, strict=True):
        for place in parameter.places:
            by_module.setdefault(place.module, {})[place.name] = value
    return [(registry_of(module), shown) for module, shown in by_module.items()]


def show(where: Assignments) -> None:
    """Put every parameter in its places."""
    for registry, shown in where:
        registry.update(shown)


def is_shown(where: Assignments) -> bool:
    """Return whether every place still holds what was put there."""
    return all(all(map(is_, map(registry.get, shown), shown.values())) for registry, shown in where)


class HoldsGradients(Protocol):
    """Where unsharded gradients are between two backward passes: a unit."""

    plain: bool
    gradients: GradientState
    unsharded: list[nn.Parameter]


class Unreduced(Protocol):
    """The view of a unit's unsharded gradients between two backward passes."""

    shown: bool

    def show(self, unit: HoldsGradients) -> None:
        """Show what a backward that did not reduce left, if anything."""

    def take_back(self, unit: HoldsGradients) -> None:
        """Follow what the user did, and show reduced gradients again, as another backward starts."""


class Presentation(Protocol):
    """The look of a unit's parameters and gradients from outside, which a front end decides."""

    def show_sharded(self) -> None:
        """Let the modules show the sharded parameters, where they did not."""
        return

    def show_unsharded(self) -> None:
        """Let the modules show the unsharded parameters."""

    # The parameter that users see instead of the unit's own, where the front end has one.
    flat_param: nn.Parameter | None = None

    # Shows gradients that were not reduced yet, where the front end does.
    unreduced: Unreduced | None = None

    # How often this rank wrote to the shard, as far as optimizers, version counters and new data show.
    writes: int = 0
    # How often it may have been, on any rank: gathers are decided by it, which are collective.
    # Invariant: equal on all ranks, also on one that holds no element of the parameters that an optimizer
    # steps on (tests/impl/values, test_ranks_without_elements_agree).
    steps: int = 0
    # Whether gradients of this unit were ever reduced, which all ranks do together.
    had_gradients: bool = False
    # Whether the sharded parameters are shown between forward and backward, though the others are kept.
    hides: bool = False
    # Whether what forward does not free is freed after a forward without gradients.
    drops_without_grad: bool = False
    # Whether training refuses a forward that writes to its gathered parameters.
    refuses_writes: bool = False
    # Raises where the sharded parameters changed since forward gathered them.
    before_backward: Callable[[], None] | None = None

    def take_up_changes(self, before_write: Callable[[], None]) -> bool:
        """Follow what the user did to the sharded parameters; whether new data was written to the shard.

        Called before each gather. ``before_write`` is called before the shard is written to.
        """

    def changed(self) -> bool:
        """Return whether the user wrote to the sharded parameters since, as far as that can be seen."""

    def follow_freezing(self) -> None:
        """Freeze or thaw the unsharded parameters as the user did to the sharded ones since."""

    def trained(self) -> Sequence[nn.Parameter]:
        """Return the parameters that an optimizer sees: those that hold this rank's part."""

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
        """Add unsharded gradients of the parameters ``which``, which are the result where one rank is all."""


class ShownInPlace(Presentation):
    """Shows parameters where they are registered: the sharded ones, or the unsharded ones in their stead.

    Its heirs set ``sharded`` and call ``_sharded_changed``.
    """

    sharded: list[nn.Parameter]

    def __init__(self, layout: UnitLayout, parameters: Sequence[UnitParameter]) -> None:
        self._layout = layout
        self._parameters = parameters
        self._cuts: dict[tuple[int, ...], Cuts] = {}
        self._versions: list[int] = []
        self._unsharded: list[nn.Parameter] = []
        # Which sharded parameters required a gradient when the unsharded ones followed them last.
        self._trained: list[bool] = []
        self._show_sharded: Assignments = []
        self._show_unsharded: Assignments = []

    def show_sharded(self) -> None:
        for registry, shown in self._show_sharded:
            registry.update(shown)

    def show_unsharded(self) -> None:
        for registry, shown in self._show_unsharded:
            registry.update(shown)
        # In backward nothing is frozen or thawed: a recomputation has to see what forward saw.
        if current_graph_task_id() == -1:
            with DisableTorchFunction():
                self._trained = list(map(TRAINS, self.sharded))
                if self._trained != list(map(TRAINS, self._unsharded)):
                    follow_requires_grad(self._parameters, self._unsharded, self._trained)

    def follow_freezing(self) -> None:
        with DisableTorchFunction():
            trains = list(map(TRAINS, self.sharded))
        if trains != self._trained:
            self._trained = trains
            follow_requires_grad(self._parameters, self._unsharded, trains)

    def trained(self) -> Sequence[nn.Parameter]:
        return self.sharded

    def adopt_unsharded(self, parameters: Sequence[nn.Parameter]) -> None:
        self._unsharded = list(parameters)
        self._show_unsharded = self._places_of(parameters)

    def deliver(self, gradient: torch.Tensor, which: Sequence[int], offsets: Sequence[int]) -> None:
        key = (gradient.numel(), *which, *offsets)
        cuts = self._cuts.get(key)
        if cuts is None:
            shapes = [self._layout.segments[index].shard_shape for index in which]
            cuts = self._cuts[key] = Cuts(gradient.numel(), offsets, shapes)
        self.deliver_local(cuts(gradient), which)

    def _sharded_changed(self) -> None:
        """Show the objects that ``sharded`` has now."""
        self._show_sharded = self._places_of(self.sharded)

    def _places_of(self, values: Sequence[nn.Parameter]) -> Assignments:
        return assignments(self._parameters, values, lambda module: module._parameters)


def follow_requires_grad(
    parameters: Sequence[UnitParameter], unsharded: Sequence[nn.Parameter], flags: Sequence[bool]
) -> None:
    """Freeze or thaw the unsharded parameters, so that the next graph is made for those trained now."""
    for described, flag in zip(parameters, flags, strict=True):
        described.requires_grad = flag
    for parameter, flag in zip(unsharded, flags, strict=False):  # none before the unit was first gathered
        if parameter.requires_grad != flag:
            parameter.requires_grad_(flag)


# -- which shards optimizers wrote to, counted where they step -----------------------------------------------
# Version counters do not show it all: neither fused optimizers nor those that step on many ``DTensor``s at a
# time (``foreach``, the default on a GPU) move them on. What was gathered before a step is stale, and
# backward must not use what was gathered after it.

_counted: WeakSet[Presentation] = WeakSet()
# By optimizer: how many parameters it has, and who shows them; empty again when there are more units.
_stepped_by: MutableMapping[Optimizer, tuple[int, WeakSet[Presentation]]] = WeakKeyDictionary()


def count_steps(presentations: Iterable[Presentation]) -> None:
    """Count from now on how often optimizers step on these units' parameters.

    ``Presentation.writes`` counts where this rank has gradients, ``Presentation.steps`` where any may have.
    """
    _hook_optimizers()
    _counted.update(presentations)
    _stepped_by.clear()


@cache
def _hook_optimizers() -> None:
    register_optimizer_step_post_hook(_after_step)


def _after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if torch.compiler.is_compiling():
        return  # a step that is traced: version counters are what is left
    for presentation in _shown_to(optimizer):
        wrote = any_gradient(presentation.trained())
        presentation.writes += wrote
        presentation.steps += wrote or presentation.had_gradients


def _shown_to(optimizer: Optimizer) -> Iterable[Presentation]:
    count = sum(len(group["params"]) for group in optimizer.param_groups)
    known = _stepped_by.get(optimizer)
    if known is None or known[0] != count:
        held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        found = WeakSet(each for each in _counted if not held.isdisjoint(map(id, each.trained())))
        known = _stepped_by[optimizer] = count, found
    return known[1]


# -- optimizers that hold tensors which nothing trains -------------------------------------------------------
# Made before wrapping, while whole parameters were shown, or of modules' attributes.

# Attribute of a parameter that is not trained any more: what took its place.
_REPLACED = "_fsdp_replaced_by"

# Optimizers whose parameters were looked at since parameters were replaced last.
_looked_at: WeakSet[Optimizer] = WeakSet()


def mark_replaced(parameters: Iterable[torch.Tensor], title: str) -> None:
    """Mark ``parameters``, whose values a unit of the module ``title`` took, as no longer trained."""
    for parameter in parameters:
        parameter.__dict__[_REPLACED] = title
        _looked_at.clear()
        _guard_optimizers()


@cache
def _guard_optimizers() -> None:
    register_optimizer_step_pre_hook(_before_step)


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Look at an optimizer before its first step after something was wrapped."""
    if torch.compiler.is_compiling() or optimizer in _looked_at:
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            title = parameter.__dict__.get(_REPLACED)
            if title is not None:
                kind, shape = type(optimizer).__name__, tuple(parameter.shape)
                raise RuntimeError(error_text("presentation.before_step", kind, shape, title))
    _looked_at.add(optimizer)
