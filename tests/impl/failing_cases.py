"""A backward that fails on purpose, and the gradients of a pass; runs inside the ranks."""

from __future__ import annotations

from typing import Any

import torch
from fsdp_cases import loss_of, tokens_of
from torch import nn


class BrokenError(Exception):
    """Raised on purpose."""


class Fuse(torch.autograd.Function):
    """Passes its input on; its backward fails."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        raise BrokenError


def gradients_of(model: nn.Module, rank: int) -> tuple[float, list[torch.Tensor]]:
    loss = loss_of(model, tokens_of(rank, 0))
    loss.backward()
    gradients = []
    for parameter in model.parameters():
        if parameter.grad is not None:
            gradient: Any = parameter.grad
            gradients.append(gradient.to_local() if hasattr(gradient, "to_local") else gradient)
        parameter.grad = None
    return loss.item(), gradients
