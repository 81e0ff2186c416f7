"""Parameters that say themselves what is gathered of them: in 8 bits, with a scale a row."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils._pytree import tree_map_only


class Quantised(torch.Tensor):
    """A tensor around another one, of its own class through every operator."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, strides=inner.stride(), dtype=inner.dtype, device=inner.device
        )

    def __init__(self, inner: torch.Tensor) -> None:
        self.inner = inner

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["inner"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, torch.Tensor], *_: Any) -> Any:
        return cls(inner["inner"])

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        plain = tree_map_only(Quantised, lambda held: held.inner, (args, kwargs))
        result = tree_map_only(torch.Tensor, cls, function(*plain[0], **plain[1]))
        return return_and_correct_aliasing(function, args, kwargs, result)

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: nn.Module, mp_policy: Any
    ) -> Any:
        scale = self.inner.abs().amax(dim=-1, keepdim=True) / 127
        offset = self.inner.mean().reshape(1)  # the same on all ranks, for this test: not gathered
        return ((self.inner / scale).round().to(torch.int8), scale), offset

    def fsdp_post_all_gather(
        self, gathered: Any, metadata: Any, param_dtype: torch.dtype, *, out: torch.Tensor | None = None
    ) -> Any:
        rows, scale = gathered
        whole = rows.float() * scale + metadata
        if out is None:
            made = whole.to(param_dtype)
            return made, (made,)
        with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(out):
            out.copy_(whole[: out.shape[0]])
        return None


def extend(model: nn.Module) -> None:
    """Make the weights of all linear layers such parameters."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.weight = nn.Parameter(Quantised(module.weight.detach()))
