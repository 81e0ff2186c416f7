"""The hooks by which modules and autograd call the runtime.

The hooks of a *stage* (one wrapped module, or several wrapped as one) run at four points::

    pre_forward    module is entered        gather, wait, cast inputs, put a boundary on the inputs
    post_forward   module returned          free, record the order, hook the outputs
    pre_backward   an output got its grad   gather, wait, prefetch (only for the first output)
    post_backward  all inputs got grads     free, reduce gradients

``post_backward`` runs in the backward of the ``Boundary``, an autograd node through which the inputs pass.
Autograd runs nodes in the reverse order of their creation. So when that node runs, the backward of everything
inside the module is done, even if the parameters are frozen. A module whose inputs need no gradient has no
such node; its post-backward runs at the end of the whole backward, as for modules whose output was not used.

Recomputed forwards (activation checkpointing) run inside backward. They only make sure that parameters are
unsharded; the post-backward of the same backward frees them.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from ..shared import error_text
from ..shared.pytree import caster, collect_grad_tensors, map_tensors, mover
from ..shared.torch_internals import (
    DisableFuncTorch,
    FrameAction,
    FrameExecStrategy,
    are_functorch_transforms_active,
    current_graph_task_id,
    preserve_versions,
    set_code_exec_strategy,
    unwrap_if_dead,
)
from .context import NOTHING, span
from .presentation import NOT_SHOWN, VERSION, plain_name
from .stage import Stage, StageState
from .tree import Runtime, of_compiled_autograd, refuse_compiled_autograd

# Attribute of a wrapped module that holds its hooks, outside of the module's registries.
_HOOKS = "_fsdp_hooks"

Inputs = tuple[tuple[Any, ...], dict[str, Any]]
in_transform = are_functorch_transforms_active
# Gathering and freeing must not be part of the ``torch.func`` transform.
outside_transforms = DisableFuncTorch


def skip_frame(function: Any) -> Any:
    """Make the compiler skip ``function`` but not the functions that it calls, as
    ``torch._dynamo.decorators.skip`` does, whose import takes 0.25 s."""
    set_code_exec_strategy(function.__code__, FrameExecStrategy(FrameAction.SKIP, FrameAction.DEFAULT))
    function._torchdynamo_disable = True
    return function


class Boundary(torch.autograd.Function):
    """An identity on the inputs of a stage whose backward runs after the backward of the whole stage.

    The outputs are not views of the inputs, which could not be changed in place, but share their memory and
    version (``_hand_back``). There is no ``setup_context``, because torch would then inspect the signature of
    ``forward`` at each call.
    """

    @staticmethod
    def forward(ctx: Any, hooks: "ModuleHooks", *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.hooks = hooks
        ctx.set_materialize_grads(False)
        return tuple(map(torch.Tensor.detach, tensors))

    @staticmethod
    def jvp(ctx: Any, _: object, *tangents: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tangents

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[Any, ...]:
        with outside_transforms() if in_transform() else NOTHING:
            ctx.hooks.post_backward()
        return (None, *gradients)


# ``Boundary.apply`` without torch's checks for transforms and its inspection of the signature.
_pass_boundary: Callable[..., tuple[torch.Tensor, ...]] = super(torch.autograd.Function, Boundary).apply


class _ChangedInside(torch.autograd.Function):
    """Gives inputs of a stage, the first half of ``tensors``, the history of the boundary's outputs."""

    @staticmethod
    def forward(ctx: Any, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        inputs = tensors[: len(tensors) // 2]
        ctx.set_materialize_grads(False)
        ctx.mark_dirty(*inputs)
        return inputs

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[Any, ...]:
        return (*[None] * len(gradients), *gradients)


class _TransformedBoundary(torch.autograd.Function):
    """The boundary inside a ``torch.func`` transform."""

    generate_vmap_rule = True
    jvp = Boundary.jvp
    backward = Boundary.backward

    @staticmethod
    def forward(hooks: "ModuleHooks", *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tensors

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.hooks = inputs[0]
        ctx.set_materialize_grads(False)


class _Output(torch.autograd.Function):
    """An identity on an output of a stage. Its backward is the stage's pre-backward."""

    generate_vmap_rule = True
    setup_context = _TransformedBoundary.setup_context
    # Compiled autograd calls this before any node of the graph runs.
    _compiled_autograd_key = staticmethod(refuse_compiled_autograd)

    @staticmethod
    def forward(hooks: "ModuleHooks", tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    @staticmethod
    def jvp(ctx: Any, _: object, tangent: torch.Tensor | None) -> torch.Tensor | None:
        return None if tangent is None else _Output.apply(ctx.hooks, tangent)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        ctx.hooks.pre_backward(gradient)
        return None, gradient


class ModuleHooks:
    """The hooks of one stage. Its modules and autograd call them.

    Args:
        input_dtype: floating point inputs are cast to it.
        root_input_dtype: floating point inputs are cast to it if this stage is the outermost.
        output_dtype: floating point outputs are cast to it.
    """

    def __init__(
        self,
        stage: Stage,
        *,
        input_dtype: torch.dtype | None = None,
        root_input_dtype: torch.dtype | None = None,
        output_dtype: torch.dtype | None = None,
    ) -> None:
        self.stage = stage
        self._runtime: Runtime | None = None
        self._cast_input = caster(input_dtype) if input_dtype is not None else None
        self._cast_root_input = caster(root_input_dtype) if root_input_dtype is not None else None
        self._cast_output = caster(output_dtype) if output_dtype is not None else None
        for module in stage.modules:
            module.__dict__[_HOOKS] = self

    @property
    def runtime(self) -> Runtime:
        """Return the tree's runtime. The first stage to access it becomes the root of a new tree."""
        if not self.stage.in_tree:
            self._find_tree()
        assert self._runtime is not None
        return self._runtime

    @property
    def runtime_by_hand(self) -> Runtime:
        """Return the runtime, also before the first forward. Several modules wrapped as one cannot be a root,
        so until then they form a tree of their own."""
        stage = self.stage
        if not stage.in_tree and len(stage.modules) > 1:
            name = ", ".join(type(module).__name__ for module in stage.modules)
            self._runtime = Runtime(stage, [stage], stage.settings)
            stage.join(self._runtime.context, name, is_root=True)
        return self.runtime

    def _find_tree(self) -> None:
        """Find the stages below this one's module, name their units, and join them in one runtime.

        Raises:
            RuntimeError: a stage inside already ran as a root.
            ValueError: units are on different devices.
        """
        root = self.stage
        names: dict[ModuleHooks, list[str]] = {}
        for module_name, module in root.root_module.named_modules():
            hooks = hooks_of(module)
            if hooks is None:
                continue
            name = plain_name(module_name, NOT_SHOWN) or "root"
            if hooks not in names:
                stage = hooks.stage
                if stage.in_tree and hooks._runtime is not None and not hooks._runtime.ran:
                    hooks._runtime.disband()
                if stage.in_tree:
                    raise stage.error_of_second_root(error_text("hooks.root_of_its_own", name))
                if stage.device != root.device:
                    raise ValueError(error_text("hooks.other_device", name, stage.device, root.device))
            names.setdefault(hooks, []).append(name)
        stages = [hooks.stage for hooks in names]
        runtime = Runtime(root, stages, root.settings)
        try:
            for hooks, own in names.items():
                hooks._runtime = runtime
                hooks.stage.join(runtime.context, ", ".join(own), is_root=hooks is self)
        except BaseException:
            for stage in stages:
                stage.leave()  # leave no stage half in a tree: the user may fix the error and retry
            raise

    # -- forward ---------------------------------------------------------------------------------------------

    def pre_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Inputs:
        """Run before a module's forward (forward pre-hook) and return its inputs."""
        runtime, stage = self.runtime, self.stage
        recomputing = current_graph_task_id() != -1
        idle = stage.state is StageState.IDLE and runtime.forward_root is not stage
        if not recomputing and (runtime.callback_queued or not idle):
            runtime.drop_failed_iteration(stage)
        entering = stage.state not in (StageState.FORWARD, StageState.BACKWARD)
        if stage.state is StageState.BACKWARD:
            runtime.schedule.gather(stage)
            runtime.schedule.await_stage(stage)
        else:
            stage.state = StageState.FORWARD
            if len(stage.modules) > 1 and not stage.to_run:
                stage.to_run.update(stage.modules)
        if runtime.forward_root is None and (stage.is_root or not recomputing):
            if not recomputing:
                runtime.begin_forward(stage)
            # Invariant: a recomputed forward gets inputs of the same dtypes as the first, also in the root
            # (tests/impl/named_trees.py: checkpoint_wrapper around the root in mixed precision).
            if runtime.context.streams.has_streams:
                args, kwargs = self._cast(mover(stage.device), args, kwargs)
            args, kwargs = self._cast(self._cast_root_input, args, kwargs)
        args, kwargs = self._cast(self._cast_input, args, kwargs)
        if not entering or not stage.units:
            return args, kwargs
        with span(stage.units[0].labels.pre_forward):
            with outside_transforms() if in_transform() else NOTHING:
                if recomputing:
                    runtime.schedule.gather(stage)
                    runtime.schedule.await_stage(stage)
                else:
                    if runtime.order_check is not None:
                        runtime.order_check.enter(stage.name, stage.units[0].groups.shard)
                    runtime.schedule.enter_forward(stage)
            if torch.is_grad_enabled():
                args, kwargs = self._put_boundary(args, kwargs)
        return args, kwargs

    @staticmethod
    def _cast(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Inputs:
        if function is None:
            return args, kwargs
        return map_tensors(function, args), map_tensors(function, kwargs) if kwargs else kwargs

    def _put_boundary(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Inputs:
        inputs: list[torch.Tensor] = collect_grad_tensors(args, [])
        if kwargs:
            collect_grad_tensors(kwargs, inputs)
        if not inputs:
            return args, kwargs
        if len(inputs) > 1:
            inputs = list({id(tensor): tensor for tensor in inputs}.values())
        if in_transform():
            passed = _TransformedBoundary.apply(self, *inputs)
        else:
            passed = _pass_boundary(self, *map(unwrap_if_dead, inputs))
            self.stage.entered = (inputs, passed, list(map(VERSION, passed)))
        if len(args) == 1 and args[0] is inputs[0] and not kwargs:
            return passed, kwargs
        through = dict(zip(map(id, inputs), passed, strict=True))

        def replace(tensor: torch.Tensor) -> torch.Tensor:
            return through.get(id(tensor), tensor)

        return map_tensors(replace, args), map_tensors(replace, kwargs) if kwargs else kwargs

    def _hand_back(self, output: Any, inputs: Sequence[torch.Tensor], passed: Sequence[torch.Tensor]) -> Any:
        """Make in-place changes to ``passed``, the outputs of the boundary, visible on ``inputs``.

        Returns:
            ``output`` with outputs of the boundary replaced by the corresponding inputs.

        Raises:
            RuntimeError: another input shares the memory of a changed one, or autograd refuses the change (of
                a leaf that requires a gradient).
        """
        # A change under no_grad has no history to copy and is visible already: the memory is the same.
        changed = [
            (given, inner)
            for given, inner in zip(inputs, passed, strict=True)
            if getattr(inner.grad_fn, "hooks", None) is not self
        ]
        if not changed:
            return output
        if len({inner.untyped_storage()._cdata for inner in passed}) < len(passed):
            raise RuntimeError(error_text("hooks.hand_back"))
        given, inner = [given for given, _ in changed], [inner for _, inner in changed]
        with preserve_versions(tuple(given)):  # the write has already incremented their versions
            _ChangedInside.apply(*given, *inner)
        originals = {id(inner): given for given, inner in changed}
        return map_tensors(lambda tensor: originals.get(id(tensor), tensor), output)

    def post_forward(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Run after a module's forward (forward hook) and return its output."""
        stage = self.stage
        if stage.state is StageState.BACKWARD:
            for unit in stage.units:
                if unit.presentation.refuses_writes:
                    unit.check_writes()
            return self._finish_output(output)
        if stage.entered is not None:
            inputs, passed, versions = stage.entered
            stage.entered = None
            if list(map(VERSION, passed)) != versions:
                output = self._hand_back(output, inputs, passed)
        stage.to_run.discard(module)
        return self._finish_output(output) if stage.to_run else self._leave_forward(output)

    def _leave_forward(self, output: Any) -> Any:
        runtime, stage = self.runtime, self.stage
        stage.to_run.clear()
        if stage.units:
            with span(stage.units[0].labels.post_forward):
                if current_graph_task_id() == -1:
                    with outside_transforms() if in_transform() else NOTHING:
                        hold = runtime.schedule.forward_hold(stage)
                        for unit in stage.units:
                            if unit.presentation.refuses_writes:
                                unit.check_writes()
                            unit.reshard_in_forward(hold)
                    runtime.schedule.leave_forward(stage)
        if torch.is_grad_enabled():
            output = self._hook_outputs(output)
        stage.state = StageState.IDLE
        if runtime.forward_root is stage:
            for other in reversed(runtime.stages):
                if other is not stage and other.to_run:
                    hooks = hooks_of(other.modules[0])
                    assert hooks is not None
                    output = hooks._leave_forward(output)
            runtime.end_forward()
        return output if self._cast_output is None else self._finish_output(output)

    def _finish_output(self, output: Any) -> Any:
        return output if self._cast_output is None else map_tensors(self._cast_output, output)

    def _hook_outputs(self, output: Any) -> Any:
        tensors = [output] if isinstance(output, torch.Tensor) else collect_grad_tensors(output, [], set())
        for tensor in tensors:
            # An in-place operation on a view (x += y) replaces its node and so drops its hooks. The node of
            # its base stays in the graph.
            for each in (tensor, tensor._base):
                if each is not None and each.requires_grad:
                    if each.grad_fn is None:
                        self.stage.check_freed(each)
                    else:
                        each.register_hook(self.pre_backward)
        if in_transform() or (self.stage.is_root and of_compiled_autograd("compiled_autograd_enabled")):
            return map_tensors(self._hook_transformed, output)
        return output

    def _hook_transformed(self, tensor: torch.Tensor) -> torch.Tensor:
        """Hook an output inside ``torch.func``, where ``requires_grad`` may be False despite a gradient."""
        inexact = tensor.is_floating_point() or tensor.is_complex()
        if not inexact or (tensor.requires_grad and in_transform()):
            return tensor
        return _Output.apply(self, tensor)

    # -- backward --------------------------------------------------------------------------------------------

    def pre_backward(self, gradient: torch.Tensor) -> None:
        """Run when an output gets its gradient (tensor hook). Only the first call unshards."""
        stage = self.stage
        if stage.state is StageState.BACKWARD:
            return
        runtime = self._runtime
        assert runtime is not None
        # This comes first: if a later statement raises, the flag tells the next forward that backward failed.
        if not runtime.callback_queued:  # Invariant: once in a backward pass, by the first stage
            runtime.begin_backward()
        for unit in stage.units:
            if unit.presentation.before_backward is not None:
                unit.presentation.before_backward()
        stage.state = StageState.BACKWARD
        if stage.units:
            with span(stage.units[0].labels.pre_backward):
                with outside_transforms() if in_transform() else NOTHING:
                    runtime.schedule.enter_backward(stage)

    def post_backward(self) -> None:
        """Run when all inputs of the stage have their gradients (backward of the boundary)."""
        runtime = self._runtime
        assert runtime is not None
        if not runtime.callback_queued:  # no output hook ran, if only some of the modules wrapped as one ran
            runtime.begin_backward()
        if self.stage.state is not StageState.BACKWARD:
            # Invariant: no gradient is reduced while a gather that nothing waited for is in flight
            # (tests/impl/values, mutant "no check before post-backward").
            self.stage.check_entered()
        runtime.post_backward(self.stage)


def hooks_of(module: nn.Module) -> "ModuleHooks | None":
    """Return the hooks of a wrapped module, ``None`` for other modules."""
    return module.__dict__.get(_HOOKS)


def stages_in(root: nn.Module) -> Iterator[tuple[Stage, str]]:
    """Yield the stages of ``root`` and of the modules inside it, each with the name of its first module."""
    seen: set[Stage] = set()
    for name, module in root.named_modules():
        stage = stage_of(module)
        if stage is not None and stage not in seen:
            seen.add(stage)
            yield stage, name


def stage_of(module: nn.Module) -> Stage | None:
    """Return the stage of a wrapped module, ``None`` for other modules."""
    hooks = module.__dict__.get(_HOOKS)
    return None if hooks is None else hooks.stage
