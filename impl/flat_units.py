"""From the arguments of ``FullyShardedDataParallel`` to settings, and from parameters to their unit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import nn

from . import comm
from .api import (
    BackwardPrefetch,
    MemoryHandover,
    MixedPrecision,
    PrefetchTiming,
    ScheduleSettings,
    ShardingStrategy,
    UnitPrecision,
)
from .flat_param import FlatPresentation, OriginalPresentation
from .layout import flat_layout
from .ownership import Ignored, Owned
from .unit import Unit

RESHARDS_AFTER_FORWARD = {
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


def refuse(argument: str, value: object) -> NoReturn:
    raise NotImplementedError(
        f"FullyShardedDataParallel does not support {argument} yet (got {value!r}); leave it at its default"
    )


def by_name(kind: Any, value: Any) -> Any:
    """Accept torch's enum of the same name too, so that a script need change only one import."""
    if value is None or isinstance(value, kind):
        return value
    name = getattr(value, "name", None)
    if name not in kind.__members__:
        known = ", ".join(kind.__members__)
        raise ValueError(f"{value!r} is not a {kind.__name__}; one of {known} is")
    return kind[name]


def own_precision(value: Any) -> MixedPrecision:
    if value is None:
        return MixedPrecision()
    if not isinstance(value, MixedPrecision):
        if not hasattr(value, "cast_root_forward_inputs"):
            raise ValueError(f"mixed_precision must be a MixedPrecision, not {value!r}")
        value = MixedPrecision(**{name: getattr(value, name) for name in MixedPrecision.__dataclass_fields__})
    if value.keep_low_precision_grads:
        refuse("mixed_precision.keep_low_precision_grads", True)
    return value


def schedule_settings(
    backward_prefetch: BackwardPrefetch | None,
    backward_depth: int,
    forward_prefetch: bool,
    forward_depth: int | None,
    limit_all_gathers: bool | int | str,
    memory_handover: str | MemoryHandover,
) -> ScheduleSettings:
    if forward_depth is None:
        forward_depth = int(forward_prefetch)
    elif forward_prefetch and forward_depth == 0:
        raise ValueError("forward_prefetch=True contradicts forward_prefetch_depth=0; give one of them")
    return ScheduleSettings.decide(
        backward_prefetch=_TIMING[by_name(BackwardPrefetch, backward_prefetch)],
        backward_prefetch_depth=backward_depth,
        forward_prefetch_depth=forward_depth,
        limit_all_gathers=limit_all_gathers,
        memory_handover=memory_handover,
    )


def refuse_full_precision_modules(module: nn.Module, precision: MixedPrecision) -> None:
    """Normalisation with running statistics must stay in full precision; keeping it so is not built yet."""
    kinds = tuple(precision._module_classes_to_ignore)
    for name, inner in module.named_modules():
        if kinds and isinstance(inner, kinds):
            raise NotImplementedError(
                f"module '{name}' ({type(inner).__name__}) would have to stay out of mixed precision, "
                "which is not supported yet; pass _module_classes_to_ignore=() to compute it in param_dtype"
            )


def compute_device(module: nn.Module, device_id: int | torch.device | None, ignored: Ignored) -> torch.device:
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


# -- the unit ------------------------------------------------------------------------------------------------


def make_units(
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
        reshard_after_forward=RESHARDS_AFTER_FORWARD[strategy],
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
