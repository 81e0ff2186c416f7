"""How autograd comes to a stage: nodes that inputs and outputs pass through, also inside ``torch.func``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from ..shared.annotations import NOTHING
from ..shared.pytree import map_tensors
from ..shared.torch_internals import DisableFuncTorch, are_functorch_transforms_active, preserve_versions

in_transform = are_functorch_transforms_active
outside_transforms = DisableFuncTorch
"""What gathers and frees is not a part of what ``torch.func`` transforms."""


class BackwardHooks(Protocol):
    """What the nodes call in backward."""

    def pre_backward(self, gradient: torch.Tensor) -> None:
        """An output got its gradient."""

    def post_backward(self) -> None:
        """All inputs got theirs."""


class Boundary(torch.autograd.Function):
    """The inputs of a stage pass through it unchanged; in backward it tells that all inside is done.

    What comes out is not a view of the inputs, which could not be changed in place, but has their memory and
    version (``hand_back``). Without ``setup_context``, for which torch inspects the signature of ``forward``
    at each call.
    """

    @staticmethod
    def forward(ctx: Any, hooks: BackwardHooks, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.hooks = hooks
        ctx.set_materialize_grads(False)
        return tuple(map(torch.Tensor.detach, tensors))

    @staticmethod
    def jvp(ctx: Any, _: object, *tangents: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tangents

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[Any, ...]:
        with outside_transforms() if in_transform() else NOTHING:
            ctx.hooks.post_backward()
        return (None, *gradients)


class _ChangedInside(torch.autograd.Function):
    """Gives inputs of a stage, the first half of ``tensors``, the history of what was passed into it."""

    @staticmethod
    def forward(ctx: Any, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        inputs = tensors[: len(tensors) // 2]
        ctx.set_materialize_grads(False)
        ctx.mark_dirty(*inputs)
        return inputs

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[Any, ...]:
        return (*[None] * len(gradients), *gradients)


def hand_back(
    hooks: BackwardHooks, inputs: Sequence[torch.Tensor], passed: Sequence[torch.Tensor], output: Any
) -> Any:
    """A stage wrote to its inputs: those that were changed in place are so for its caller too.

    Args:
        inputs, passed: what was given to the boundary, and what came out of it.

    Returns:
        ``output``, with the inputs themselves where it has what was passed.

    Raises:
        RuntimeError: another input shares the memory of one that was changed, or autograd refuses the
            change (of a leaf that requires a gradient).
    """
    # Without a history of its own a change (in no_grad) is complete: the memory is the same.
    changed = [
        (given, inner)
        for given, inner in zip(inputs, passed, strict=True)
        if getattr(inner.grad_fn, "hooks", None) is not hooks
    ]
    if not changed:
        return output
    if len({inner.untyped_storage()._cdata for inner in passed}) < len(passed):
        raise RuntimeError(
            "a wrapped module changes an input in place that shares memory with another of its inputs: what "
            "became of that one is unknown. Give it a clone, or write x = x + y instead of x += y"
        )
    given, inner = [given for given, _ in changed], [inner for _, inner in changed]
    with preserve_versions(tuple(given)):  # they were written to once, and that was counted
        _ChangedInside.apply(*given, *inner)
    originals = {id(inner): given for given, inner in changed}
    return map_tensors(lambda tensor: originals.get(id(tensor), tensor), output)


class TransformedBoundary(torch.autograd.Function):
    """The same inside of ``torch.func``."""

    generate_vmap_rule = True
    jvp = Boundary.jvp
    backward = Boundary.backward

    @staticmethod
    def forward(hooks: BackwardHooks, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tensors

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.hooks = inputs[0]
        ctx.set_materialize_grads(False)


class Output(torch.autograd.Function):
    """An output of a stage passes through it unchanged; its backward is the stage's pre-backward."""

    generate_vmap_rule = True

    @staticmethod
    def forward(hooks: BackwardHooks, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.hooks = inputs[0]

    @staticmethod
    def jvp(ctx: Any, _: object, tangent: torch.Tensor | None) -> torch.Tensor | None:
        return None if tangent is None else Output.apply(ctx.hooks, tangent)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        ctx.hooks.pre_backward(gradient)
        return None, gradient
