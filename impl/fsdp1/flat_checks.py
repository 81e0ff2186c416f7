"""Checks for misuse of ``FullyShardedDataParallel``: modules called outside of their unit's forward, changes
before backward, calls in the wrong state; and warnings."""

import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..runtime.hooks import stage_of
from ..runtime.ownership import Ignored
from ..runtime.unit import Unit, UnitState
from ..shared import error_text
from ..shared.torch_internals import TrainingState
from .flat_param import FlatPresentation
from .original_params import OriginalPresentation
from .settings import ShardingStrategy


def check_first_calls(unit: Unit) -> None:
    """Register forward pre-hooks that check that the parameters of ``unit`` are unsharded.

    A hook removes itself after the first successful check, so that training has no overhead. With
    ``TORCH_DISTRIBUTED_DEBUG`` at ``INFO`` or ``DETAIL`` it stays.
    """
    for module in {place.module for parameter in unit.parameters for place in parameter.places}:
        _check_first_call(unit, module)


def check_unchanged(
    unit: Unit, presentation: FlatPresentation | OriginalPresentation, error: type[Exception]
) -> None:
    """Raise RuntimeError if a unit's parameters were written to since its forward, ``error`` if replaced."""
    # Invariant: backward uses the values that forward read (tests/impl/fsdp1/test_flat_changes.py).
    replaced = unit.state is not UnitState.UNSHARDED and presentation.replaced()
    if replaced or presentation.changed():
        how = "replaced, or given new data" if replaced else "written to in place"
        raise (error if replaced else RuntimeError)(error_text("flat_checks.check_unchanged", unit.name, how))


def check_outside(call: str, state: TrainingState) -> None:
    """Raise ValueError if ``call`` is made inside forward, backward or ``summon_full_params``."""
    if state is not TrainingState.IDLE:
        raise ValueError(error_text("flat_checks.outside", call, TrainingState.IDLE, state))


def check_summoning(writeback: bool, rank0_only: bool, offload_to_cpu: bool) -> None:
    """Raise NotImplementedError if ranks without values would write back; warn about copies on all ranks."""
    if writeback and rank0_only:
        raise NotImplementedError(error_text("flat_checks.summoning"))
    if offload_to_cpu and not rank0_only:
        text = "offload_to_cpu=True and rank0_only=False makes a copy on the CPU for each rank"
        warnings.warn(text, stacklevel=5)


def warn_of_wrapping(
    module: nn.Module, ignored: bool, asked: ShardingStrategy, effective: ShardingStrategy
) -> None:
    """Warn if wrapping ``module`` does not have the requested effect; it may be ``ignored`` itself."""
    found: list[str] = []
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
        found.append(error_text("flat_checks.container", module))
    if ignored:
        found.append(f"{type(module).__name__} is wrapped and ignored, so none of its parameters are sharded")
    if effective is not asked:
        found.append(error_text("flat_checks.one_rank", effective.name, asked.name))
    for text in found:
        warnings.warn(text, stacklevel=3)


def warn_of_frozen(units: Sequence[Unit]) -> None:
    """Warn about units with both frozen and trained parameters: gradients of both are reduced."""
    for unit in units:
        frozen = [parameter.fqn for parameter in unit.parameters if not parameter.requires_grad]
        if frozen and len(frozen) < len(unit.parameters):
            warnings.warn(error_text("flat_checks.frozen", unit.name, frozen[0]), stacklevel=4)


def _check_first_call(unit: Unit, module: nn.Module) -> None:
    presentation = unit.presentation
    assert isinstance(presentation, (FlatPresentation, OriginalPresentation))

    def check(module: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling():
            return
        if unit.state is not UnitState.UNSHARDED and not presentation.shows_full:
            raise RuntimeError(error_text("flat_checks.check", type(module).__name__, unit.name))
        if dist.get_debug_level() == dist.DebugLevel.OFF:
            handle.remove()

    handle = module.register_forward_pre_hook(check)


def ignored(
    modules: Iterable[nn.Module] | None, states: Iterable[nn.Parameter] | Iterable[nn.Module] | None
) -> Ignored:
    """Return what a wrapper ignores. Raises ``ValueError`` for invalid arguments."""
    if modules is not None and states is not None:
        raise ValueError("give ignored_modules or ignored_states, not both: ignored_states takes modules too")
    own_modules, own_states = list(modules or ()), list[Any](states or ())
    for name, found, kinds in (
        ("ignored_modules", own_modules, (nn.Module,)),
        ("ignored_states", own_states, (nn.Parameter, nn.Module)),
    ):
        if found and not any(all(isinstance(each, kind) for each in found) for kind in kinds):
            types = ", ".join(sorted({type(each).__name__ for each in found}))
            wanted = " or all ".join(f"nn.{kind.__name__}" for kind in kinds)
            raise ValueError(f"{name} must be all {wanted}, not {types}")
        for each in found:
            if isinstance(each, nn.Module) and stage_of(each) is not None:
                raise ValueError(error_text("flat_checks.ignored", name, type(each).__name__))
    return Ignored(own_modules, own_states)
