"""Convert the arguments of ``FullyShardedDataParallel`` to settings, and build the unit of its parameters."""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from ..collectives import comm
from ..deferred_init.materialise import materialise
from ..runtime.buffer import HostOffload
from ..runtime.hooks import stage_of
from ..runtime.ownership import Ignored, Owned
from ..runtime.presentation import mark_replaced
from ..runtime.streams import current_device
from ..runtime.unit import Unit
from ..shared import error_text
from ..shared.placement import TensorParallel
from ..shared.pytree import caster, map_tensors
from ..shared.settings import KeptGradients, PrefetchTiming, UnitPrecision
from ..shared.torch_internals import is_traceable_wrapper_subclass
from .flat_checks import check_first_calls, check_unchanged, warn_of_frozen
from .flat_param import (
    FlatPresentation,
    flat_layout,
    register_in_order,
    registration_order,
    without_activation_wrapper,
)
from .original_params import OriginalPresentation
from .process_groups import HYBRID, check_broadcast
from .settings import BackwardPrefetch, MixedPrecision, ShardingStrategy
from .wrap import ModulePolicy, PolicyFunction, Selection, add_classes, places_of, select_modules

RESHARDS_AFTER_FORWARD = {
    ShardingStrategy.FULL_SHARD: None,  # True except for the root
    ShardingStrategy.SHARD_GRAD_OP: False,
    ShardingStrategy.NO_SHARD: True,  # frees only a low-precision copy, in the root too
    ShardingStrategy.HYBRID_SHARD: None,
    ShardingStrategy._HYBRID_SHARD_ZERO2: False,
}
PREFETCH_TIMING: dict[BackwardPrefetch | None, PrefetchTiming | None] = {
    BackwardPrefetch.BACKWARD_PRE: "pre",
    BackwardPrefetch.BACKWARD_POST: "post",
    None: None,
}


def depth_of_forward_prefetch(forward_prefetch: bool, depth: int | None) -> int | None:
    """Return how many units forward gathers ahead. Raises ``ValueError`` if the settings contradict."""
    if forward_prefetch and depth == 0:
        raise ValueError("forward_prefetch=True contradicts forward_prefetch_depth=0; give one of them")
    return 1 if forward_prefetch and depth is None else depth


def compute_device(module: nn.Module, device_id: int | torch.device | None, ignored: Ignored) -> torch.device:
    """Return the compute device: ``device_id``, else the parameters' device, else the accelerator."""
    default = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    if isinstance(device_id, int):
        return torch.device(default.type, device_id)
    if device_id is not None:
        device = torch.device(device_id)
        return device if device.index is not None else current_device(device.type)
    found = {p.device for p in module.parameters() if p not in ignored.parameters and p.device.type != "meta"}
    if len(found) > 1:
        raise ValueError(error_text("flat_units.compute_device", sorted(map(str, found))))
    return found.pop() if found else current_device(default.type)


def check_wrapped_inside(
    module: nn.Module, by_policy: bool, use_orig_params: bool, limit_all_gathers: bool | int | str
) -> None:
    """Raise ``ValueError`` if wrappers inside ``module`` contradict a policy or these settings."""
    for name, inner in module.named_modules():
        if stage_of(inner) is None or not hasattr(inner, "sharding_strategy"):
            continue
        if by_policy:
            title = name or type(inner).__name__
            raise ValueError(error_text("flat_units.wrapped_inside", title))
        wrapper: Any = inner
        for what, own, outer in (
            ("use_orig_params", wrapper._use_orig_params, use_orig_params),
            ("limit_all_gathers", wrapper.limit_all_gathers, limit_all_gathers),
        ):
            if own != outer:
                raise ValueError(error_text("flat_units.unequal_settings", what, name, own, outer))


def wrap_inside(
    wrapper_class: type[nn.Module],
    module: nn.Module,
    policy: PolicyFunction | ModulePolicy,
    left_alone: set[nn.Module],
    full_precision: Sequence[type[nn.Module]],
    arguments: dict[str, Any],
) -> None:
    """Wrap the modules that ``policy`` selects; classes in ``full_precision`` without mixed precision."""
    selection = select_modules(module, policy, left_alone)
    if full_precision:
        selection = keep_in_full_precision(module, selection, full_precision, left_alone)
    places = places_of(selection, module)
    for chosen, own in selection.items():
        wrapper: Any = wrapper_class(chosen, **{**arguments, **own})
        if isinstance(policy, ModulePolicy):
            warn_of_frozen(wrapper._stage.units)
        for parent, name in places[chosen]:
            parent._modules[name] = wrapper


# -- the unit ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FlatSharding:
    """The resolved arguments of a wrapper that determine how it shards its parameters.

    Args:
        offload: the CPU offload of shards, ``None`` without.
        param_init_fn, sync_module_states: as in ``FullyShardedDataParallel``.
    """

    groups: comm.UnitGroups
    strategy: ShardingStrategy
    precision: MixedPrecision
    device: torch.device
    use_orig_params: bool
    offload: HostOffload | None
    param_init_fn: Callable[[nn.Module], None] | None
    sync_module_states: bool

    @property
    def effective_strategy(self) -> ShardingStrategy:
        """Return the strategy in effect: ``NO_SHARD`` for a single rank."""
        if self.strategy not in HYBRID and self.groups.ranks == 1:
            return ShardingStrategy.NO_SHARD
        return self.strategy


def shard_module(
    module: nn.Module, left_alone: Ignored, how: FlatSharding
) -> tuple[Sequence[Unit], dict[nn.Module, dict[str, torch.dtype]]]:
    """Materialise, move, broadcast and shard ``module``. Return its unit, and original dtypes of buffers."""
    owned = Owned([module], left_alone)
    # Random numbers are drawn in the same order as in torch: breadth-first from the root.
    modules = sorted(owned.modules, key=lambda each: owned.modules[each].count("."))
    replayed = materialise(modules, how.device, how.param_init_fn, left_alone.parameters)
    owned.find_parameters()
    # Offloaded parameters are sharded on the host, but a broadcast needs them on the device of the group.
    owned.move(how.device, parameters=how.offload is None or how.sync_module_states)
    if how.sync_module_states:
        check_broadcast(how.groups, how.device)
        _broadcast(owned, how.groups)
    buffer_dtypes = _cast_buffers(owned, how.precision.buffer_dtype)
    units = _make_units(module, owned, how)
    taken = [(old, new) for old, new in replayed.items() if new in owned.places]
    for old, new in taken:
        # If the old parameter is registered elsewhere too, it is tied across units and needs the owner mark.
        old.__dict__.update(new.__dict__)
    mark_replaced((old for old, _ in taken), owned.title)
    return units, buffer_dtypes


@torch.no_grad()
def _broadcast(owned: Owned, groups: comm.UnitGroups) -> None:
    """Broadcast parameters and buffers from the first rank of each group."""
    buffers = [b for module in owned.modules for b in module._buffers.values() if b is not None]
    for group in (groups.shard, groups.replicate):
        if group is not None:
            first = dist.get_process_group_ranks(group)[0]
            for tensor in (*owned.places, *buffers):
                dist.broadcast(tensor.detach(), src=first, group=group)


def _cast_buffers(owned: Owned, dtype: torch.dtype | None) -> dict[nn.Module, dict[str, torch.dtype]]:
    """Cast floating point buffers to ``dtype`` and return their original dtypes by module and name."""
    before: dict[nn.Module, dict[str, torch.dtype]] = {}
    if dtype is None:
        return before
    for module in owned.modules:
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_floating_point():
                before.setdefault(module, {})[name] = buffer.dtype
                module._buffers[name] = buffer.to(dtype)
    return before


def _make_units(module: nn.Module, owned: Owned, how: FlatSharding) -> Sequence[Unit]:
    """Return the unit of the parameters that a wrapper owns; empty if it owns none."""
    originals, use_orig_params = list(owned.places), how.use_orig_params
    if not originals:
        return ()
    _check_originals(owned, originals, use_orig_params)
    groups = how.groups
    described = [owned.describe(p) for p in originals]
    flattened: list[nn.Parameter] = []
    for one, original in zip(described, originals, strict=True):
        tensor, one.whole = pre_flatten_transform(original)
        flattened.append(tensor)
    layout = flat_layout([p.shape for p in flattened], groups.shard_size, groups.shard_rank)
    order = registration_order(module, described)
    owned.take()
    presentation: FlatPresentation | OriginalPresentation
    if use_orig_params:
        presentation = OriginalPresentation(layout, described, flattened, how.offload)
        register_in_order(order)
    else:
        home = without_activation_wrapper(module)
        presentation = FlatPresentation(home, layout, described, flattened, how.offload, order)
    unit = Unit(
        name=owned.title,
        parameters=described,
        layout=layout,
        shard=presentation.shard,
        groups=groups,
        precision=_unit_precision(originals[0].dtype, how.precision, groups),
        device=how.device,
        reshard_after_forward=RESHARDS_AFTER_FORWARD[how.strategy],
        presentation=presentation,
        offload=how.offload,
    )
    stays = use_orig_params and unit.reshard_after_forward is False
    if_replaced = AssertionError if stays else RuntimeError
    presentation.before_backward = partial(check_unchanged, unit, presentation, if_replaced)
    mark_replaced(set(originals).difference(flattened if use_orig_params else ()), owned.title)
    check_first_calls(unit)
    if unit.precision.delivered != unit.precision.original:
        for parameter in presentation.trained():
            parameter.grad_dtype = None  # lets autograd accept gradients of another dtype
        if isinstance(presentation, OriginalPresentation):
            presentation.any_grad_dtype = True
    return (unit,)


def _unit_precision(
    original: torch.dtype, precision: MixedPrecision, groups: comm.UnitGroups
) -> UnitPrecision:
    keep: KeptGradients = None
    if precision.keep_low_precision_grads:
        keep = "reduce" if groups.shard is None else "compute"
    return UnitPrecision.decide(original, precision.param_dtype, precision.reduce_dtype, keep)


def _check_originals(owned: Owned, originals: Sequence[nn.Parameter], use_orig_params: bool) -> None:
    """Raise an error if the parameters cannot form one flat parameter."""
    first = originals[0]
    for parameter in originals:
        _check_uniform(owned, first, parameter, "dtype")
        if not use_orig_params:
            _check_uniform(owned, first, parameter, "requires_grad")
    if not use_orig_params and any("_in_backward_optimizers" in p.__dict__ for p in originals):
        raise RuntimeError(error_text("flat_units.check_originals", owned.title))


def _check_uniform(owned: Owned, first: nn.Parameter, other: nn.Parameter, what: str) -> None:
    ours, theirs = getattr(first, what), getattr(other, what)
    if ours == theirs:
        return
    way_out = "pass use_orig_params=True, or wrap the frozen modules by themselves"
    if what == "dtype":
        way_out = "wrap the modules that differ by themselves, or convert them"
    one, two = owned.fqns[first], owned.fqns[other]
    raise ValueError(error_text("flat_units.disagree", what, owned.title, one, ours, two, theirs, way_out))


# Tensor subclasses in a flat parameter: the extension point for tensor parallelism.
#
# A flat parameter holds plain elements. ``pre_flatten_transform`` returns the tensor that goes into it, and
# the object that converts the gathered tensor back (``TensorParallel``: ``unsharded`` after the all-gather,
# which torch calls ``post_unflatten_transform``, and ``local_gradient`` before the reduction). ``DTensor``s
# are supported with the same class as in ``fully_shard``; support for other types is added here::
#
#     DTensor on tp --pre_flatten--> local tensor [flat, sharded, gathered] --unsharded--> DTensor on tp
#
# ``summon_full_params`` and full state dicts have the local tensor; gradient norms are over dp only.


def pre_flatten_transform(parameter: nn.Parameter) -> tuple[nn.Parameter, TensorParallel | None]:
    """Return the tensor to flatten for ``parameter``, and its unsharded form (``None`` if plain).

    Raises:
        RuntimeError: a tensor subclass that a flat parameter would reduce to plain elements.
    """
    if not isinstance(parameter, DTensor):
        if is_traceable_wrapper_subclass(parameter):
            kind = type(parameter.data).__name__
            raise RuntimeError(error_text("flat_units.pre_flatten_transform", tuple(parameter.shape), kind))
        return parameter, None
    local: torch.Tensor = parameter._local_tensor
    flattened = nn.Parameter(local.detach(), requires_grad=parameter.requires_grad)
    return flattened, TensorParallel(parameter._spec)


# Modules that stay in full precision inside a model in mixed precision, such as batch normalisation.
#
# Each is a separate unit without mixed precision. The modules before and after it compute in a lower dtype,
# so its inputs are cast up and its outputs back down::
#
#     bf16 -> [ pre: to fp32 | module in fp32 | post: to bf16 ] -> bf16
#
# So running statistics and their updates keep full precision.


def keep_in_full_precision(
    root: nn.Module, selection: Selection, classes: Sequence[type[nn.Module]], ignored: set[nn.Module]
) -> Selection:
    """Add modules of ``classes`` inside ``root`` to ``selection``, as units without mixed precision.

    Warns about the added units.
    """
    kinds = tuple(classes)
    found = [m for m in root.modules() if isinstance(m, kinds) and m is not root and m not in ignored]
    if not found:
        return selection
    names = ", ".join(sorted({type(module).__name__ for module in found}))
    warnings.warn(
        f"modules of class {names} stay in full precision: each is a unit without mixed precision",
        stacklevel=4,
    )
    for module in found:
        _FullPrecisionIsland(module)
    return add_classes(selection, root, kinds, ignored, {"mixed_precision": None})


class _FullPrecisionIsland:
    """Casts one module's floating point inputs to its own dtype, and its outputs back to the input dtype.

    The hooks run after the module's existing hooks, so that those see the model's original values.
    """

    def __init__(self, module: nn.Module) -> None:
        held = [t for t in (*module.parameters(), *module.buffers()) if t.is_floating_point()]
        self._up = caster(held[0].dtype if held else torch.float32)
        self._outside: torch.dtype | None = None
        module.register_forward_pre_hook(self._before, with_kwargs=True)
        module.register_forward_hook(self._after)

    def _before(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, dict[str, Any]]:
        self._outside = None

        def cast(tensor: torch.Tensor) -> torch.Tensor:
            raised = self._up(tensor)
            if raised is not tensor:
                self._outside = tensor.dtype
            return raised

        return map_tensors(cast, args), map_tensors(cast, kwargs)

    def _after(self, module: nn.Module, args: Any, output: Any) -> Any:
        outside, self._outside = self._outside, None
        return output if outside is None else map_tensors(caster(outside), output)
