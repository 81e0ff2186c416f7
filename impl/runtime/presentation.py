"""How a unit's parameters, gradients and names appear to the user, which the front end decides."""

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

# The name under which an FSDP1 wrapper registers the wrapped module.
WRAPPED = "_fsdp_wrapped_module"
# The name under which the module wrapped by FSDP1 registers the flat parameter.
FLAT_NAME = "_flat_param"
# The name under which a wrapper for activation checkpointing registers the wrapped module.
CHECKPOINTED = "_checkpoint_wrapped_module"
# Parts of names that state dicts omit. Like torch's, they keep the compiler's `_orig_mod`.
INSERTED = (WRAPPED, CHECKPOINTED)
# Parts of names that unit names omit.
NOT_SHOWN = (*INSERTED, "_orig_mod")


def plain_name(name: str, without: Sequence[str] = INSERTED) -> str:
    """Return ``name`` without the parts in ``without``; a trailing dot stays."""
    if "_" not in name:
        return name
    return ".".join(part for part in name.split(".") if part not in without)


# -- where modules show parameters ---------------------------------------------------------------------------

TRAINS = attrgetter("requires_grad")
# The version counter of a tensor.
VERSION = attrgetter("_version")


@dataclass(frozen=True)
class ModulePlace:
    """A module and the name under which it registers a parameter. A tied parameter has several places."""

    module: nn.Module
    name: str


@dataclass
class UnitParameter:
    """A parameter of a unit: its FQN, its places and whether it is trained."""

    fqn: str
    places: tuple[ModulePlace, ...]
    requires_grad: bool
    # The unsharded form, if that is not a plain tensor.
    whole: TensorParallel | None = None


# For each module, its registry and the parameters to show there, by name.
Assignments = list[tuple[dict[str, Any], dict[str, torch.Tensor]]]


def assignments(
    parameters: Iterable[UnitParameter],
    values: Sequence[torch.Tensor],
    registry_of: Callable[[nn.Module], dict[str, Any]],
) -> Assignments:
    """Build the assignments that show each value at all places of its parameter."""
    by_module: dict[nn.Module, dict[str, torch.Tensor]] = {}
    for parameter, value in zip(parameters, values, strict=True):
        for place in parameter.places:
            by_module.setdefault(place.module, {})[place.name] = value
    return [(registry_of(module), shown) for module, shown in by_module.items()]


def show(where: Assignments) -> None:
    """Register every parameter at its places."""
    for registry, shown in where:
        registry.update(shown)


def is_shown(where: Assignments) -> bool:
    """Return whether every place still holds the parameter registered by ``show``."""
    return all(all(map(is_, map(registry.get, shown), shown.values())) for registry, shown in where)


class HoldsGradients(Protocol):
    """An object that holds unsharded gradients between two backward passes: a unit."""

    plain: bool
    gradients: GradientState
    unsharded: list[nn.Parameter]


class Unreduced(Protocol):
    """The unreduced gradients of a unit as the user sees them between two backward passes."""

    shown: bool

    def show(self, unit: HoldsGradients) -> None:
        """Show the gradients of a backward that did not reduce, if there are any."""

    def take_back(self, unit: HoldsGradients) -> None:
        """Apply the user's changes and show reduced gradients again, when another backward starts."""


class Presentation(Protocol):
    """How a unit's parameters and gradients appear to the user, which the front end decides."""

    def show_sharded(self) -> None:
        """Make the modules show the sharded parameters, if they do not yet."""
        return

    def show_unsharded(self) -> None:
        """Make the modules show the unsharded parameters."""

    # The parameter that users see instead of the unit's own, if the front end has one.
    flat_param: nn.Parameter | None = None

    # Shows gradients that were not reduced yet, if the front end does so.
    unreduced: Unreduced | None = None

    # Number of writes to the shard on this rank that optimizers, version counters and new data reveal.
    writes: int = 0
    # Number of possible writes on any rank. It decides about gathers, which are collective.
    # Invariant: equal on all ranks, also on one that holds no element of the parameters that an optimizer
    # steps on (tests/impl/values, test_ranks_without_elements_agree).
    steps: int = 0
    # Whether gradients of this unit were ever reduced. All ranks reduce together.
    had_gradients: bool = False
    # Whether modules show the sharded parameters between forward and backward if the unsharded ones are kept.
    hides: bool = False
    # Whether a forward without grad frees parameters that ``reshard_after_forward`` keeps.
    drops_without_grad: bool = False
    # Whether a forward in training raises if it writes to its unsharded parameters.
    refuses_writes: bool = False
    # Raises if the sharded parameters changed since forward gathered them.
    before_backward: Callable[[], None] | None = None

    def take_up_changes(self, before_write: Callable[[], None]) -> bool:
        """Apply the user's changes to the sharded parameters; return whether the shard was written to.

        Called before each gather. Calls ``before_write`` before it writes to the shard.
        """

    def changed(self) -> bool:
        """Return whether the user wrote to the sharded parameters since the gather, if detectable."""

    def follow_freezing(self) -> None:
        """Copy ``requires_grad`` of the sharded parameters to the unsharded ones."""

    def trained(self) -> Sequence[nn.Parameter]:
        """Return the parameters that the optimizer updates. They hold this rank's part."""

    def adopt_unsharded(self, parameters: Sequence[nn.Parameter]) -> None:
        """Store the unsharded parameters; called once, when they are created."""

    def deliver(self, gradient: torch.Tensor, which: Sequence[int], offsets: Sequence[int]) -> None:
        """Add the parts of a reduced flat gradient to the sharded parameters' ``grad``.

        Args:
            gradient: 1-D, the reduced local shard in the delivered dtype.
            which: indices of the parameters that take part, in order.
            offsets: start of each parameter's part in ``gradient``.
        """

    def readopt(self) -> torch.Tensor | None:
        """Adopt the parameters that the modules show now, after they were moved, materialised or loaded.

        Return a new flat shard if the parameters are no longer views of the old one, else ``None``.
        """

    def deliver_local(self, gradients: Sequence[torch.Tensor], which: Sequence[int]) -> None:
        """Add one gradient for each of the parameters ``which`` to the sharded parameters' ``grad``."""


class ShownInPlace(Presentation):
    """Registers either the sharded or the unsharded parameters at the places of the original ones.

    Subclasses set ``sharded`` and call ``_sharded_changed``.
    """

    sharded: list[nn.Parameter]

    def __init__(self, layout: UnitLayout, parameters: Sequence[UnitParameter]) -> None:
        self._layout = layout
        self._parameters = parameters
        self._cuts: dict[tuple[int, ...], Cuts] = {}
        self._versions: list[int] = []
        self._unsharded: list[nn.Parameter] = []
        # ``requires_grad`` of the sharded parameters when it was last copied to the unsharded ones.
        self._trained: list[bool] = []
        self._show_sharded: Assignments = []
        self._show_unsharded: Assignments = []

    def show_sharded(self) -> None:
        for registry, shown in self._show_sharded:
            registry.update(shown)

    def show_unsharded(self) -> None:
        for registry, shown in self._show_unsharded:
            registry.update(shown)
        # Not in backward: a recomputation must see the same ``requires_grad`` as forward.
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
        """Rebuild the assignments after ``sharded`` got new objects."""
        self._show_sharded = self._places_of(self.sharded)

    def _places_of(self, values: Sequence[nn.Parameter]) -> Assignments:
        return assignments(self._parameters, values, lambda module: module._parameters)


def follow_requires_grad(
    parameters: Sequence[UnitParameter], unsharded: Sequence[nn.Parameter], flags: Sequence[bool]
) -> None:
    """Set ``requires_grad`` of the unsharded parameters, so that the next graph has those trained now."""
    for described, flag in zip(parameters, flags, strict=True):
        described.requires_grad = flag
    for parameter, flag in zip(unsharded, flags, strict=False):  # empty before the first gather
        if parameter.requires_grad != flag:
            parameter.requires_grad_(flag)


# -- count the writes of optimizers to shards, in hooks on their steps ---------------------------------------
# Version counters do not detect all writes: neither fused optimizers nor ``foreach`` on ``DTensor``s (the
# default on a GPU) increment them. Parameters gathered before a step are stale after it, and a backward must
# not use parameters gathered after a step that followed its forward.

_counted: WeakSet[Presentation] = WeakSet()
# For each optimizer: its number of parameters, and the presentations that show them. Cleared by new units.
_stepped_by: MutableMapping[Optimizer, tuple[int, WeakSet[Presentation]]] = WeakKeyDictionary()


def count_steps(presentations: Iterable[Presentation]) -> None:
    """Count from now on how often optimizers step on these units' parameters.

    ``Presentation.writes`` counts steps with gradients on this rank, ``Presentation.steps`` on any rank.
    """
    _hook_optimizers()
    _counted.update(presentations)
    _stepped_by.clear()


@cache
def _hook_optimizers() -> None:
    register_optimizer_step_post_hook(_after_step)


def _after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if torch.compiler.is_compiling():
        return  # the step is being traced; only version counters detect its writes
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


# -- detect optimizers that hold replaced parameters ---------------------------------------------------------
# They were made before wrapping, while unsharded parameters were shown, or from attributes of modules.

# Attribute of a parameter that is no longer trained: the title of the unit that replaced it.
_REPLACED = "_fsdp_replaced_by"

# Optimizers whose parameters were checked since parameters were last replaced.
_looked_at: WeakSet[Optimizer] = WeakSet()


def mark_replaced(parameters: Iterable[torch.Tensor], title: str) -> None:
    """Mark ``parameters`` as no longer trained: a unit of the module ``title`` took their values."""
    for parameter in parameters:
        parameter.__dict__[_REPLACED] = title
        _looked_at.clear()
        _guard_optimizers()


@cache
def _guard_optimizers() -> None:
    register_optimizer_step_pre_hook(_before_step)


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Check an optimizer before its first step after parameters were replaced."""
    if torch.compiler.is_compiling() or optimizer in _looked_at:
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            title = parameter.__dict__.get(_REPLACED)
            if title is not None:
                kind, shape = type(optimizer).__name__, tuple(parameter.shape)
                raise RuntimeError(error_text("presentation.before_step", kind, shape, title))
    _looked_at.add(optimizer)
