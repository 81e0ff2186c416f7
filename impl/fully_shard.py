"""The ``fully_shard`` front end: parameters stay where they are in the module, as ``DTensor`` shards of their
rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn, overload

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from . import comm
from .api import (
    MemoryHandover,
    MixedPrecisionPolicy,
    OffloadPolicy,
    PrefetchTiming,
    ScheduleSettings,
    UnitPrecision,
)
from .dtensor_params import DTensorPresentation
from .fsdp_module import FSDPModule
from .hooks import Stage, stage_of
from .layout import chunked_layout
from .ownership import Ignored, Owned
from .post_forward import SmallerGroup, neighbours
from .unit import Unit

_wrapped_classes: dict[type, type] = {}


@overload
def fully_shard(
    module: nn.Module,
    *,
    mesh: DeviceMesh | None = ...,
    reshard_after_forward: bool | int | None = ...,
    shard_placement_fn: Callable[[nn.Parameter], Any] | None = ...,
    mp_policy: MixedPrecisionPolicy = ...,
    offload_policy: OffloadPolicy = ...,
    ignored_params: set[nn.Parameter] | None = ...,
    dp_mesh_dims: Any = ...,
    backward_prefetch: PrefetchTiming | None = ...,
    backward_prefetch_depth: int = ...,
    forward_prefetch_depth: int = ...,
    limit_all_gathers: bool | int | str = ...,
    memory_handover: str | MemoryHandover = ...,
) -> FSDPModule: ...


@overload
def fully_shard(
    module: list[nn.Module],
    *,
    mesh: DeviceMesh | None = ...,
    reshard_after_forward: bool | int | None = ...,
    shard_placement_fn: Callable[[nn.Parameter], Any] | None = ...,
    mp_policy: MixedPrecisionPolicy = ...,
    offload_policy: OffloadPolicy = ...,
    ignored_params: set[nn.Parameter] | None = ...,
    dp_mesh_dims: Any = ...,
    backward_prefetch: PrefetchTiming | None = ...,
    backward_prefetch_depth: int = ...,
    forward_prefetch_depth: int = ...,
    limit_all_gathers: bool | int | str = ...,
    memory_handover: str | MemoryHandover = ...,
) -> list[FSDPModule]: ...


def fully_shard(
    module: nn.Module | list[nn.Module],
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: Callable[[nn.Parameter], Any] | None = None,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),  # noqa: B008 - frozen; torch's signature
    offload_policy: OffloadPolicy = OffloadPolicy(),  # noqa: B008
    ignored_params: set[nn.Parameter] | None = None,
    dp_mesh_dims: Any = None,
    backward_prefetch: PrefetchTiming | None = "pre",
    backward_prefetch_depth: int = 1,
    forward_prefetch_depth: int = 0,
    limit_all_gathers: bool | int | str = False,
    memory_handover: str | MemoryHandover = MemoryHandover.EVENTS,
) -> Any:
    """Shard the parameters of ``module`` that no earlier call took, as one unit; call it from the inside out.

    The arguments up to ``dp_mesh_dims`` are torch's. Those after it concern the whole tree and are read from
    the root:

    Args:
        module: the module, or several that are gathered as one.
        mesh: 1-D: shard over it. 2-D: shard over the last dimension, replicas over the first; ``(N, 1)`` is
            plain replication. Default: all ranks.
        reshard_after_forward: free the parameters after forward. ``None``: yes, except for the root. A
            number: keep a larger shard, to be gathered among groups of so many ranks in backward.
        mp_policy: dtypes of computation, reduction and outputs.
        ignored_params: parameters to leave alone.
        backward_prefetch: gather the next unit of backward before (``"pre"``) or after (``"post"``) this
            one's gradients are computed, or only when it is needed (``None``).
        backward_prefetch_depth: how many units ahead.
        forward_prefetch_depth: how many units ahead forward gathers explicitly.
        limit_all_gathers: units in flight before the CPU waits; ``True`` is 2, ``False`` no limit, ``"auto"``
            follows the allocator's retries.
        memory_handover: ``"events"`` or ``"record_stream"``.

    Returns:
        ``module``, changed in place: its class now has ``FSDPModule`` first.

    Raises:
        ValueError: a setting, mesh or parameter that cannot be served; the message names it.
        NotImplementedError: an argument of torch that is not built yet, with a value other than its default.
    """
    settings = ScheduleSettings.decide(
        backward_prefetch=backward_prefetch,
        backward_prefetch_depth=backward_prefetch_depth,
        forward_prefetch_depth=forward_prefetch_depth,
        limit_all_gathers=limit_all_gathers,
        memory_handover=memory_handover,
    )
    if shard_placement_fn is not None:
        _refuse("shard_placement_fn", shard_placement_fn)
    if type(offload_policy).__name__ != "OffloadPolicy":
        _refuse("offload_policy", offload_policy)
    if dp_mesh_dims is not None:
        _refuse("dp_mesh_dims", dp_mesh_dims)
    modules = module if isinstance(module, list) else [module]
    for each in modules:
        _check_module(each)
    mesh = mesh if mesh is not None else _default_mesh()
    groups = groups_of_mesh(mesh)
    device = device_of_mesh(mesh)
    reshard = _check_reshard(reshard_after_forward, groups.shard_size)
    policy = _own_policy(mp_policy)
    owned = Owned(modules, Ignored(states=ignored_params))
    owned.find_parameters()
    owned.move(device)
    units = _make_units(owned, mesh, groups, device, reshard, policy)
    stage = Stage(
        modules,
        units,
        device,
        settings,
        input_dtype=policy.param_dtype if policy.cast_forward_inputs else None,
        output_dtype=policy.output_dtype,
    )
    _register_hooks(modules, stage)
    for each in modules:
        _swap_class(each)
    _reshard_for_state_dict(owned, units)
    return module


# -- checks --------------------------------------------------------------------------------------------------


def _refuse(argument: str, value: object) -> NoReturn:
    raise NotImplementedError(
        f"fully_shard does not support {argument} yet (got {value!r}); leave it at its default"
    )


def _check_module(module: nn.Module) -> None:
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)) and type(module).forward is nn.Module.forward:
        raise ValueError(
            f"fully_shard cannot wrap a {type(module).__name__}: it has no forward to hook. "
            "Wrap its members instead"
        )
    if stage_of(module) is not None:
        raise ValueError(f"this {type(module).__name__} was already given to fully_shard")


def _check_reshard(value: bool | int | None, shard_size: int) -> bool | int | None:
    if value is None or isinstance(value, bool):
        return value
    if not isinstance(value, int) or value < 1 or shard_size % value:
        raise ValueError(
            f"reshard_after_forward must be True, False, None or a factor of the {shard_size} ranks "
            f"that share one copy, not {value!r}"
        )
    if value == 1:
        return False
    return True if value == shard_size else value


def _own_policy(policy: Any) -> MixedPrecisionPolicy:
    """Accept torch's policy object too, so that a script need change only one import."""
    if isinstance(policy, MixedPrecisionPolicy):
        return policy
    fields = ("param_dtype", "reduce_dtype", "output_dtype", "cast_forward_inputs")
    if not all(hasattr(policy, name) for name in fields):
        raise ValueError(f"mp_policy must be a MixedPrecisionPolicy, not {policy!r}")
    return MixedPrecisionPolicy(**{name: getattr(policy, name) for name in fields})


# -- mesh and device -----------------------------------------------------------------------------------------


def _default_mesh() -> DeviceMesh:
    if not dist.is_initialized():
        dist.init_process_group()
    device = torch.accelerator.current_accelerator() or torch.device("cpu")
    backends = dist.get_backend_config().split(",")
    if not any(part.partition(":")[0] in (device.type, part) for part in backends):
        device = torch.device("cpu")
    return init_device_mesh(device.type, (dist.get_world_size(),))


def groups_of_mesh(mesh: DeviceMesh) -> comm.UnitGroups:
    """The groups that a 1-D (shard) or 2-D (replicate, shard) mesh stands for."""
    if mesh.ndim == 1:
        return comm.UnitGroups.of(mesh.get_group(0))
    if mesh.ndim == 2:
        return comm.UnitGroups.of(mesh.get_group(1), mesh.get_group(0))
    raise ValueError(f"fully_shard needs a mesh of 1 (shard) or 2 (replicate, shard) dimensions, not {mesh}")


def device_of_mesh(mesh: DeviceMesh) -> torch.device:
    """This rank's device: the current one of the mesh's type."""
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(mesh.device_type, torch.get_device_module(mesh.device_type).current_device())


# -- units ---------------------------------------------------------------------------------------------------


def _make_units(
    owned: Owned,
    mesh: DeviceMesh,
    groups: comm.UnitGroups,
    device: torch.device,
    reshard: bool | int | None,
    policy: MixedPrecisionPolicy,
) -> list[Unit]:
    by_dtype: dict[torch.dtype, list[nn.Parameter]] = {}
    for parameter, fqn in owned.fqns.items():
        _check_parameter(parameter, fqn, owned.title)
        by_dtype.setdefault(parameter.dtype, []).append(parameter)
    owned.take()
    return [
        _make_unit(owned, members, mesh, groups, device, reshard, policy) for members in by_dtype.values()
    ]


def _make_unit(
    owned: Owned,
    originals: list[nn.Parameter],
    mesh: DeviceMesh,
    groups: comm.UnitGroups,
    device: torch.device,
    reshard: bool | int | None,
    policy: MixedPrecisionPolicy,
) -> Unit:
    dtype = originals[0].dtype
    precision = UnitPrecision.decide(dtype, policy.param_dtype, policy.reduce_dtype)
    layout = chunked_layout(
        [parameter.shape for parameter in originals],
        groups.shard_size,
        groups.shard_rank,
        min(precision.compute.itemsize, dtype.itemsize),
    )
    described = [owned.describe(parameter) for parameter in originals]
    presentation = DTensorPresentation(mesh, layout, described, originals)
    smaller = None
    if isinstance(reshard, int) and not isinstance(reshard, bool):
        assert groups.shard is not None
        smaller = SmallerGroup(layout, neighbours(groups.shard, reshard), precision)
        reshard = True
    return Unit(
        name=owned.title,
        parameters=described,
        layout=layout,
        shard=presentation.shard,
        groups=groups,
        precision=precision,
        device=device,
        reshard_after_forward=reshard,
        presentation=presentation,
        smaller=smaller,
    )


def _check_parameter(parameter: nn.Parameter, fqn: str, title: str) -> None:
    if parameter.dim() == 0:
        raise ValueError(
            f"parameter '{fqn}' of {title} is a scalar and has no rows to shard; give it the shape (1,)"
        )
    if hasattr(parameter, "_spec"):
        raise NotImplementedError(
            f"parameter '{fqn}' of {title} is a DTensor already; this is not supported yet"
        )


def _register_hooks(modules: list[nn.Module], stage: Stage) -> None:
    # A compiled module runs its hooks as they are, beside the graph of its forward.
    pre_forward = torch.compiler.disable(stage.pre_forward)
    post_forward = torch.compiler.disable(stage.post_forward)
    for module in modules:
        module.register_forward_pre_hook(pre_forward, prepend=True, with_kwargs=True)
        module.register_forward_hook(post_forward, always_call=len(modules) > 1)
        for inner in module.modules():
            # The compiler must not take parameters of these for constants of the graph.
            inner._is_fsdp_managed_module = True  # type: ignore[assignment]
            inner._fsdp_use_orig_params = True  # type: ignore[assignment]


def _reshard_for_state_dict(owned: Owned, units: list[Unit]) -> None:
    """State dicts hold sharded parameters, also where a forward left the unsharded ones in place."""

    def reshard(*_: Any) -> None:
        for unit in units:
            unit.reshard()

    for module in {place.module for places in owned.places.values() for place in places}:
        module.register_state_dict_pre_hook(reshard)
        module.register_load_state_dict_pre_hook(reshard)


# -- the class of a wrapped module ---------------------------------------------------------------------------


def _swap_class(module: nn.Module) -> None:
    kind = type(module)
    wrapped = _wrapped_classes.get(kind)
    if wrapped is None:
        members = {"__deepcopy__": _no_deepcopy}
        wrapped = type(f"FSDP{kind.__name__}", (FSDPModule, kind), members)
        _wrapped_classes[kind] = wrapped
    module.__class__ = wrapped


def _no_deepcopy(*_: object) -> NoReturn:
    raise RuntimeError(
        "a module under FSDP cannot be deep-copied; copy it before wrapping, or copy its state dict"
    )
