"""How modules and autograd call the runtime.

A *stage* stands for one wrapped module (or several that are wrapped as one) and is called at four points::

    pre_forward    module is entered        gather, wait, cast inputs, put a boundary on the inputs
    post_forward   module returned          free, remember the order, hook the outputs
    pre_backward   an output got its grad   gather, wait, prefetch                      (only the first output
    does) post_backward  all inputs got theirs    free, reduce gradients

``post_backward`` hangs on the boundary, an autograd node through which the inputs pass: autograd works
backwards through the graph in the reverse order of creation, so when that node runs everything inside the
module is done, also where the parameters are frozen. A module whose inputs need no gradient has no such node;
its post-backward runs when the whole backward ends, as does that of modules whose output went unused.

Recomputed forwards (activation checkpointing) run inside backward. They only make sure that parameters are
there: what frees them again is the post-backward of the same backward.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import Enum, auto
from typing import Any

import torch
from torch import nn

from ..collectives.rank_check import RankCheck, without
from ..shared.annotations import NOTHING, span
from ..shared.pytree import caster, collect_grad_tensors, map_tensors, mover
from ..shared.settings import ScheduleSettings
from .boundary import Boundary, Output, in_transform, outside_transforms, warn_of_view
from .gradient_state import keep_gradients, take_gradients
from .offload import check_on_host
from .streams import Lanes
from .tree import Runtime, build_runtime, in_backward
from .unit import Unit, UnitState

_STAGE = "_fsdp_stage"
"""Attribute (kept out of the module's own registries) that holds a wrapped module's stage."""


class StageState(Enum):
    """Where a stage is in an iteration."""

    IDLE = auto()
    FORWARD = auto()
    BACKWARD = auto()
    REDUCED = auto()


class Stage:
    """One wrapped module's part in the runtime.

    Args:
        modules: the modules wrapped as one, usually one.
        units: what it gathers at once: a unit for each dtype of its parameters, none if all belong to stages
            inside.
        input_dtype: floating point inputs are cast to it.
        root_input_dtype: the same, only where this stage is the outermost.
        output_dtype: floating point outputs are cast to it.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        units: Sequence[Unit],
        device: torch.device,
        settings: ScheduleSettings,
        *,
        input_dtype: torch.dtype | None = None,
        root_input_dtype: torch.dtype | None = None,
        output_dtype: torch.dtype | None = None,
    ) -> None:
        self.modules = tuple(modules)
        self.units = tuple(units)
        self.device = device
        self.settings = settings
        self.state = StageState.IDLE
        self.lanes: Lanes | None = None
        """Lanes that this stage shares with other roots, if it is one."""
        self.forward_targets: list[Stage] = []
        """Stages that forward gathers ahead after this one, in place of those the recorded order names."""
        self.backward_targets: list[Stage] = []
        self.unsharded_by_hand = False
        """Whether the user gathered the parameters since the last forward, for the next one."""
        self.forward_positions: list[int] = []
        """Where this stage stands in the recorded order, once a call."""
        self.backward_position = -1
        self.error_of_second_root: type[Exception] = RuntimeError
        """What is raised where this stage ran as a root before it became part of a larger tree."""
        self._runtime: Runtime | None = None
        self._decided: list[Unit] = []
        """Units whose ``reshard_after_forward`` followed from this stage being the root or not."""
        self._cast_input = caster(input_dtype) if input_dtype is not None else None
        self._cast_root_input = caster(root_input_dtype) if root_input_dtype is not None else None
        self._cast_output = caster(output_dtype) if output_dtype is not None else None
        self._to_run: set[nn.Module] = set()
        for module in modules:
            module.__dict__[_STAGE] = self

    # -- set up ----------------------------------------------------------------------------------------------

    @property
    def root_module(self) -> nn.Module:
        """The one module of this stage; the root of a tree has to be one."""
        if len(self.modules) != 1:
            kinds = ", ".join(type(module).__name__ for module in self.modules)
            raise RuntimeError(
                f"several modules ({kinds}) wrapped as one cannot be the root; wrap their parent too"
            )
        return self.modules[0]

    @property
    def has_runtime(self) -> bool:
        """Whether this stage already belongs to a tree."""
        return self._runtime is not None

    @property
    def runtime(self) -> Runtime:
        """The tree's runtime; the first stage that asks becomes the root of its tree."""
        if self._runtime is None:
            build_runtime(self, self.settings)
            assert self._runtime is not None
        return self._runtime

    @property
    def runtime_by_hand(self) -> Runtime:
        """The same for what comes before the first forward: several modules wrapped as one are no root, and
        so are a tree of their own until it runs.
        """
        if self._runtime is None and len(self.modules) > 1:
            name = ", ".join(type(module).__name__ for module in self.modules)
            self.join(Runtime(self, [self], self.settings), name)
        return self.runtime

    @property
    def is_root(self) -> bool:
        """Whether this stage is the root of its tree; false before that is known."""
        return self._runtime is not None and self._runtime.root is self

    def join(self, runtime: Runtime, name: str) -> None:
        """Become part of a tree under the name of the module in its root."""
        self._runtime = runtime
        for unit in self.units:
            unit.readopt()
            unit.join(runtime, name)
            _check_materialised(unit)
            check_on_host(unit)
            if unit.reshard_after_forward is None:
                # The root's parameters are the first that backward needs again.
                unit.reshard_after_forward = runtime.root is not self
                self._decided.append(unit)

    def leave(self) -> None:
        """Leave a tree that never ran; see ``Runtime.disband``."""
        self._runtime = None
        for unit in self._decided:
            unit.reshard_after_forward = None
        self._decided.clear()
        for unit in self.units:
            unit.leave()

    # -- forward ---------------------------------------------------------------------------------------------

    def pre_forward(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Hook before a module's forward; returns the inputs to run it with."""
        runtime = self.runtime
        recomputing = in_backward()
        if not recomputing:
            runtime.drop_failed_iteration(self)
        if self.state is StageState.BACKWARD:
            runtime.schedule.gather(self)
            runtime.schedule.await_stage(self)
            return self._cast(self._cast_input, args, kwargs)
        entering = self.state is not StageState.FORWARD
        self.state = StageState.FORWARD
        if len(self.modules) > 1 and not self._to_run:
            self._to_run.update(self.modules)
        if runtime.forward_root is None and (self.is_root or not recomputing):
            if not recomputing:
                runtime.begin_forward(self)
            if runtime.lanes.has_streams:
                args, kwargs = self._cast(mover(self.device), args, kwargs)
            args, kwargs = self._cast(self._cast_root_input, args, kwargs)
        args, kwargs = self._cast(self._cast_input, args, kwargs)
        if not entering:
            return args, kwargs
        if not self.units:
            return args, kwargs
        with span(self.units[0].labels.pre_forward):
            with outside_transforms() if in_transform() else NOTHING:
                if recomputing:
                    runtime.schedule.gather(self)
                    runtime.schedule.await_stage(self)
                else:
                    if runtime.order_check is not None:
                        runtime.order_check.enter(self)
                    runtime.schedule.enter_forward(self)
            if torch.is_grad_enabled():
                args, kwargs = self._put_boundary(args, kwargs)
        return args, kwargs

    @staticmethod
    def _cast(
        function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if function is None:
            return args, kwargs
        return map_tensors(function, args), map_tensors(function, kwargs) if kwargs else kwargs

    def _put_boundary(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        inputs: list[torch.Tensor] = collect_grad_tensors(args, [])
        if kwargs:
            collect_grad_tensors(kwargs, inputs)
        if not inputs:
            return args, kwargs
        passed: Iterator[torch.Tensor] = iter(Boundary.apply(self, *inputs))

        def replace(tensor: torch.Tensor) -> torch.Tensor:
            return next(passed) if tensor.requires_grad else tensor

        return map_tensors(replace, args), map_tensors(replace, kwargs) if kwargs else kwargs

    def post_forward(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Hook after a module's forward; returns the output to hand on."""
        if self.state is StageState.BACKWARD:
            return self._finish_output(output)
        if self._to_run:
            self._to_run.discard(module)
            if self._to_run:
                return self._finish_output(output)
        return self._leave_forward(output)

    def _leave_forward(self, output: Any) -> Any:
        runtime = self.runtime
        self._to_run.clear()
        if self.units:
            with span(self.units[0].labels.post_forward):
                if not in_backward():
                    with outside_transforms() if in_transform() else NOTHING:
                        for unit in self.units:
                            unit.reshard_in_forward(runtime.schedule.forward_hold)
                    runtime.schedule.leave_forward(self)
                if torch.is_grad_enabled():
                    output = self._hook_outputs(output)
        elif torch.is_grad_enabled():
            output = self._hook_outputs(output)
        self.state = StageState.IDLE
        if runtime.forward_root is self:
            for stage in reversed(runtime.stages):
                if stage is not self and stage._to_run:
                    output = stage._leave_forward(output)
            runtime.end_forward()
        return self._finish_output(output)

    def _finish_output(self, output: Any) -> Any:
        return output if self._cast_output is None else map_tensors(self._cast_output, output)

    def _hook_outputs(self, output: Any) -> Any:
        tensors = [output] if isinstance(output, torch.Tensor) else collect_grad_tensors(output, [])
        for tensor in tensors:
            if tensor.requires_grad:
                if tensor._base is not None:
                    warn_of_view(self.modules)
                tensor.register_hook(self.pre_backward)
        return map_tensors(self._hook_transformed, output) if in_transform() else output

    def _hook_transformed(self, tensor: torch.Tensor) -> torch.Tensor:
        """Inside ``torch.func`` an output may not show that it requires a gradient."""
        if tensor.requires_grad or not (tensor.is_floating_point() or tensor.is_complex()):
            return tensor
        return Output.apply(self, tensor)

    # -- backward --------------------------------------------------------------------------------------------

    def pre_backward(self, gradient: torch.Tensor) -> None:
        """Hook on every output's gradient: the first one unshards."""
        if self.state is StageState.BACKWARD:
            return
        runtime = self.runtime
        runtime.begin_backward()
        self.state = StageState.BACKWARD
        if self.units:
            with span(self.units[0].labels.pre_backward):
                with outside_transforms() if in_transform() else NOTHING:
                    runtime.schedule.enter_backward(self)

    @torch.no_grad()
    def post_backward(self) -> None:
        """All of this stage's gradients are there: free the parameters and reduce."""
        self.state = StageState.REDUCED
        if not self.units:
            return
        runtime = self.runtime
        with span(self.units[0].labels.post_backward):
            ready: list[tuple[Unit, tuple[int, ...], list[torch.Tensor]]] = []
            partial: list[Unit] = []
            for unit in reversed(self.units):
                if unit.gradients.synchronize:
                    which, gradients = take_gradients(unit)
                    if which:
                        ready.append((unit, which, gradients))
                    elif unit.gradients.partial is not None and unit.gradients.all_reduce:
                        partial.append(unit)
                else:
                    keep_gradients(unit)
                if unit.reshard_after_backward:
                    unit.reshard()
                else:
                    unit.hide()
            runtime.schedule.after_gradients(self)
            for unit in partial:
                runtime.reducer.reduce_partial(unit)
            for unit, which, gradients in ready:
                if runtime.rank_check is not None:
                    _check_reduction(runtime.rank_check, unit, which)
                runtime.reducer.reduce(unit, which, gradients)

    def finish_backward(self) -> None:
        """The whole backward is done: what did not come to its post-backward does now."""
        if self.state is not StageState.REDUCED or self._has_late_gradients():
            self.post_backward()
        for unit in self.units:
            state = unit.gradients
            state.held_back = not state.synchronize or state.partial is not None
            if not state.synchronize and unit.presentation.unreduced is not None:
                self.runtime.show_unreduced(unit)
        self.backward_position = -1
        self._to_run.clear()
        self.state = StageState.IDLE

    def _has_late_gradients(self) -> bool:
        """Gradients that came after the post-backward, as those of a parameter used outside of its module."""
        for unit in self.units:
            if unit.gradients.synchronize:
                for parameter in unit.unsharded:
                    if parameter.grad is not None:
                        return True
        return False

    @property
    def is_idle(self) -> bool:
        """Whether this stage is outside of forward and backward."""
        return self.state is StageState.IDLE

    def check_idle(self, what: str, error: type[Exception] = RuntimeError) -> None:
        """Raise if this stage is inside forward or backward, where ``what`` must not be called."""
        if self.state is not StageState.IDLE:
            name = self.units[0].name if self.units else type(self.modules[0]).__name__
            raise error(f"{what} was called inside the {self.state.name.lower()} of unit '{name}'")

    def drop_unused_gather(self) -> None:
        """Let go of parameters that were gathered ahead and not used."""
        self.unsharded_by_hand = False
        for unit in self.units:
            if unit.state is UnitState.GATHERING:
                unit.reshard()

    @property
    def in_backward(self) -> bool:
        """Whether a backward that is not over came here."""
        return self.state in (StageState.BACKWARD, StageState.REDUCED)

    def reset(self, *, keep: bool) -> None:
        """After a failed iteration: sharded, without gradients that were on their way.

        Args:
            keep: what earlier passes left unreduced, unless this one's backward came here.
        """
        for unit in self.units:
            unit.reshard()
            if not keep or self.in_backward:
                unit.drop_gradients()
        self.forward_positions.clear()
        self.backward_position = -1
        self._to_run.clear()
        self.state = StageState.IDLE


def _check_reduction(check: RankCheck, unit: Unit, which: tuple[int, ...]) -> None:
    """All ranks that reduce this unit are about to, with gradients of the same parameters."""
    missing = [p.fqn for i, p in enumerate(unit.parameters) if p.requires_grad and i not in which]
    for group in (unit.groups.shard, unit.groups.replicate):
        check.agree(group, f"reduction of unit '{unit.name}'" + without(missing))


def _check_materialised(unit: Unit) -> None:
    if unit.shard.device.type == "meta":
        names = ", ".join(f"'{parameter.fqn}'" for parameter in unit.parameters[:3])
        raise RuntimeError(
            f"unit '{unit.name}' is still on the meta device (parameters {names}, ...): call "
            "module.to_empty(device=...) and initialise the parameters before the first forward"
        )


def stage_of(module: nn.Module) -> Stage | None:
    """The stage of a wrapped module, ``None`` for others."""
    return module.__dict__.get(_STAGE)
