"""The ``fully_shard`` front end: parameters stay in their modules as sharded ``DTensor``s."""

from collections.abc import Callable, Sequence
from functools import cache, wraps
from typing import Any, Concatenate, NoReturn, ParamSpec, Protocol, cast, overload

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ..runtime.buffer import HostOffload
from ..runtime.hooks import ModuleHooks, skip_frame, stage_of
from ..runtime.ownership import Ignored, Owned, check_not_applied, mark_applied
from ..runtime.stage import Stage
from ..runtime.streams import current_device
from ..runtime.unit import Unit, UnitState
from ..shared import error_text
from ..shared import settings as shared_settings
from ..shared.placement import DataParallelMeshDims, SpmdMesh
from ..shared.torch_internals import compiler_at_work
from .dtensor_params import DTensorPresentation
from .fsdp_module import FSDPModule
from .sharded_units import Sharding, groups_of_mesh, make_units

Settings = ParamSpec("Settings")


class _OneOrSeveral(Protocol[Settings]):
    """A callable that returns a module for a module, and a list for a list."""

    @overload
    def __call__(
        self, module: nn.Module, *args: Settings.args, **settings: Settings.kwargs
    ) -> FSDPModule: ...

    @overload
    def __call__(
        self, module: list[nn.Module], *args: Settings.args, **settings: Settings.kwargs
    ) -> list[FSDPModule]: ...


def _typed(
    function: Callable[Concatenate[nn.Module | list[nn.Module], Settings], Any],
) -> _OneOrSeveral[Settings]:
    return function  # type: ignore[return-value]  # overloads of one function


@_typed
def fully_shard(
    module: nn.Module | list[nn.Module],
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: Callable[[nn.Parameter], Any] | None = None,
    mp_policy: shared_settings.MixedPrecisionPolicy = shared_settings.MixedPrecisionPolicy(),  # noqa: B008 - frozen; torch's signature
    offload_policy: shared_settings.OffloadPolicy = shared_settings.OffloadPolicy(),  # noqa: B008
    ignored_params: set[nn.Parameter] | None = None,
    dp_mesh_dims: DataParallelMeshDims | None = None,
    backward_prefetch: shared_settings.PrefetchTiming | None = "pre",
    backward_prefetch_depth: int = 1,
    forward_prefetch_depth: int | None = None,
    limit_all_gathers: bool | int | str = False,
    memory_handover: str | shared_settings.MemoryHandover = shared_settings.MemoryHandover.EVENTS,
    check_ranks: bool | int = False,
    layout: str | shared_settings.CommunicationLayout = shared_settings.CommunicationLayout.AUTO,
) -> Any:
    """Shard the parameters of ``module`` that no earlier call took, as one unit. Call it bottom-up.

    The arguments up to ``dp_mesh_dims`` are torch's. The later ones apply to the whole tree, and the values
    of the root are used:

    Args:
        module: the module, or several modules to gather together.
        mesh: 1-D: shard over it. 2-D: shard over the last dimension and replicate over the first; ``(N, 1)``
            is plain replication. Default: all ranks.
        reshard_after_forward: whether to free the parameters after forward. ``None``: yes, except for the
            root. A number N: keep a larger shard, which backward gathers over groups of N ranks.
        shard_placement_fn: returns for each parameter ``None`` (dim 0), ``Shard(dim)`` or a
            ``ShardPlacementResult`` with another mesh.
        mp_policy: dtypes of computation, reduction and outputs.
        offload_policy: ``CPUOffloadPolicy()`` keeps shards, gradients and the optimizer step on the CPU.
        ignored_params: parameters to ignore.
        dp_mesh_dims: the names of the data parallel dimensions of ``mesh``, if it has others too. The
            parameters must be ``DTensor`` objects on the whole mesh.
        backward_prefetch: gather the next unit of backward before (``"pre"``) or after (``"post"``) this
            unit's gradients are computed, or only when it is needed (``None``).
        backward_prefetch_depth: how many units ahead backward gathers.
        forward_prefetch_depth: how many units ahead forward gathers explicitly. ``None``: 0 on a device,
            because the CPU runs ahead there, and 1 on the CPU.
        limit_all_gathers: maximum units in flight before the CPU waits; ``True`` means 2, ``False`` no limit,
            ``"auto"`` adapts to allocator retries.
        memory_handover: how memory passes between streams: ``"events"`` or ``"record_stream"``.
        check_ranks: number of iterations (``True``: all) in which ranks compare their next operation before
            each collective. If these differ, all ranks raise an error that lists them instead of hanging.
        layout: of parameters in collectives. ``"packed"``: one all-gather with a copy-out and one
            reduce-scatter with a copy-in. ``"grouped"``: one collective per parameter without copies, in one
            group. ``"auto"``: grouped for large parameters under NCCL.

    Returns:
        ``module``, changed in place: its class now has ``FSDPModule`` as its first base.

    Raises:
        ValueError: an unsupported setting, mesh or parameter; the message names it.
        AssertionError: as in torch: a module that was wrapped before, a 2-D mesh without names, a dimension
            that a parameter lacks.
        NotImplementedError: a parameter sharded unevenly on a dimension other than the first, or a number as
            ``reshard_after_forward`` with ``dp_mesh_dims``.
    """
    settings = shared_settings.ScheduleSettings.decide(
        backward_prefetch=backward_prefetch,
        backward_prefetch_depth=backward_prefetch_depth,
        forward_prefetch_depth=forward_prefetch_depth,
        limit_all_gathers=limit_all_gathers,
        memory_handover=memory_handover,
        check_ranks=check_ranks,
    )
    modules = _roots(module)
    for each in modules:
        check_not_applied(each)
        if stage_of(each) is not None:
            raise ValueError(error_text("fully_shard.wrapped", type(each).__name__))
    communication = shared_settings.one_of(shared_settings.CommunicationLayout, layout, "layout")
    mesh = mesh if mesh is not None else _default_mesh()
    if dp_mesh_dims is None:
        _check_mesh(mesh)
    spmd = _spmd_mesh(mesh, dp_mesh_dims, reshard_after_forward)
    mesh = mesh if spmd is None else spmd.data
    device = current_device(mesh.device_type)
    policy = shared_settings.own(shared_settings.MixedPrecisionPolicy, mp_policy, "mp_policy")
    owned = Owned(modules, Ignored(states=ignored_params))
    owned.find_parameters()
    offload = _offload(offload_policy, device)
    owned.move(device, parameters=offload is None)
    sharding = Sharding(
        mesh, device, reshard_after_forward, policy, shard_placement_fn, offload, spmd, communication
    )
    units = make_units(owned, sharding)
    hooks = ModuleHooks(
        Stage(modules, units, device, settings),
        input_dtype=policy.param_dtype if policy.cast_forward_inputs else None,
        output_dtype=policy.output_dtype,
    )
    _register_hooks(modules, hooks)
    for each in modules:
        mark_applied(each)
        each.__class__ = _wrapped_class(cast(Any, type(each)))
    _hook_state_dicts(owned, units)
    return module


# -- checks --------------------------------------------------------------------------------------------------


def _roots(given: nn.Module | Sequence[nn.Module]) -> list[nn.Module]:
    """Return the modules to wrap as one: the given ones that are not inside another given one."""
    if not isinstance(given, nn.Module):
        modules = list(given)
        if not modules:
            raise ValueError("fully_shard was given no modules: the list is empty")
        inside = {inner for each in modules for inner in each.modules() if inner is not each}
        return [each for each in dict.fromkeys(modules) if each not in inside]
    if isinstance(given, (nn.ModuleList, nn.ModuleDict)) and type(given).forward is nn.Module.forward:
        raise ValueError(error_text("fully_shard.roots", type(given).__name__))
    return [given]


def _offload(policy: Any, device: torch.device) -> HostOffload | None:
    """Return the CPU offload of a policy (ours, or torch's of the same name), or None."""
    names = [kind.__name__ for kind in type(policy).__mro__]
    if shared_settings.CPUOffloadPolicy.__name__ in names:
        return HostOffload.decide(policy.pin_memory, device)
    if shared_settings.OffloadPolicy.__name__ in names:
        return None
    raise ValueError(f"offload_policy must be an OffloadPolicy or a CPUOffloadPolicy, not {policy!r}")


def _check_mesh(mesh: DeviceMesh) -> None:
    groups_of_mesh(mesh)
    if mesh.ndim == 2 and mesh.mesh_dim_names is None:
        raise AssertionError(error_text("fully_shard.check_mesh", mesh))


# -- mesh and device -----------------------------------------------------------------------------------------


def _default_mesh() -> DeviceMesh:
    if not dist.is_initialized():
        dist.init_process_group()
    # Without ``check_available``, a CUDA build returns CUDA on a machine without a GPU.
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    backends = dist.get_backend_config().split(",")
    if not any(part.partition(":")[0] in (device.type, part) for part in backends):
        device = torch.device("cpu")
    return init_device_mesh(device.type, (dist.get_world_size(),))


def _spmd_mesh(mesh: DeviceMesh, dims: Any, reshard_after_forward: bool | int | None) -> SpmdMesh | None:
    if dims is None:
        return None
    if isinstance(reshard_after_forward, int) and not isinstance(reshard_after_forward, bool):
        raise NotImplementedError(error_text("fully_shard.spmd_mesh", reshard_after_forward))
    return SpmdMesh.of(mesh, dims)


def _register_hooks(modules: list[nn.Module], hooks: ModuleHooks) -> None:
    # A compiled module runs its hooks eagerly, outside of the graph of its forward.
    pre_forward, post_forward = _uncompiled(hooks.pre_forward), _uncompiled(hooks.post_forward)
    for module in modules:
        module.register_forward_pre_hook(pre_forward, prepend=True, with_kwargs=True)
        module.register_forward_hook(post_forward, always_call=len(modules) > 1)
        for inner in module.modules():
            # The compiler must not treat the parameters of these modules as constants of the graph.
            inner._is_fsdp_managed_module = True  # type: ignore[assignment]
            inner._fsdp_use_orig_params = True  # type: ignore[assignment]


def _uncompiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``function`` so that it is disabled for the compiler, but only while a compiler is active."""

    @skip_frame
    def hook(*arguments: Any) -> Any:
        return (function if compiler_at_work() is None else torch.compiler.disable(function))(*arguments)

    return hook


def _hook_state_dicts(owned: Owned, units: Sequence[Unit]) -> None:
    """Register hooks: state dicts hold sharded parameters, even if a forward left them unsharded, and
    loading may replace parameters (``assign=True``)."""

    def reshard(*_: Any) -> None:
        for unit in units:
            unit.reshard_by_hand()

    def readopt(*_: Any) -> None:
        for unit in units:
            presentation = unit.presentation
            if isinstance(presentation, DTensorPresentation) and presentation.uniform():
                unit.readopt()  # otherwise other modules of the unit are still to be loaded

    for module in {place.module for places in owned.places.values() for place in places}:
        module.register_state_dict_pre_hook(reshard)
        module.register_load_state_dict_pre_hook(reshard)
        module.register_load_state_dict_post_hook(readopt)


# -- the class of a wrapped module ---------------------------------------------------------------------------


@cache
def _wrapped_class(kind: type[nn.Module]) -> type:
    members = {"__deepcopy__": _no_deepcopy, "forward": _checked_forward(kind)}
    return type(f"FSDP{kind.__name__}", (FSDPModule, kind), members)


def _checked_forward(kind: type[nn.Module]) -> Callable[..., Any]:
    """Return a forward that raises RuntimeError if it runs without the hooks that gather its parameters."""

    @wraps(kind.forward)
    def checked(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        stage = None if torch.compiler.is_dynamo_compiling() else stage_of(self)
        for unit in stage.units if stage is not None else ():
            if unit.state is not UnitState.UNSHARDED:
                raise RuntimeError(error_text("fully_shard.checked", type(self).__name__, unit.name))
        return kind.forward(self, *args, **kwargs)  # looked up at each call, because users patch classes

    return checked


def _no_deepcopy(*_: object) -> NoReturn:
    raise AssertionError(error_text("fully_shard.deepcopy"))
