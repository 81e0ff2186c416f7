"""How autograd comes to a stage: nodes that inputs and outputs pass through, also inside ``torch.func``."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import nn

from ..shared.annotations import NOTHING
from ..shared.torch_internals import DisableFuncTorch, are_functorch_transforms_active

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

    Without ``setup_context``, for which torch inspects the signature of ``forward`` at each call.
    """

    @staticmethod
    def forward(ctx: Any, hooks: BackwardHooks, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.hooks = hooks
        ctx.set_materialize_grads(False)
        return tensors

    @staticmethod
    def jvp(ctx: Any, _: object, *tangents: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tangents

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[Any, ...]:
        with outside_transforms() if in_transform() else NOTHING:
            ctx.hooks.post_backward()
        return (None, *gradients)


class TransformedBoundary(torch.autograd.Function):
    """The same inside of ``torch.func``."""

    generate_vmap_rule = True

    @staticmethod
    def forward(hooks: BackwardHooks, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tensors

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.hooks = inputs[0]
        ctx.set_materialize_grads(False)

    @staticmethod
    def jvp(ctx: Any, _: object, *tangents: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tangents

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[Any, ...]:
        return Boundary.backward(ctx, *gradients)


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


def warn_of_view(modules: Sequence[nn.Module]) -> None:
    """Warn that a stage returned a view, in-place operations on which would drop its hook."""
    kinds = ", ".join(type(module).__name__ for module in modules)
    warnings.warn(
        f"{kinds} returned a view: an operation in place on it (x += y) would drop the hook that gathers its "
        "parameters for backward. Write x = x + y, or return a clone",
        UserWarning,
        stacklevel=2,
    )
