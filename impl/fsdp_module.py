"""``FSDPModule``: the methods that a module has after ``fully_shard``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

from torch import nn

from .hooks import Stage, stage_of
from .unit import Unit


class UnshardHandle:
    """What ``unshard`` returns: ``wait`` makes computation wait for the parameters."""

    def __init__(self, stage: Stage | None) -> None:
        self._stage = stage

    def wait(self) -> None:
        """Wait and show the unsharded parameters. Later calls do nothing."""
        if self._stage is not None:
            self._stage.runtime.schedule.await_stage(self._stage)
            self._stage = None


class FSDPModule:
    """Mixed into the class of a module by ``fully_shard``, first in its order of resolution."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Make an unwrapped one: containers build new ones of their own class when they are sliced."""
        original = cls.__mro__[2]
        made = cast(Any, original).__new__(original, *args, **kwargs)
        made.__init__(*args, **kwargs)
        return made

    # -- parameters ------------------------------------------------------------------------------------------

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gather this module's own parameters (not those of units inside).

        Returns a handle to wait on if ``async_op``.
        """
        stage = self._stage()
        stage.runtime.schedule.gather(stage)
        handle = UnshardHandle(stage)
        if async_op:
            return handle
        handle.wait()
        return None

    def reshard(self) -> None:
        """Free this module's own unsharded parameters."""
        for unit in self._stage().units:
            unit.reshard()

    def reset_iter_state(self) -> None:
        """After an exception in forward or backward: drop the iteration, so that another can start. Root
        only.
        """
        stage = self._stage()
        if stage.has_runtime and not stage.is_root:
            raise RuntimeError("reset_iter_state must be called on the root FSDP module")
        stage.runtime.reset()

    # -- gradient reduction ----------------------------------------------------------------------------------

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Whether the next backward ends the iteration; if not, the recorded order is kept for another
        one.
        """
        self._stage().runtime.is_last_backward = is_last_backward

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Whether backward reduces gradients, or accumulates them unsharded without communication."""
        for unit in self._units(recurse):
            unit.gradients.synchronize = requires_gradient_sync

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """With replicas: whether backward sums over them, or accumulates reduce-scattered gradients."""
        for unit in self._units(recurse):
            unit.gradients.all_reduce = requires_all_reduce

    def set_gradient_divide_factor(self, factor: float, *, recurse: bool = False) -> None:
        """Divide the sum of gradients by ``factor`` instead of the number of ranks."""
        if not factor > 0:
            raise ValueError(f"the gradient divide factor must be positive, not {factor!r}")
        for unit in self._units(recurse):
            unit.gradients.divide_factor = factor

    def set_reduce_scatter_divide_factor(self, factor: float, *, recurse: bool = False) -> None:
        """The older name of ``set_gradient_divide_factor``."""
        self.set_gradient_divide_factor(factor, recurse=recurse)

    def set_force_sum_reduction_for_comms(self, enable: bool, *, recurse: bool = False) -> None:
        """Reduce by sums only and divide outside of the collective."""
        for unit in self._units(recurse):
            unit.gradients.force_sum = enable

    def set_reduce_scatter_unused_params(
        self, reduce_scatter_unused_params: bool, *, recurse: bool = True
    ) -> None:
        """Reduce zeros for parameters that got no gradient, so that ranks may use different parameters.

        Without it all ranks must use the same ones, or their collectives do not match.
        """
        for unit in self._units(recurse):
            unit.gradients.unused_as_zero = reduce_scatter_unused_params

    def set_separate_reduce_scatter_group(self, enable: bool = True, *, recurse: bool = True) -> None:
        """Reduce-scatter over a process group of its own, so that it need not queue with all-gathers.

        The first call for a group is collective.
        """
        for unit in self._units(recurse):
            unit.groups = unit.groups.with_reduce_group(enable)

    # -- schedule --------------------------------------------------------------------------------------------

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Whether forward frees the parameters."""
        if not isinstance(reshard_after_forward, bool):
            raise ValueError(
                f"reshard_after_forward must be True or False here, not {reshard_after_forward!r}"
            )
        for unit in self._units(recurse):
            unit.reshard_after_forward = reshard_after_forward

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """Whether backward frees the parameters (not, to save gathers while accumulating gradients)."""
        for unit in self._units(recurse):
            unit.reshard_after_backward = reshard_after_backward

    def set_unshard_in_backward(self, unshard_in_backward: bool, *, recurse: bool = False) -> None:
        """Whether backward needs this module's parameters at all (that of an embedding does not)."""
        for unit in self._units(recurse):
            unit.unshard_in_backward = unshard_in_backward

    def set_modules_to_forward_prefetch(self, modules: list[FSDPModule]) -> None:
        """Gather exactly these ahead when this module's forward starts, instead of by recorded order."""
        self._stage().forward_targets = _stages(modules)

    def set_modules_to_backward_prefetch(self, modules: list[FSDPModule]) -> None:
        """Gather exactly these ahead when this module's backward starts, instead of by recorded order."""
        self._stage().backward_targets = _stages(modules)

    def set_post_optim_event(self, event: Any) -> None:
        """Let the next forward's gathers wait for ``event`` instead of for everything computed so far."""
        self._stage().runtime.optimizer_mark = event

    # -- inside ----------------------------------------------------------------------------------------------

    def _stage(self) -> Stage:
        stage = stage_of(cast(nn.Module, self))
        if stage is None:
            raise RuntimeError(
                f"this {type(self).__name__} has no FSDP state; was it copied from one that has?"
            )
        return stage

    def _units(self, recurse: bool) -> Iterator[Unit]:
        if not recurse:
            yield from self._stage().units
            return
        seen: set[Stage] = set()
        for module in cast(nn.Module, self).modules():
            stage = stage_of(module)
            if stage is not None and stage not in seen:
                seen.add(stage)
                yield from stage.units

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        """``.to``, ``to_empty`` and the like act on the sharded parameters; their memory is taken up
        afterwards.
        """
        self.reshard()
        result = super()._apply(*args, **kwargs)  # type: ignore[misc]
        for unit in self._stage().units:
            unit.readopt()
        return result


def _stages(modules: list[FSDPModule]) -> list[Stage]:
    stages: list[Stage] = []
    for module in modules:
        stage = stage_of(cast(nn.Module, module)) if isinstance(module, FSDPModule) else None
        if stage is None:
            raise ValueError(f"expected modules under fully_shard, got a {type(module).__name__}")
        stages.append(stage)
    return stages


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Let ``module.method_name(...)`` gather and free parameters as ``module(...)`` does; a no-op without
    FSDP.

    Raises:
        ValueError: there is no such method.
    """
    stage = stage_of(module)
    if stage is None:
        return
    method = getattr(module, method_name, None)
    if method is None:
        raise ValueError(f"{type(module).__name__} has no method '{method_name}'")

    def with_parameters(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = stage.pre_forward(module, args, kwargs)
        return stage.post_forward(module, args, method(*args, **kwargs))

    with_parameters.__name__ = method_name
    with_parameters.__doc__ = method.__doc__
    object.__setattr__(module, method_name, with_parameters)


__all__ = ["FSDPModule", "UnshardHandle", "register_fsdp_forward_method"]
