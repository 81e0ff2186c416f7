"""A model wrapped in each way, and the plain one beside it: what is equal, whole, on every rank.

Every rank has the same batch, so that the average over ranks is the plain model's gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from fsdpbench import impl

CPU = torch.device("cpu")
Wrap = Callable[[nn.Module, Iterable[nn.Module]], nn.Module]
RELATIVE = 1e-4
"""Of the largest element: fp32, sums of at most some hundred terms."""


def sharded(reshard: bool | int | None = None, forward_ahead: int = 0, **arguments: Any) -> Wrap:
    """``fully_shard`` of each unit and the root."""

    def wrap(model: nn.Module, units: Iterable[nn.Module]) -> nn.Module:
        made = [impl.fully_shard(unit, reshard_after_forward=reshard, **arguments) for unit in units]
        for index, unit in enumerate(made):
            if forward_ahead:
                unit.set_modules_to_forward_prefetch(made[index + 1 : index + 1 + forward_ahead])
        return impl.fully_shard(model, reshard_after_forward=reshard, **arguments)

    return wrap


def flat(strategy: str = "FULL_SHARD", originals: bool = True, **arguments: Any) -> Wrap:
    """``FullyShardedDataParallel`` around each unit and the root."""

    def wrap(model: nn.Module, units: Iterable[nn.Module]) -> nn.Module:
        chosen = set(units)
        return impl.FullyShardedDataParallel(
            model,
            auto_wrap_policy=impl.CustomPolicy(lambda module: module in chosen),
            sharding_strategy=impl.ShardingStrategy[strategy],
            use_orig_params=originals,
            device_id=CPU,
            **arguments,
        )

    return wrap


WRAPS: dict[str, Wrap] = {
    "sharded": sharded(),
    "sharded kept": sharded(False),
    "sharded freed": sharded(True),
    "sharded ahead": sharded(True, forward_ahead=2),
    "sharded grouped": sharded(True, layout="grouped"),
    "originals": flat(),
    "flat": flat(originals=False),
    "flat kept": flat("SHARD_GRAD_OP", originals=False),
    "originals kept": flat("SHARD_GRAD_OP"),
    "flat ahead": flat(originals=False, forward_prefetch=True, limit_all_gathers=False),
    "flat post": flat(originals=False, backward_prefetch=impl.BackwardPrefetch.BACKWARD_POST),
    "originals none": flat(backward_prefetch=None),
    "unsharded": flat("NO_SHARD"),
}
FLAT_WRAPS = ("flat", "flat kept", "flat ahead", "flat post")
"""Those whose optimizers see flat parameters."""
QUICK_WRAPS = ("sharded", "flat")


def is_flat(model: nn.Module) -> bool:
    return isinstance(model, impl.FullyShardedDataParallel)


def clean(name: str) -> str:
    return name.replace("_fsdp_wrapped_module.", "").replace("_checkpoint_wrapped_module.", "")


def whole(model: nn.Module, held: dict[str, nn.Parameter]) -> dict[str, torch.Tensor | None]:
    """Every parameter and gradient whole, under the plain model's names.

    Args:
        held: the parameters that an optimizer has, by names.
    """
    found: dict[str, torch.Tensor | None] = {}
    if is_flat(model):
        with impl.FullyShardedDataParallel.summon_full_params(model, writeback=False, with_grads=True):
            for name, parameter in model.named_parameters():
                found[clean(name)] = parameter.detach().clone()
                grad = parameter.grad
                found[f"grad of {clean(name)}"] = None if grad is None else grad.detach().clone()
        return found
    shown = {
        clean(text): value
        for name, parameter in held.items()
        for text, value in ((name, parameter.detach()), (f"grad of {name}", parameter.grad))
    }
    parts = {name: value for name, value in shown.items() if isinstance(value, DTensor)}
    found |= {name: None if v is None else v.clone() for name, v in shown.items() if name not in parts}
    return found | dict(zip(parts, gathered(list(parts.values())), strict=True))


def gathered(values: Sequence[DTensor]) -> list[torch.Tensor]:
    """The whole of each, by one all-gather for all; their rows are cut as ``torch.chunk`` cuts them."""
    if not values:
        return []
    mesh = values[0].device_mesh
    assert all(value.placements == (Shard(0),) and value.device_mesh == mesh for value in values)
    cut = [-(-value.shape[0] // mesh.size()) for value in values]
    mine = [
        nn.functional.pad(
            value.to_local().detach().flatten(),
            (0, rows * value.shape[1:].numel() - value.to_local().numel()),
        )
        for rows, value in zip(cut, values, strict=True)
    ]
    received = torch.empty(mesh.size() * sum(map(len, mine)))
    dist.all_gather_into_tensor(received, torch.cat(mine), group=mesh.get_group())
    chunks = received.view(mesh.size(), -1).split([len(each) for each in mine], dim=1)
    return [
        chunk.reshape(-1)[: value.numel()].reshape(value.shape)
        for chunk, value in zip(chunks, values, strict=True)
    ]


def differs(one: Any, other: Any) -> bool:
    """Whether two values are not equal as far as fp32 shows; a missing gradient is one of zeros."""
    if one is None or other is None:
        rest = other if one is None else one
        return rest is not None and bool(rest.abs().max() > 0)
    if one.shape != other.shape or not bool(one.isfinite().all()):
        return not torch.equal(one, other)
    scale = max(float(other.abs().max()), 1e-6)
    return bool((one - other).abs().max() > RELATIVE * scale) if one.numel() else False


def differences(ours: dict[str, Any], theirs: dict[str, Any]) -> list[str]:
    """The names under which the two differ."""
    return [name for name in {**theirs, **ours} if differs(ours.get(name), theirs.get(name))]
