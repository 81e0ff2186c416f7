"""``FSDPModule``: the methods that ``fully_shard`` adds to a module."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, cast

import torch
from torch import nn
from typing_extensions import deprecated

from ..collectives import comm as reducing
from ..runtime.hooks import ModuleHooks, hooks_of, outside_transforms, stages_in
from ..runtime.streams import Streams, stream_of
from ..runtime.unit import Unit
from ..shared import error_text


class UnshardHandle:
    """The handle that ``unshard`` returns. ``wait`` makes the compute stream wait for the parameters."""

    def __init__(self, *, hooks: ModuleHooks | None = None) -> None:
        self._hooks = hooks

    def wait(self) -> None:
        """Wait and show the unsharded parameters. Later calls do nothing."""
        if self._hooks is not None:
            stage, runtime = self._hooks.stage, self._hooks.runtime
            with outside_transforms():
                runtime.schedule.await_stage(stage)
            stage.unsharded_by_hand = False
            if runtime.forward_root is None:
                runtime.context.await_host_read()  # an optimizer may write to shards on the host next
            self._hooks = None


class FSDPModule:
    """A mixin that ``fully_shard`` adds to the class of a module, first in its MRO."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Make an unwrapped module: slicing a container constructs a new one of the same class."""
        original = cls.__mro__[2]
        made = cast(Any, original).__new__(original, *args, **kwargs)
        made.__init__(*args, **kwargs)
        return made

    # -- parameters ------------------------------------------------------------------------------------------

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gather this module's own parameters (not those of units inside).

        Return a handle to wait on if ``async_op``.
        """
        hooks = self._hooks()
        runtime, stage = hooks.runtime_by_hand, hooks.stage
        stage.unsharded_by_hand = True
        runtime.context.let_gathers_wait()  # the optimizer may have just written to shards
        with outside_transforms():
            runtime.schedule.gather(stage)
        handle = UnshardHandle(hooks=hooks)
        if async_op:
            return handle
        handle.wait()
        return None

    def reshard(self) -> None:
        """Free this module's own unsharded parameters."""
        stage = self._hooks().stage
        stage.unsharded_by_hand = False
        with outside_transforms():
            for unit in stage.units:
                unit.reshard_by_hand()

    def reset_iter_state(self) -> None:
        """Reset after an exception in forward or backward, so that another iteration can start. Root
        only.

        Like torch's, it also drops partial sums that were not all-reduced. Gradients that were accumulated
        without communication stay, unless the failed backward added to them.
        """
        hooks = self._hooks()
        if hooks.stage.in_tree and not hooks.stage.is_root:
            raise RuntimeError("reset_iter_state must be called on the root FSDP module")
        hooks.runtime_by_hand.reset()
        for unit in self._units(True):
            unit.gradients.partial = None

    # -- gradient reduction ----------------------------------------------------------------------------------

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Set whether the next backward ends the iteration. If not, the recorded order is kept."""
        self._hooks().runtime_by_hand.is_last_backward = is_last_backward

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Set whether backward reduces gradients, or accumulates them unsharded without communication."""
        for unit in self._units(recurse):
            unit.gradients.synchronize = requires_gradient_sync

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Set whether backward all-reduces over replicas, or accumulates reduce-scattered gradients."""
        for unit in self._units(recurse):
            unit.gradients.all_reduce = requires_all_reduce

    def set_gradient_divide_factor(self, factor: float, *, recurse: bool = False) -> None:
        """Divide the sum of gradients by ``factor`` instead of the number of ranks."""
        if not factor > 0:
            raise ValueError(f"the gradient divide factor must be positive, not {factor!r}")
        for unit in self._units(recurse):
            unit.gradients.divide_factor = factor

    @deprecated("Use `set_gradient_divide_factor` instead")
    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """Call ``set_gradient_divide_factor``; this is its older name."""
        self.set_gradient_divide_factor(factor)

    def set_force_sum_reduction_for_comms(self, enable: bool, *, recurse: bool = False) -> None:
        """Set whether collectives only sum and the division runs separately."""
        for unit in self._units(recurse):
            unit.gradients.force_sum = enable

    def set_reduce_scatter_unused_params(
        self, reduce_scatter_unused_params: bool, *, recurse: bool = True
    ) -> None:
        """Set whether to reduce zeros for parameters without a gradient, which ranks may then differ in.

        Otherwise all ranks must use the same parameters, or their collectives do not match.
        """
        for unit in self._units(recurse):
            unit.gradients.unused_as_zero = reduce_scatter_unused_params

    def set_separate_reduce_scatter_group(self, enable: bool = True, *, recurse: bool = True) -> None:
        """Set whether reduce-scatters use a separate process group and do not queue behind all-gathers.

        The first call for a group is collective.
        """
        for unit in self._units(recurse):
            unit.groups = unit.groups.with_reduce_group(enable)

    def set_reduce_scatter_max_input_buffers(self, max_input_buffers: int, *, recurse: bool = True) -> None:
        """Set how many units' gradients may wait for their reduce-scatter before the compute stream waits.

        A larger number lets backward continue if reduce-scatters are slower than it, but takes more memory.
        Unlike in torch, the copy-in does not run on the compute stream, so the gradients themselves are kept
        instead of the collective's inputs.
        """
        if isinstance(max_input_buffers, bool) or not isinstance(max_input_buffers, int):
            raise TypeError(f"max_input_buffers must be an int, not {max_input_buffers!r}")
        if max_input_buffers < 1:
            raise ValueError(f"max_input_buffers must be 1 or more, not {max_input_buffers}")
        for unit in self._units(recurse):
            unit.gradients.held = max_input_buffers

    # -- custom collectives ----------------------------------------------------------------------------------

    def set_custom_all_gather(self, comm: reducing.AllGather, *, recurse: bool = False) -> None:
        """Gather with ``comm``, in memory that it allocates (``comm.py``)."""
        for unit in self._units_of_one_mesh("set_custom_all_gather", recurse):
            unit.use_all_gather(comm)

    def set_custom_reduce_scatter(self, comm: reducing.ReduceScatter, *, recurse: bool = False) -> None:
        """Reduce-scatter with ``comm``, in memory that it allocates (``comm.py``)."""
        for unit in self._units_of_one_mesh("set_custom_reduce_scatter", recurse):
            unit.gradients.reduce_scatter = comm

    def set_all_reduce_hook(
        self, hook: Callable[[torch.Tensor], None], *, stream: Any = None, recurse: bool = False
    ) -> None:
        """Call ``hook(shard)`` with each reduced shard (1-D, in the reduce dtype) before it is delivered.

        The hook changes the shard in place. It runs after the all-reduce over replicas, if there is one.

        Args:
            stream: the stream to run the hook on instead of the all-reduce stream; not with replicas.
        """
        for unit in self._units_of_one_mesh("set_all_reduce_hook", recurse):
            if stream is not None and (unit.groups.replicate is not None or unit.groups.hybrid):
                raise ValueError(error_text("fsdp_module.hook_stream"))
            unit.gradients.all_reduce_hook = hook
            if stream is not None:
                unit.gradients.hook_stream = stream_of(stream, unit.device)

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool, *, recurse: bool = False) -> None:
        """Set whether to allocate buffers from the process group, if it can (NCCL: zero-copy).

        Raises:
            AssertionError: a unit has a custom collective, which allocates its own memory.
        """
        setting = "set_allocate_memory_from_process_group_for_comm"
        for unit in self._units(recurse):
            _refuse_custom(unit, setting)
            gathers, reduces = unit.groups.shard, unit.groups.reduce
            unit.use_all_gather(reducing.GroupAllGather(gathers) if enable and gathers else None)
            unit.gradients.reduce_scatter = (
                reducing.GroupReduceScatter(reduces) if enable and reduces else None
            )

    def set_symm_mem_for_comm(self, backend: Literal["NCCL"] = "NCCL", *, recurse: bool = False) -> None:
        """Allocate buffers in symmetric memory. Collective over the shard group. Needs NCCL.

        Applies to all-gathers, and to reduce-scatters after ``set_force_sum_reduction_for_comms(True)``,
        because NCCL supports only sums for them.

        Raises:
            AssertionError: a unit has a custom collective, which allocates its own memory.
            RuntimeError: the device is the CPU.
        """
        for unit in self._units(recurse):
            _refuse_custom(unit, "set_symm_mem_for_comm")
            if unit.device.type == "cpu":
                raise RuntimeError(error_text("fsdp_module.symm_mem", backend, unit.name, unit.device))
            gathers, reduces = unit.groups.shard, unit.groups.reduce
            if gathers is not None and reduces is not None:
                unit.use_all_gather(reducing.SymmetricAllGather(gathers, backend))
                if unit.gradients.force_sum:
                    unit.gradients.reduce_scatter = reducing.SymmetricReduceScatter(reduces, backend)

    # -- schedule --------------------------------------------------------------------------------------------

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Set whether forward frees the parameters."""
        if not isinstance(reshard_after_forward, bool):
            raise ValueError(error_text("fsdp_module.reshard", reshard_after_forward))
        for unit in self._units(recurse):
            unit.reshard_after_forward = reshard_after_forward
            unit.keeps_part = False

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """Set whether backward frees the parameters. False saves gathers while accumulating gradients."""
        for unit in self._units(recurse):
            unit.reshard_after_backward = reshard_after_backward

    def set_unshard_in_backward(self, unshard_in_backward: bool, *, recurse: bool = False) -> None:
        """Set whether backward needs this module's parameters (that of an embedding does not)."""
        for unit in self._units(recurse):
            unit.unshard_in_backward = unshard_in_backward

    def set_modules_to_forward_prefetch(self, modules: "list[FSDPModule]") -> None:
        """Prefetch exactly these modules when this module's forward starts, not by the recorded order."""
        self._hooks().stage.forward_targets = [hooks.stage for hooks in _hooks(modules)]

    def set_modules_to_backward_prefetch(self, modules: "list[FSDPModule]") -> None:
        """Prefetch exactly these modules when this module's backward starts, not by the recorded order."""
        self._hooks().stage.backward_targets = [hooks.stage for hooks in _hooks(modules)]

    def set_post_optim_event(self, event: Any) -> None:
        """Make the next forward's gathers wait for ``event`` instead of for all queued computation."""
        self._hooks().runtime_by_hand.optimizer_event = event

    # -- inside ----------------------------------------------------------------------------------------------

    def _hooks(self) -> ModuleHooks:
        hooks = hooks_of(cast(nn.Module, self))
        if hooks is None:
            raise AssertionError(error_text("fsdp_module.no_state", type(self).__name__))
        return hooks

    def _units(self, recurse: bool) -> Iterator[Unit]:
        for stage, _ in stages_in(cast(nn.Module, self)) if recurse else [(self._hooks().stage, "")]:
            yield from stage.units

    def _units_of_one_mesh(self, setting: str, recurse: bool) -> Sequence[Unit]:
        """Return the units. Raise ValueError if this module's own units do not share one mesh."""
        own = list(self._hooks().stage.units)
        if len({(unit.groups.shard, unit.groups.replicate) for unit in own}) > 1:
            raise ValueError(error_text("fsdp_module.units_of_one_mesh", setting))
        return list(self._units(True)) if recurse else own

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        """Apply ``.to``, ``to_empty`` and others to sharded parameters, then adopt their new memory."""
        self.reshard()
        result = super()._apply(*args, **kwargs)  # type: ignore[misc]
        stage = self._hooks().stage
        for unit in stage.units:
            presentation: Any = unit.presentation
            if len(stage.modules) > 1 and not presentation.uniform():
                presentation.half_converted = True  # the other modules of the unit may come next
            else:
                unit.readopt()
        return result


def _refuse_custom(unit: Unit, setting: str) -> None:
    for custom in (unit.gather.sharded.custom, unit.gradients.reduce_scatter):
        if custom is not None and not isinstance(custom, reducing.BUILT_IN):
            raise AssertionError(
                error_text("fsdp_module.custom_collective", setting, unit.name, type(custom).__name__)
            )


def share_comm_ctx(modules: "list[FSDPModule]") -> None:
    """Make several roots, such as the chunks of a pipeline, share streams, and so memory pools.

    Call it before they run.

    Raises:
        ValueError: ``fully_shard`` was not applied to one of ``modules``.
        RuntimeError: two of them already ran on different streams.
    """
    streams: Streams | None = None
    for hooks in (given := _hooks(modules)):
        if hooks.stage.in_tree:
            own = hooks.runtime.context.streams
            if streams is not None and own is not streams:
                raise RuntimeError(error_text("fsdp_module.share_comm_ctx"))
            streams = own
    for hooks in given:
        stage = hooks.stage
        if streams is None:
            streams = stage.streams if stage.streams is not None else Streams(stage.device)
        stage.streams = streams


def _hooks(modules: "list[FSDPModule]") -> list[ModuleHooks]:
    found: list[ModuleHooks] = []
    for module in modules:
        hooks = hooks_of(cast(nn.Module, module)) if isinstance(module, FSDPModule) else None
        if hooks is None:
            raise ValueError(f"expected modules under fully_shard, got a {type(module).__name__}")
        found.append(hooks)
    return found


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Make ``module.method_name(...)`` run the FSDP hooks as ``module(...)`` does; a no-op without FSDP.

    Raises:
        ValueError: the module lacks the method.
    """
    hooks = hooks_of(module)
    if hooks is None:
        return
    method = getattr(module, method_name, None)
    if method is None:
        raise ValueError(f"{type(module).__name__} has no method '{method_name}'")

    def with_parameters(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = hooks.pre_forward(module, args, kwargs)
        return hooks.post_forward(module, args, method(*args, **kwargs))

    with_parameters.__name__ = method_name
    with_parameters.__doc__ = method.__doc__
    object.__setattr__(module, method_name, with_parameters)
