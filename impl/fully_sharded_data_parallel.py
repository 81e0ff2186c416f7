"""The ``FullyShardedDataParallel`` front end: a wrapper module with one flat parameter a unit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from .api import (
    BackwardPrefetch,
    CPUOffload,
    MemoryHandover,
    MixedPrecision,
    ShardingStrategy,
)
from .comm_hooks import CommHook, HookFunction
from .deferred_init import materialise
from .flat_param import FlatPresentation
from .flat_units import (
    RESHARDS_AFTER_FORWARD,
    by_name,
    compute_device,
    make_units,
    own_precision,
    schedule_settings,
)
from .full_precision import keep_in_full_precision
from .grad_clip import clip_grad_norm
from .hooks import Stage
from .offload import HostOffload
from .ownership import Ignored, Owned
from .parameter_names import FLAT_NAME, WRAPPED
from .shard_groups import check_broadcast, groups_of_strategy
from .state_dict import WrapperStates
from .state_dict_methods import StateDictMethods
from .summon import ShownUnit
from .unit import Unit
from .wrap import ModulePolicy, PolicyFunction, Selection, select_modules


class FullyShardedDataParallel(StateDictMethods):
    """Wrap ``module`` as one FSDP unit; what inside it is wrapped already (or by policy) are units of their
    own.

    The arguments up to ``device_mesh`` are torch's. Those after it concern the whole tree and are read from
    the root:

    Args:
        module: the module to wrap.
        process_group: one to shard over, or (shard, replicate) for the hybrid strategies.
        sharding_strategy: see ``ShardingStrategy``; ``FULL_SHARD`` by default.
        cpu_offload: keep shards, gradients and the optimizer step on the CPU.
        auto_wrap_policy: which modules inside become units (``wrap.py``).
        backward_prefetch: when backward gathers the next unit; ``None``: only when it is needed.
        mixed_precision: dtypes of computation, reduction and buffers.
        ignored_modules, ignored_states: modules or parameters to leave alone.
        param_init_fn: called with each module that holds meta-device parameters, to materialise them;
            without it what ``deferred_init()`` recorded is replayed, or ``reset_parameters()`` called.
        device_id: the device to move the module to and to compute on.
        sync_module_states: broadcast parameters and buffers from the first rank before sharding.
        forward_prefetch: gather the next unit when a unit's forward starts.
        limit_all_gathers: units in flight before the CPU waits; ``True`` is 2, ``False`` no limit, ``"auto"``
            follows the allocator's retries.
        use_orig_params: show the original parameters instead of the flat one.
        device_mesh: instead of ``process_group``: 1-D, or 2-D (replicate, shard).
        memory_handover: ``"record_stream"`` or ``"events"``.
        backward_prefetch_depth, forward_prefetch_depth: how many units ahead.

    Raises:
        ValueError: settings or parameters that cannot be served; the message names them.
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
        if isinstance(module, FullyShardedDataParallel):
            raise ValueError("this module is already a FullyShardedDataParallel; wrap it once")
        strategy = by_name(ShardingStrategy, sharding_strategy) or ShardingStrategy.FULL_SHARD
        precision = own_precision(mixed_precision)
        settings = schedule_settings(
            backward_prefetch,
            backward_prefetch_depth,
            forward_prefetch,
            forward_prefetch_depth,
            limit_all_gathers,
            memory_handover,
        )
        left_alone = Ignored(ignored_modules, ignored_states)
        groups = groups_of_strategy(strategy, process_group, device_mesh)
        if auto_wrap_policy is not None:
            inner: dict[str, Any] = {
                "process_group": process_group if device_mesh is None else None,
                "sharding_strategy": strategy,
                "cpu_offload": cpu_offload,
                "backward_prefetch": backward_prefetch,
                "mixed_precision": precision,
                "ignored_states": left_alone.parameters,
                "param_init_fn": param_init_fn,
                "device_id": device_id,
                "sync_module_states": sync_module_states,
                "forward_prefetch": forward_prefetch,
                "limit_all_gathers": limit_all_gathers,
                "use_orig_params": use_orig_params,
                "device_mesh": device_mesh,
                "memory_handover": memory_handover,
                "backward_prefetch_depth": backward_prefetch_depth,
                "forward_prefetch_depth": forward_prefetch_depth,
            }
            selection = select_modules(module, auto_wrap_policy, left_alone.modules)
            if mixed_precision is not None:
                kinds = precision._module_classes_to_ignore
                selection = keep_in_full_precision(module, selection, kinds, left_alone.modules)
            _wrap_inside(module, selection, inner)
        device = compute_device(module, device_id, left_alone)
        offload = None
        if cpu_offload is not None and cpu_offload.offload_params:
            offload = HostOffload.decide(pin_memory=True, device=device)
        owned = Owned([module], left_alone)
        materialised = materialise(owned.modules, device, param_init_fn, left_alone.parameters)
        owned.find_parameters()
        # Offloaded parameters are cut where they are; a broadcast needs them where the group communicates.
        owned.move(device, parameters=offload is None or sync_module_states)
        if sync_module_states:
            check_broadcast(groups, device)
            owned.broadcast(groups)
        buffer_dtypes = owned.cast_buffers(precision.buffer_dtype)
        units = make_units(owned, groups, strategy, precision, device, use_orig_params, offload)
        for unit in units:
            materialised.settle(owned.places, unit)
        self.sharding_strategy = strategy
        self.mixed_precision = precision
        self._use_orig_params = use_orig_params
        for unit in units:
            if isinstance(unit.presentation, FlatPresentation):
                self.register_parameter(FLAT_NAME, unit.presentation.flat_param)
        self.add_module(WRAPPED, module)
        self._stage = Stage(
            [self],
            units,
            device,
            settings,
            input_dtype=precision.param_dtype if precision.cast_forward_inputs else None,
            root_input_dtype=precision.param_dtype if precision.cast_root_forward_inputs else None,
        )
        self._states = WrapperStates(self, self._stage, device_mesh, buffer_dtypes)

    # -- as a module -----------------------------------------------------------------------------------------

    @property
    def module(self) -> nn.Module:
        """The wrapped module."""
        return cast(nn.Module, self._modules[WRAPPED])

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the wrapped module with its parameters gathered."""
        stage = self._stage
        args, kwargs = stage.pre_forward(self, args, kwargs)
        return stage.post_forward(self, args, self.module(*args, **kwargs))

    def __getattr__(self, name: str) -> Any:
        """Attributes that the wrapper does not have are those of the wrapped module."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == WRAPPED:
                raise
            return getattr(super().__getattr__(WRAPPED), name)

    def __getitem__(self, key: int) -> Any:
        """Index a wrapped container."""
        return cast(Any, self.module)[key]

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """As ``nn.Module.named_parameters``; with original parameters their names are those of the plain
        model.
        """
        for name, parameter in super().named_parameters(*args, **kwargs):
            plain = self._use_orig_params or self._states.summoned
            yield (name.replace(f"{WRAPPED}.", "") if plain else name), parameter

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        """``.to`` and the like act on the sharded parameters; their memory is taken up afterwards."""
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
        """Show whole parameters in full precision inside; not during forward or backward. A collective.

        Args:
            module: its wrappers, or with ``recurse=False`` only itself.
            writeback: keep what was changed; every rank keeps its own part.
            rank0_only: only rank 0 of each shard group gets the values.
            offload_to_cpu: move them to the CPU.
            with_grads: show whole gradients too; changes to them are dropped.

        Raises:
            ValueError: ``writeback`` with ``rank0_only``: ranks without values have nothing to write.
        """
        if writeback and rank0_only:
            raise ValueError(
                "writeback=True with rank0_only=True: the other ranks have nothing to write back"
            )
        wrappers = [w for w in FullyShardedDataParallel.fsdp_modules(module) if not w._states.summoned]
        if not recurse:
            wrappers = [wrapper for wrapper in wrappers if wrapper is module]
        shown: list[ShownUnit] = []
        for wrapper in wrappers:
            wrapper._stage.check_idle("summon_full_params")
            for unit in wrapper._stage.units:
                keep = not rank0_only or unit.groups.shard_rank == 0
                shown.append(ShownUnit(wrapper, unit, keep=keep, offload=offload_to_cpu))
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

    def apply(self, fn: Callable[[nn.Module], None]) -> FullyShardedDataParallel:
        """Apply ``fn`` to every module inside, with whole parameters, and keep the changes."""
        if self._states.summoned:
            return super().apply(fn)
        with self.summon_full_params(self):
            return super().apply(fn)

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Scale all gradients so that their norm over all ranks is at most ``max_norm``; returns the norm.

        Root only. Unlike ``torch.nn.utils.clip_grad_norm_`` it knows that each rank holds a part only.
        """
        if not self.check_is_root():
            raise RuntimeError("clip_grad_norm_() belongs to the outermost FullyShardedDataParallel")
        return clip_grad_norm(self, float(max_norm), float(norm_type))

    @staticmethod
    def fsdp_modules(module: nn.Module, root_only: bool = False) -> list[FullyShardedDataParallel]:
        """The wrappers in ``module``, perhaps with itself; with ``root_only`` those not inside another."""
        found = [m for m in module.modules() if isinstance(m, FullyShardedDataParallel)]
        if not root_only:
            return found
        inside = {m for outer in found for m in outer.modules() if m is not outer}
        return [m for m in found if m not in inside]

    def check_is_root(self) -> bool:
        """Whether this is the outermost wrapper. Fixes the tree if that was not done yet."""
        _ = self._stage.runtime
        return self._stage.is_root

    def register_comm_hook(self, state: object, hook: HookFunction) -> None:
        """Let ``hook`` reduce the gradients of every unit: see ``comm_hooks.py``. Root only, once.

        Raises:
            RuntimeError: not the root, or a hook is there already.
            ValueError: a hybrid strategy, or a hook that does not take the arguments of a unit.
        """
        if not self.check_is_root():
            raise RuntimeError("register_comm_hook() belongs to the outermost FullyShardedDataParallel")
        units = [unit for wrapper in self.fsdp_modules(self) for unit in wrapper._stage.units]
        CommHook.of(hook, state).register(units)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients unsharded, without communication; root only.

        Parameters of strategies that do not reshard after forward stay gathered, as in torch.
        """
        if not self.check_is_root():
            raise RuntimeError(
                "no_sync() belongs to the outermost FullyShardedDataParallel, not to one inside it"
            )
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


# -- wrapping inside -----------------------------------------------------------------------------------------


def _wrap_inside(module: nn.Module, selection: Selection, arguments: dict[str, Any]) -> None:
    places: dict[nn.Module, list[tuple[nn.Module, str]]] = {}
    for parent in module.modules():
        for name, child in parent._modules.items():
            if child is not None and child in selection:
                places.setdefault(child, []).append((parent, name))
    for chosen, own in selection.items():
        if isinstance(chosen, FullyShardedDataParallel):
            continue
        wrapper = FullyShardedDataParallel(chosen, **{**arguments, **own})
        for parent, name in places[chosen]:
            parent._modules[name] = wrapper
