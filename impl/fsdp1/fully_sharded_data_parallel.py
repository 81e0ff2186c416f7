"""The ``FullyShardedDataParallel`` front end: a wrapper module with one flat parameter for each unit."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn, cast

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from ..runtime.buffer import HostOffload
from ..runtime.hooks import ModuleHooks, skip_frame
from ..runtime.presentation import FLAT_NAME, WRAPPED
from ..runtime.stage import Stage, StageState
from ..runtime.unit import Unit
from ..shared import error_text
from ..shared.settings import MemoryHandover, ScheduleSettings, own
from ..shared.torch_internals import TrainingState, compiler_at_work
from .flat_checks import check_outside, check_summoning, ignored, warn_of_wrapping
from .flat_param import FlatParameter, without_activation_wrapper
from .flat_units import (
    PREFETCH_TIMING,
    RESHARDS_AFTER_FORWARD,
    FlatSharding,
    check_wrapped_inside,
    compute_device,
    depth_of_forward_prefetch,
    shard_module,
    wrap_inside,
)
from .gradients import HookFunction, clip_grad_norm, comm_hook
from .parameter_names import has_flat_shards
from .process_groups import HYBRID, given_or_by_node, group_of, groups_of_strategy
from .settings import BackwardPrefetch, CPUOffload, MixedPrecision, ShardingStrategy, by_name
from .state_dict.methods import StateDictMethods, serve_checkpoint_functions
from .state_dict.recursion import WrapperStates
from .summon import ShownUnit
from .wrap import ModulePolicy, PolicyFunction


class FullyShardedDataParallel(StateDictMethods):
    """Wrap ``module`` as one FSDP unit. Modules wrapped inside it, also by policy, are separate units.

    The arguments up to ``device_mesh`` are torch's. The later ones apply to the whole tree, from the root:

    Args:
        module: the module to wrap.
        process_group: the group to shard over, or (shard, replicate) for the hybrid strategies.
        sharding_strategy: see ``ShardingStrategy``; ``FULL_SHARD`` by default.
        cpu_offload: keep shards, gradients and the optimizer step on the CPU.
        auto_wrap_policy: which modules inside become units (``wrap.py``).
        backward_prefetch: when backward gathers the next unit; ``None``: only when it is needed.
        mixed_precision: dtypes of computation, reduction and buffers.
        ignored_modules, ignored_states: modules or parameters to ignore.
        param_init_fn: materialises parameters: called with each module if any is on the meta device. By
            default the ``deferred_init()`` recording is replayed, or ``reset_parameters()`` called.
        device_id: the device to move the module to and to compute on.
        sync_module_states: broadcast parameters and buffers from the first rank before sharding.
        forward_prefetch: gather the next unit when a unit's forward starts.
        limit_all_gathers: maximum units in flight before the CPU waits; ``True`` means 2, ``False`` no limit,
            ``"auto"`` adapts to allocator retries.
        use_orig_params: show the original parameters instead of the flat one.
        device_mesh: a 1-D mesh, or 2-D (replicate, shard), instead of ``process_group``.
        memory_handover: how memory passes between streams: ``"record_stream"`` or ``"events"``.
        backward_prefetch_depth, forward_prefetch_depth: how many units ahead to gather.

    Raises:
        ValueError: unsupported settings or parameters; the message names them.
    """

    def __init__(
        self,
        module: nn.Module,
        process_group: ProcessGroup | tuple[ProcessGroup, ProcessGroup] | None = None,
        sharding_strategy: ShardingStrategy | None = None,
        cpu_offload: CPUOffload | None = None,
        auto_wrap_policy: PolicyFunction | ModulePolicy | None = None,
        backward_prefetch: BackwardPrefetch | None = BackwardPrefetch.BACKWARD_PRE,
        mixed_precision: MixedPrecision | None = None,
        ignored_modules: Iterable[nn.Module] | None = None,
        param_init_fn: Callable[[nn.Module], None] | None = None,
        device_id: int | torch.device | None = None,
        sync_module_states: bool = False,
        forward_prefetch: bool = False,
        limit_all_gathers: bool | int | str = True,
        use_orig_params: bool = False,
        ignored_states: Iterable[nn.Parameter] | Iterable[nn.Module] | None = None,
        device_mesh: DeviceMesh | None = None,
        *,
        memory_handover: str | MemoryHandover = MemoryHandover.RECORD_STREAM,
        backward_prefetch_depth: int = 1,
        forward_prefetch_depth: int | None = None,
    ) -> None:
        super().__init__()
        asked = ShardingStrategy.FULL_SHARD if sharding_strategy is None else sharding_strategy
        strategy = by_name(ShardingStrategy, asked)
        if backward_prefetch is not None:
            backward_prefetch = by_name(BackwardPrefetch, backward_prefetch)
        casts = MixedPrecision() if mixed_precision is None else mixed_precision
        precision = own(MixedPrecision, casts, "mixed_precision")
        settings = ScheduleSettings.decide(
            backward_prefetch=PREFETCH_TIMING[backward_prefetch],
            backward_prefetch_depth=backward_prefetch_depth,
            forward_prefetch_depth=depth_of_forward_prefetch(forward_prefetch, forward_prefetch_depth),
            limit_all_gathers=limit_all_gathers,
            memory_handover=memory_handover,
        )
        left_alone = ignored(ignored_modules, ignored_states)
        process_group = given_or_by_node(strategy, process_group, device_mesh, auto_wrap_policy is not None)
        groups = groups_of_strategy(strategy, process_group, device_mesh)
        check_wrapped_inside(module, auto_wrap_policy is not None, use_orig_params, limit_all_gathers)
        if auto_wrap_policy is not None:
            full_precision = () if mixed_precision is None else precision._module_classes_to_ignore
            inner = {
                "backward_prefetch_depth": backward_prefetch_depth, "sync_module_states": sync_module_states,
                "forward_prefetch_depth": forward_prefetch_depth, "ignored_states": left_alone.parameters,
                "limit_all_gathers": limit_all_gathers, "backward_prefetch": backward_prefetch,
                "forward_prefetch": forward_prefetch, "use_orig_params": use_orig_params,
                "memory_handover": memory_handover, "process_group": process_group, "device_id": device_id,
                "param_init_fn": param_init_fn, "sharding_strategy": strategy, "mixed_precision": precision,
                "cpu_offload": cpu_offload, "device_mesh": device_mesh,
            }  # fmt: skip
            wrapper = FullyShardedDataParallel
            wrap_inside(wrapper, module, auto_wrap_policy, left_alone.modules, full_precision, inner)
        device = compute_device(module, device_id, left_alone)
        offloads = cpu_offload is not None and cpu_offload.offload_params
        offload = HostOffload.decide(pin_memory=True, device=device) if offloads else None
        how = FlatSharding(
            groups, strategy, precision, device, use_orig_params, offload, param_init_fn, sync_module_states
        )
        self.sharding_strategy = how.effective_strategy
        warn_of_wrapping(module, module in left_alone.modules, strategy, self.sharding_strategy)
        units, buffer_dtypes = shard_module(module, left_alone, how)
        self.mixed_precision = precision
        self.cpu_offload = CPUOffload() if cpu_offload is None else cpu_offload
        self.backward_prefetch = backward_prefetch
        self.forward_prefetch = forward_prefetch
        self.limit_all_gathers = limit_all_gathers
        self.compute_device = device
        self.process_group = group_of(process_group, device_mesh)
        self._use_orig_params = use_orig_params
        self._hold(module, units, settings)
        self._states = WrapperStates(self, self._stage, device_mesh, buffer_dtypes)

    def _hold(self, module: nn.Module, units: Sequence[Unit], settings: ScheduleSettings) -> None:
        """Register the module and create its stage and hooks."""
        serve_checkpoint_functions()
        self.rank = self.process_group.rank()
        self.world_size = self.process_group.size()
        self.add_module(WRAPPED, module)
        precision = self.mixed_precision
        self._stage = stage = Stage([self], units, self.compute_device, settings)
        stage.error_of_second_root = AssertionError
        self._hooks = ModuleHooks(
            stage,
            input_dtype=precision.param_dtype if precision.cast_forward_inputs else None,
            root_input_dtype=precision.param_dtype if precision.cast_root_forward_inputs else None,
        )

    def __deepcopy__(self, memo: object) -> NoReturn:
        # The default deepcopy would read parameters whose memory is freed.
        raise TypeError("FSDP does not support deepcopy: copy the module before, or its state dict")

    # -- as a module -----------------------------------------------------------------------------------------

    @property
    def module(self) -> nn.Module:
        """Return the wrapped module, without a wrapper for activation checkpointing or offloading."""
        return without_activation_wrapper(cast(nn.Module, self._modules[WRAPPED]))

    @property
    def params(self) -> list[FlatParameter]:
        """Return the flat parameter of this wrapper's own unit, if it has one.

        With ``use_orig_params`` each call creates it over this rank's shard, with a copy of gradients.
        """
        return [cast(Any, unit.presentation).flat() for unit in self._stage.units if has_flat_shards(unit)]

    @property
    def training_state(self) -> TrainingState:
        """Return the training state of this wrapper."""
        if self._states.summoned:
            return TrainingState.SUMMON_FULL_PARAMS
        idle = self._stage.state is StageState.IDLE
        return TrainingState.IDLE if idle else TrainingState.FORWARD_BACKWARD

    @skip_frame  # the wrapped module is compiled separately
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the wrapped module with unsharded parameters."""
        wrapped: Any = self._modules[WRAPPED]
        pre_forward, post_forward = self._hooks.pre_forward, self._hooks.post_forward
        if compiler_at_work() is not None:  # it may compile the wrapped module but not the hooks
            pre_forward, post_forward = map(torch.compiler.disable, (pre_forward, post_forward))
        args, kwargs = pre_forward(self, args, kwargs)
        return post_forward(self, args, wrapped(*args, **kwargs))

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the wrapped module if the wrapper lacks it."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == WRAPPED:
                raise
            if name == FLAT_NAME:
                return next(iter(self.params), None)
            return getattr(super().__getattr__(WRAPPED), name)

    def __getitem__(self, key: int) -> Any:
        """Index the wrapped container."""
        return cast(Any, self.module).__getitem__(key)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield like ``nn.Module.named_parameters``; in ``summon_full_params`` without wrappers' names."""
        return self._states.listed(super().named_parameters(*args, **kwargs))

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield like ``nn.Module.named_buffers``; in ``summon_full_params`` without wrappers' names."""
        return self._states.listed(super().named_buffers(*args, **kwargs))

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        """Apply ``.to`` and the like to the sharded parameters, then adopt their new memory."""
        for unit in self._stage.units:
            unit.reshard_by_hand()
        result = super()._apply(*args, **kwargs)
        for unit in self._stage.units:
            unit.readopt()
        return result

    # -- FSDP ------------------------------------------------------------------------------------------------

    @staticmethod
    @contextmanager
    def summon_full_params(
        module: nn.Module,
        recurse: bool = True,
        writeback: bool = True,
        rank0_only: bool = False,
        offload_to_cpu: bool = False,
        with_grads: bool = False,
    ) -> Iterator[None]:
        """Show full parameters in full precision inside this context. Collective.

        Args:
            module: the module whose wrappers to show; with ``recurse=False`` only itself.
            writeback: keep changes; every rank stores its own part.
            rank0_only: only rank 0 of ``process_group`` (hybrid: of each shard group) gets the values.
            offload_to_cpu: move the values to the CPU.
            with_grads: show full gradients too, ``None`` if no rank has one; written back like values.

        Raises:
            NotImplementedError: ``writeback`` with ``rank0_only``, because other ranks have no values.
            AssertionError: inside forward, backward or another ``summon_full_params``.
        """
        check_summoning(writeback, rank0_only, offload_to_cpu)
        wrappers = FullyShardedDataParallel.fsdp_modules(module)
        if not recurse:
            wrappers = [wrapper for wrapper in wrappers if wrapper is module]
        if any(wrapper._states.summoned for wrapper in wrappers):
            raise AssertionError("Cannot manually unshard parameters when already unsharding parameters")
        shown: list[ShownUnit] = []
        for wrapper in wrappers:
            what = "Cannot manually unshard parameters during forward/backward: summon_full_params()"
            wrapper._stage.check_idle(what, AssertionError)
            wrapper.check_is_root()
            for unit in wrapper._stage.units:
                keep = not rank0_only or wrapper.rank == 0
                shown.append(ShownUnit(unit, keep=keep, offload=offload_to_cpu))
        started: list[ShownUnit] = []
        try:
            for wrapper in wrappers:
                wrapper._states.summoned = True
            for each in shown:
                each.show(with_grads)
                started.append(each)
            yield
        finally:
            for each in started:
                each.hide(writeback)
            for wrapper in wrappers:
                wrapper._states.summoned = False

    def apply(self, fn: Callable[[nn.Module], None]) -> "FullyShardedDataParallel":
        """Apply ``fn`` to every module inside, with full parameters, and keep the changes."""
        check_outside("apply()", self.training_state)
        self.check_is_root()
        with self.summon_full_params(self, recurse=False):  # wrappers inside summon their own parameters
            return super().apply(fn)

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Scale all gradients so that their norm over all ranks is at most ``max_norm``; return the norm.

        Root only. Unlike ``torch.nn.utils.clip_grad_norm_``, it includes the parts of other ranks.
        """
        if not self.check_is_root():
            raise RuntimeError("clip_grad_norm_() should only be called on the outermost wrapper")
        if self._states.summoned:
            check_outside("clip_grad_norm_()", self.training_state)
        return clip_grad_norm(self, float(max_norm), float(norm_type))

    @staticmethod
    def fsdp_modules(module: nn.Module, root_only: bool = False) -> "list[FullyShardedDataParallel]":
        """Return the wrappers in ``module``, including itself; with ``root_only`` only outermost ones."""
        found = [m for m in module.modules() if isinstance(m, FullyShardedDataParallel)]
        if not root_only:
            return found
        inside = {m for outer in found for m in outer.modules() if m is not outer}
        return [m for m in found if m not in inside]

    def check_is_root(self) -> bool:
        """Return whether this is the outermost wrapper. Builds the tree if there is none yet."""
        _ = self._hooks.runtime
        return self._stage.is_root

    def register_comm_hook(self, state: object, hook: HookFunction) -> None:
        """Use ``hook`` to reduce the gradients of every unit; see ``gradients.py``. Root only, once.

        Raises:
            AssertionError: not the root, a hybrid strategy, or a hook is already registered.
            ValueError: ``hook`` is not callable. If it does not accept the arguments of a unit, reducing that
                unit's gradients raises TypeError.
        """
        if not self.check_is_root():
            raise AssertionError("register_comm_hook can only be called on a root instance.")
        wrappers = self.fsdp_modules(self)
        hybrid = [wrapper for wrapper in wrappers if wrapper.sharding_strategy in HYBRID]
        if hybrid:
            strategy = hybrid[0].sharding_strategy.name
            raise AssertionError(error_text("fully_sharded_data_parallel.comm_hook", strategy))
        units = [unit for wrapper in wrappers for unit in wrapper._stage.units]
        made = comm_hook(hook, state)
        for unit in units:
            if unit.gradients.comm_hook is not None:
                raise AssertionError("A communication hook is already registered; there can be one")
        for unit in units:
            unit.gradients.comm_hook = made

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients unsharded, without communication, inside this context. Root only.

        With strategies that do not reshard after forward, parameters stay unsharded, as in torch.
        """
        if not self.check_is_root():
            raise RuntimeError(error_text("fully_sharded_data_parallel.no_sync"))
        if self._states.summoned:
            check_outside("no_sync()", self.training_state)
        changed: list[tuple[Unit, bool, bool]] = []
        for wrapper in self.fsdp_modules(self):
            keeps = RESHARDS_AFTER_FORWARD[wrapper.sharding_strategy] is False
            for unit in wrapper._stage.units:
                changed.append((unit, unit.gradients.synchronize, unit.reshard_after_backward))
                unit.gradients.synchronize = False
                if keeps:
                    unit.reshard_after_backward = False
        try:
            yield
        finally:
            for unit, synchronize, reshards in changed:
                unit.gradients.synchronize = synchronize
                unit.reshard_after_backward = reshards
