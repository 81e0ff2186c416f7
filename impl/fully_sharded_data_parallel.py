"""The ``FullyShardedDataParallel`` front end: a wrapper module with one flat parameter a unit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn, cast

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from . import comm
from .api import (
    BackwardPrefetch,
    CPUOffload,
    MemoryHandover,
    MixedPrecision,
    PrefetchTiming,
    ScheduleSettings,
    ShardingStrategy,
    UnitPrecision,
)
from .deferred_init import materialise
from .flat_param import FlatPresentation, OriginalPresentation
from .hooks import Stage
from .layout import flat_layout
from .ownership import Ignored, Owned
from .shard_groups import groups_of_strategy
from .unit import Unit
from .wrap import ModulePolicy, PolicyFunction, Selection, select_modules

_RESHARDS_AFTER_FORWARD = {
    ShardingStrategy.FULL_SHARD: None,  # yes, but for the root
    ShardingStrategy.SHARD_GRAD_OP: False,
    ShardingStrategy.NO_SHARD: None,  # nothing to free but a low-precision copy
    ShardingStrategy.HYBRID_SHARD: None,
    ShardingStrategy._HYBRID_SHARD_ZERO2: False,
}
_TIMING: dict[BackwardPrefetch | None, PrefetchTiming | None] = {
    BackwardPrefetch.BACKWARD_PRE: "pre",
    BackwardPrefetch.BACKWARD_POST: "post",
    None: None,
}
_WRAPPED = "_fsdp_wrapped_module"


class FullyShardedDataParallel(nn.Module):
    """Wrap ``module`` as one FSDP unit; what inside it is wrapped already (or by policy) are units of their
    own.

    The arguments up to ``device_mesh`` are torch's. Those after it concern the whole tree and are read from
    the root:

    Args:
        module: the module to wrap.
        process_group: one to shard over, or (shard, replicate) for the hybrid strategies.
        sharding_strategy: see ``ShardingStrategy``; ``FULL_SHARD`` by default.
        auto_wrap_policy: which modules inside become units (``wrap.py``).
        backward_prefetch: when backward gathers the next unit; ``None``: only when it is needed.
        mixed_precision: dtypes of computation, reduction and buffers.
        ignored_modules, ignored_states: modules or parameters to leave alone.
        param_init_fn: called with each module that holds meta-device parameters, to materialise them.
        device_id: the device to move the module to and to compute on.
        sync_module_states: broadcast parameters and buffers from the first rank before sharding.
        forward_prefetch: gather the next unit when a unit's forward starts.
        limit_all_gathers: units in flight before the CPU waits; ``True`` is 2, ``False`` no limit.
        use_orig_params: show the original parameters instead of the flat one.
        device_mesh: instead of ``process_group``: 1-D, or 2-D (replicate, shard).
        memory_handover: ``"record_stream"`` or ``"events"``.
        backward_prefetch_depth, forward_prefetch_depth: how many units ahead.

    Raises:
        ValueError: settings or parameters that cannot be served; the message names them.
        NotImplementedError: an argument of torch that is not built yet, with a value other than its default.
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
        limit_all_gathers: bool | int = True,
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
        if cpu_offload is not None and cpu_offload.offload_params:
            _refuse("cpu_offload", cpu_offload)
        strategy = _by_name(ShardingStrategy, sharding_strategy) or ShardingStrategy.FULL_SHARD
        precision = _own_precision(mixed_precision)
        settings = _settings(
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
            _wrap_inside(module, select_modules(module, auto_wrap_policy, left_alone.modules), inner)
        if precision.param_dtype is not None:
            _refuse_full_precision_modules(module, precision)
        device = _compute_device(module, device_id, left_alone)
        owned = Owned([module], left_alone)
        materialise(owned.modules, device, param_init_fn)
        owned.find_parameters()
        owned.move(device)
        if sync_module_states:
            owned.broadcast(groups)
        owned.cast_buffers(precision.buffer_dtype)
        units = _make_units(owned, groups, strategy, precision, device, use_orig_params)
        self.sharding_strategy = strategy
        self.mixed_precision = precision
        self._use_orig_params = use_orig_params
        for unit in units:
            if isinstance(unit.presentation, FlatPresentation):
                self.register_parameter("_flat_param", unit.presentation.flat_param)
        self.add_module(_WRAPPED, module)
        self._stage = Stage(
            [self],
            units,
            device,
            settings,
            input_dtype=precision.param_dtype if precision.cast_forward_inputs else None,
            root_input_dtype=precision.param_dtype if precision.cast_root_forward_inputs else None,
        )

    # -- as a module -----------------------------------------------------------------------------------------

    @property
    def module(self) -> nn.Module:
        """The wrapped module."""
        return cast(nn.Module, self._modules[_WRAPPED])

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
            if name == _WRAPPED:
                raise
            return getattr(super().__getattr__(_WRAPPED), name)

    def __getitem__(self, key: int) -> Any:
        """Index a wrapped container."""
        return cast(Any, self.module)[key]

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """As ``nn.Module.named_parameters``; with original parameters their names are those of the plain
        model.
        """
        for name, parameter in super().named_parameters(*args, **kwargs):
            yield (name.replace(f"{_WRAPPED}.", "") if self._use_orig_params else name), parameter

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        """``.to`` and the like act on the sharded parameters; their memory is taken up afterwards."""
        for unit in self._stage.units:
            unit.reshard()
        result = super()._apply(*args, **kwargs)
        for unit in self._stage.units:
            unit.readopt()
        return result

    # -- FSDP ------------------------------------------------------------------------------------------------

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
            keeps = _RESHARDS_AFTER_FORWARD[wrapper.sharding_strategy] is False
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


# -- arguments -----------------------------------------------------------------------------------------------


def _refuse(argument: str, value: object) -> NoReturn:
    raise NotImplementedError(
        f"FullyShardedDataParallel does not support {argument} yet (got {value!r}); leave it at its default"
    )


def _by_name(kind: Any, value: Any) -> Any:
    """Accept torch's enum of the same name too, so that a script need change only one import."""
    if value is None or isinstance(value, kind):
        return value
    name = getattr(value, "name", None)
    if name not in kind.__members__:
        known = ", ".join(kind.__members__)
        raise ValueError(f"{value!r} is not a {kind.__name__}; one of {known} is")
    return kind[name]


def _own_precision(value: Any) -> MixedPrecision:
    if value is None:
        return MixedPrecision()
    if not isinstance(value, MixedPrecision):
        if not hasattr(value, "cast_root_forward_inputs"):
            raise ValueError(f"mixed_precision must be a MixedPrecision, not {value!r}")
        value = MixedPrecision(**{name: getattr(value, name) for name in MixedPrecision.__dataclass_fields__})
    if value.keep_low_precision_grads:
        _refuse("mixed_precision.keep_low_precision_grads", True)
    return value


def _settings(
    backward_prefetch: BackwardPrefetch | None,
    backward_depth: int,
    forward_prefetch: bool,
    forward_depth: int | None,
    limit_all_gathers: bool | int,
    memory_handover: str | MemoryHandover,
) -> ScheduleSettings:
    if forward_depth is None:
        forward_depth = int(forward_prefetch)
    elif forward_prefetch and forward_depth == 0:
        raise ValueError("forward_prefetch=True contradicts forward_prefetch_depth=0; give one of them")
    return ScheduleSettings.decide(
        backward_prefetch=_TIMING[_by_name(BackwardPrefetch, backward_prefetch)],
        backward_prefetch_depth=backward_depth,
        forward_prefetch_depth=forward_depth,
        limit_all_gathers=limit_all_gathers,
        memory_handover=memory_handover,
    )


def _refuse_full_precision_modules(module: nn.Module, precision: MixedPrecision) -> None:
    """Normalisation with running statistics must stay in full precision; keeping it so is not built yet."""
    kinds = tuple(precision._module_classes_to_ignore)
    for name, inner in module.named_modules():
        if kinds and isinstance(inner, kinds):
            raise NotImplementedError(
                f"module '{name}' ({type(inner).__name__}) would have to stay out of mixed precision, "
                "which is not supported yet; pass _module_classes_to_ignore=() to compute it in param_dtype"
            )


def _compute_device(
    module: nn.Module, device_id: int | torch.device | None, ignored: Ignored
) -> torch.device:
    accelerator = torch.accelerator.current_accelerator()
    if isinstance(device_id, int):
        return torch.device(accelerator.type if accelerator else "cpu", device_id)
    if device_id is not None:
        device = torch.device(device_id)
        if device.type != "cpu" and device.index is None:
            return torch.device(device.type, torch.get_device_module(device).current_device())
        return device
    found = {p.device for p in module.parameters() if p not in ignored.parameters and p.device.type != "meta"}
    if len(found) > 1:
        raise ValueError(
            f"the module's parameters are on {sorted(map(str, found))}: "
            "pass device_id, or move the module first"
        )
    if found:
        return found.pop()
    if accelerator is None:
        return torch.device("cpu")
    return torch.device(accelerator.type, torch.get_device_module(accelerator).current_device())


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


# -- the unit ------------------------------------------------------------------------------------------------


def _make_units(
    owned: Owned,
    groups: comm.UnitGroups,
    strategy: ShardingStrategy,
    precision: MixedPrecision,
    device: torch.device,
    use_orig_params: bool,
) -> Sequence[Unit]:
    originals = list(owned.places)
    if not originals:
        return ()
    first = originals[0]
    for parameter in originals:
        _check_uniform(owned, first, parameter, "dtype")
        if not use_orig_params:
            _check_uniform(owned, first, parameter, "requires_grad")
    described = [owned.describe(p) for p in originals]
    layout = flat_layout([p.shape for p in originals], groups.shard_size, groups.shard_rank)
    owned.take()
    kind: Any = OriginalPresentation if use_orig_params else FlatPresentation
    presentation = kind(layout, described, originals)
    unit = Unit(
        name=owned.title,
        parameters=described,
        layout=layout,
        shard=presentation.shard,
        groups=groups,
        precision=UnitPrecision.decide(first.dtype, precision.param_dtype, precision.reduce_dtype),
        device=device,
        reshard_after_forward=_RESHARDS_AFTER_FORWARD[strategy],
        presentation=presentation,
    )
    return (unit,)


def _check_uniform(owned: Owned, first: nn.Parameter, other: nn.Parameter, what: str) -> None:
    ours, theirs = getattr(first, what), getattr(other, what)
    if ours == theirs:
        return
    way_out = (
        "wrap the modules that differ by themselves, or convert them"
        if what == "dtype"
        else "pass use_orig_params=True, or wrap the frozen modules by themselves"
    )
    raise ValueError(
        f"the parameters of one flat parameter must agree in {what}, but in {owned.title} "
        f"'{owned.fqns[first]}' has {ours} and '{owned.fqns[other]}' has {theirs}: {way_out}"
    )
