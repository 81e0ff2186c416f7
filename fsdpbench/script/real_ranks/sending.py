"""Tensors that a script sends to other ranks without their gradient: collectives have none, unless an
autograd function of the script, or torch's own, sends gradients back.

The joint loss of all ranks has a gradient there. The reference takes it from the collectives of
`torch.distributed.nn`, and so shows whether it matters.
"""

import inspect
from collections.abc import Callable
from types import FrameType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.nn import functional as differentiable

SENDS = ("broadcast", "send", "batch_isend_irecv")
"""Calls that send tensors, besides those that reduce, exchange or gather."""
_IN_PLACE = ("all_reduce", "broadcast")
_REDUCES = ("reduce", "reduce_scatter", "reduce_scatter_tensor", "reduce_scatter_single")


def _given(original: Callable[..., Any], *args: Any, **kwargs: Any) -> SimpleNamespace:
    """Return the arguments of a call, and what it sends as `content`."""
    given = inspect.signature(original).bind(*args, **kwargs)
    given.apply_defaults()
    content = [given.arguments.get(name) for name in ("tensor", "input_tensor", "input")]
    return SimpleNamespace(
        **given.arguments, content=next((each for each in content if each is not None), None)
    )


def sent(original: Callable[..., Any], *args: Any, **kwargs: Any) -> list[torch.Tensor]:
    """Return the tensors that a collective sends and that have a gradient, which its output has not. One that
    is reduced in place has none where gradients are off either; single numbers, such as losses, are logs."""
    name, given = original.__name__, _given(original, *args, **kwargs)
    every = [given.content]
    if name == "batch_isend_irecv":
        every = [each.tensor for each in given.p2p_op_list if each.op.__name__ == "isend"]
    own = [each for each in every if _has_path(each)]
    if name in _IN_PLACE:
        return [each for each in own if each.grad_fn is not None and each.numel() > 1]
    return own if torch.is_grad_enabled() and name not in _REDUCES else []


def sends_all_of_one(frame: FrameType, original: Callable[..., Any], *args: Any, **kwargs: Any) -> bool:
    """Return whether a function sends as many numbers as one of its inputs has that has a gradient: then its
    backward is to send as many. Largest values and counts have fewer, and a loss may be added for a log."""
    given = _given(original, *args, **kwargs)
    sizes = {each.numel() for each in frame.f_locals.values() if _has_path(each)}
    is_sum = getattr(given, "op", dist.ReduceOp.SUM) in (dist.ReduceOp.SUM, dist.ReduceOp.AVG)
    if not isinstance(given.content, torch.Tensor) or original.__name__ in _REDUCES:
        return False
    return is_sum and given.content.is_floating_point() and 1 < given.content.numel() in sizes


def _has_path(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


class Context(SimpleNamespace):
    """The context of a forward whose gradient autograd derives: nothing that is kept there is read."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args: None


def joint(
    original: Callable[..., Any], own: torch.Tensor, *args: Any, **kwargs: Any
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Return the outputs of a collective that is given `own`, and their values, which have the gradient of
    the joint loss. Raises `NotImplementedError` for those that have no such gradient in torch."""
    given, copy = _given(original, *args, **kwargs), own.clone()
    group: Any = getattr(given, "group", None) or dist.group.WORLD
    match original.__name__:
        case "all_reduce":
            return [own], differentiable.all_reduce(copy, given.op, group)
        case "broadcast":
            source = dist.get_global_rank(group, given.group_src) if given.src is None else given.src
            return [own], differentiable.broadcast(copy, source, group)
        case "all_to_all_single":
            sizes = given.output_split_sizes, given.input_split_sizes
            empty = torch.empty_like(given.output)
            return [given.output], differentiable.all_to_all_single(empty, copy, *sizes, group)
        case "all_gather" | "all_gather_into_tensor":
            into = getattr(given, "tensor_list", None) or [given.output_tensor]
            return into, torch.stack(differentiable.all_gather(copy, group))
    raise NotImplementedError(f"the gradient of what {original.__name__} sends is not followed")
