"""How modules and autograd call the runtime.

A *stage* stands for one wrapped module (or several that are wrapped as one) and is called at four points::

    pre_forward    module is entered        gather, wait, cast inputs, put a boundary on the inputs
    post_forward   module returned          free, remember the order, hook the outputs
    pre_backward   an output got its grad   gather, wait, prefetch (only the first output does)
    post_backward  all inputs got theirs    free, reduce gradients

``post_backward`` depends on the boundary, an autograd node through which the inputs pass: autograd works
backwards through the graph in the reverse order of creation, so when that node runs everything inside the
module is done, also where the parameters are frozen. A module whose inputs need no gradient has no such node;
its post-backward runs when the whole backward ends, as does that of modules whose output went unused.

Recomputed forwards (activation checkpointing) run inside backward. They only make sure that parameters are
there: what frees them again is the post-backward of the same backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ..shared.annotations import NOTHING, span
from ..shared.pytree import caster, collect_grad_tensors, map_tensors, mover
from ..shared.settings import ScheduleSettings
from .boundary import (
    Boundary,
    Output,
    TransformedBoundary,
    hand_back,
    in_transform,
    outside_transforms,
)
from .presentation import VERSION
from .stage import Stage, StageState, stage_of
from .tree import Runtime, build_runtime, in_backward
from .unit import Unit


class HookedStage(Stage):
    """A stage that is called by its modules and by autograd.

    Args:
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
        super().__init__(modules, units, device, settings)
        self._cast_input = caster(input_dtype) if input_dtype is not None else None
        self._cast_root_input = caster(root_input_dtype) if root_input_dtype is not None else None
        self._cast_output = caster(output_dtype) if output_dtype is not None else None

    @property
    def runtime(self) -> Runtime:
        """The tree's runtime; the first stage that asks becomes the root of its tree."""
        if self.context is None:
            build_runtime(self, self.settings)
        return self.context  # type: ignore[return-value]  # nothing but a runtime takes stages in

    @property
    def runtime_by_hand(self) -> Runtime:
        """The same for what comes before the first forward: several modules wrapped as one are not a root,
        and so are a tree of their own until it runs.
        """
        if self.context is None and len(self.modules) > 1:
            name = ", ".join(type(module).__name__ for module in self.modules)
            self.join(Runtime(self, [self], self.settings), name, is_root=True)
        return self.runtime

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
        if len(self.modules) > 1 and not self.to_run:
            self.to_run.update(self.modules)
        if runtime.forward_root is None and (self.is_root or not recomputing):
            if not recomputing:
                runtime.begin_forward(self)
            if runtime.streams.has_streams:
                args, kwargs = self._cast(mover(self.device), args, kwargs)
            args, kwargs = self._cast(self._cast_root_input, args, kwargs)
        args, kwargs = self._cast(self._cast_input, args, kwargs)
        if not entering or not self.units:
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
        if len(inputs) > 1:
            inputs = list({id(tensor): tensor for tensor in inputs}.values())
        if in_transform():
            passed = TransformedBoundary.apply(self, *inputs)
        else:
            passed = Boundary.apply(self, *inputs)
            self._entered = (inputs, passed, list(map(VERSION, passed)))
        if len(args) == 1 and args[0] is inputs[0] and not kwargs:
            return passed, kwargs
        through = dict(zip(map(id, inputs), passed, strict=True))

        def replace(tensor: torch.Tensor) -> torch.Tensor:
            return through.get(id(tensor), tensor)

        return map_tensors(replace, args), map_tensors(replace, kwargs) if kwargs else kwargs

    def _hand_back(self, output: Any) -> Any:
        """Let the caller see which inputs were changed in place; returns the output, with these."""
        assert self._entered is not None
        inputs, passed, versions = self._entered
        self._entered = None
        if list(map(VERSION, passed)) == versions:
            return output
        return hand_back(self, inputs, passed, output)

    def post_forward(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Hook after a module's forward; returns the output to hand on."""
        if self.state is StageState.BACKWARD:
            for unit in self.units:
                if unit.refuses_writes:
                    unit.check_writes()
            return self._finish_output(output)
        if self._entered is not None:
            output = self._hand_back(output)
        if self.to_run:
            self.to_run.discard(module)
            if self.to_run:
                return self._finish_output(output)
        return self._leave_forward(output)

    def _leave_forward(self, output: Any) -> Any:
        runtime = self.runtime
        self.to_run.clear()
        if self.units:
            with span(self.units[0].labels.post_forward):
                if not in_backward():
                    with outside_transforms() if in_transform() else NOTHING:
                        hold = runtime.schedule.forward_hold(self)
                        for unit in self.units:
                            if unit.refuses_writes:
                                unit.check_writes()
                            unit.reshard_in_forward(hold)
                    runtime.schedule.leave_forward(self)
        if torch.is_grad_enabled():
            output = self._hook_outputs(output)
        self.state = StageState.IDLE
        if runtime.forward_root is self:
            for stage in reversed(runtime.stages):
                if stage is not self and stage.to_run:
                    assert isinstance(stage, HookedStage)
                    output = stage._leave_forward(output)
            runtime.end_forward()
        return self._finish_output(output)

    def _finish_output(self, output: Any) -> Any:
        return output if self._cast_output is None else map_tensors(self._cast_output, output)

    def _hook_outputs(self, output: Any) -> Any:
        tensors = [output] if isinstance(output, torch.Tensor) else collect_grad_tensors(output, [], set())
        for tensor in tensors:
            # An operation in place on a view (x += y) gives it another node, without the hooks of the one
            # before; the node of the tensor that it is a view of stays in the graph.
            for each in (tensor, tensor._base):
                if each is not None and each.requires_grad:
                    if each.grad_fn is None:
                        self.check_freed(each)
                    else:
                        each.register_hook(self.pre_backward)
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
        for unit in self.units:
            if unit.before_backward is not None:
                unit.before_backward()
        self.state = StageState.BACKWARD
        if self.units:
            with span(self.units[0].labels.pre_backward):
                with outside_transforms() if in_transform() else NOTHING:
                    runtime.schedule.enter_backward(self)

    def post_backward(self) -> None:
        """All inputs got their gradients, so all that this stage computed has been through backward."""
        runtime = self.runtime
        runtime.begin_backward()  # no output's hook did, where modules wrapped as one ran in part
        if self.state is not StageState.BACKWARD:
            self.check_entered()
        runtime.post_backward(self)


def hooks_of(module: nn.Module) -> HookedStage | None:
    """The stage of a wrapped module, ``None`` for others."""
    return stage_of(module)  # type: ignore[return-value]  # front ends make no others
