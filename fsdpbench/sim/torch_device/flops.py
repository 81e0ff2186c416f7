"""FLOPs of matrix products, attention and convolutions, counted at launch.

For programs with unknown models. The formulas are those of `torch.utils.flop_counter`, by shape (attention is
counted in full, causal or not). A product that runs in backward with gradients enabled is a recomputed
forward of activation checkpointing and is counted separately.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import flop_counter

from fsdpbench.base.torch_internals import current_graph_task_id, replaced

_graph_task = current_graph_task_id
_MAIN_SHARE = 0.99


def _of_groups(a: torch.Tensor, b: torch.Tensor, *args: Any, out_val: Any, **kwargs: Any) -> int:
    """Return the FLOPs of grouped products, which share the rows or columns of a two-dimensional factor."""
    groups: int = a.shape[0] if a.dim() == b.dim() == 3 else 1
    return 2 * groups * a.shape[-2] * a.shape[-1] * b.shape[-1]


def _scaled(a: torch.Tensor, b: torch.Tensor, *args: Any, **kwargs: Any) -> int:
    """Return the FLOPs of a product in 8 bits, or in 4 bits with two elements per byte."""
    packed = 2 if a.dtype is torch.float4_e2m1fn_x2 else 1
    return 2 * a.shape[0] * a.shape[1] * packed * b.shape[1]


def of_attention(query: Sequence[int], key: Sequence[int], value: Sequence[int]) -> int:
    """Return the FLOPs of attention with shapes [batch, heads, length, size].

    Keys may have fewer heads; torch 2.11's formula, also used for packed sequences, refuses that.
    """
    batch, heads, length, size = query
    return 2 * batch * heads * length * key[2] * (size + value[3])


def of_attention_backward(
    gradient: Sequence[int], query: Sequence[int], key: Sequence[int], value: Sequence[int]
) -> int:
    """Return the FLOPs of backward from the output's `gradient`; it recomputes the scores."""
    batch, heads, length, size = query
    return 2 * batch * heads * length * key[2] * (3 * size + 2 * value[3])


_OWN: dict[Any, Callable[..., int]] = {
    torch.ops.aten._grouped_mm: _of_groups,
    torch.ops.aten._scaled_mm: _scaled,
    torch.ops.aten._scaled_mm_v2: _scaled,
}
"""Formulas that torch lacks, or that count bytes in torch."""


@dataclass(frozen=True)
class Flops:
    """FLOPs of a span. `model`: without recomputation; `by_type`: by compute type (`bf16`, `tf32`, ...)."""

    model: int
    recomputed: int
    by_type: Mapping[str, int]

    @property
    def main_type(self) -> str | None:
        """Return the compute type of nearly all products; None if mixed or without products."""
        total = sum(self.by_type.values())
        return next((kind for kind, count in self.by_type.items() if count >= _MAIN_SHARE * total > 0), None)


class FlopCount:
    """Running totals of FLOPs."""

    def __init__(self) -> None:
        self._model = 0
        self._recomputed = 0
        self._by_type: Counter[str] = Counter()

    def of_call(
        self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any, compute_type: str
    ) -> tuple[str, int] | None:
        """Return `compute_type` and FLOPs of an operator call on meta tensors; None if not a product."""
        packet = getattr(func, "_overloadpacket", None)
        formula: Any = _OWN.get(packet) or flop_counter.flop_registry.get(packet)
        if formula is None:
            return None
        if func._overloadname in ("dtype", "dtype_out"):  # torch's formulas do not accept `out_dtype`
            args = [value for value in args if not isinstance(value, torch.dtype)]
        attention = {"sdpa_flop_count": of_attention, "sdpa_backward_flop_count": of_attention_backward}
        with replaced(flop_counter, **attention):
            return compute_type, int(formula(*args, **kwargs, out_val=out))

    def add(self, compute_type: str, flops: int) -> None:
        """Add the FLOPs of one launch."""
        if _graph_task() != -1 and torch.is_grad_enabled():
            self._recomputed += flops
        else:
            self._model += flops
        self._by_type[compute_type] += flops

    def take(self) -> Flops:
        """Return the totals since the last call."""
        taken = Flops(self._model, self._recomputed, dict(self._by_type))
        self._model = self._recomputed = 0
        self._by_type.clear()
        return taken


_TYPES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float8_e4m3fn: "fp8",
    torch.float8_e5m2: "fp8",
    torch.float4_e2m1fn_x2: "nvfp4",
}


def compute_type(dtype: torch.dtype, convolution: bool = False) -> str:
    """Return `bf16`, `fp16`, `tf32`, `fp32`, `fp8` or `nvfp4` for a product or convolution in `dtype`.

    torch's defaults differ: a convolution in float32 uses TF32, a matrix product does not. The attributes
    read here also reflect settings by older names (`allow_tf32`, `set_float32_matmul_precision`); reading the
    older names raises an error if a program used the newer ones.
    """
    name = _TYPES.get(dtype)
    if name is not None:
        return name
    backend = torch.backends.cudnn.conv if convolution else torch.backends.cuda.matmul  # type: ignore[attr-defined]
    return "tf32" if dtype is torch.float32 and backend.fp32_precision == "tf32" else "fp32"
