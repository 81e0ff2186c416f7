"""Calls of operators, each changed in all ways that may be wrong: one argument of another dtype or shape.

for case in cases():  case.name  "linear: bf16@1"      the CPU is the oracle: does it raise, and what?
                      case.run("cpu"), case.run("sim")
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

T = torch.Tensor
Call = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]


def f(*shape: int) -> T:
    return torch.zeros(shape)


def i(*shape: int) -> T:
    return torch.zeros(shape, dtype=torch.int64)


def call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Call:
    return function, args, kwargs


CALLS: dict[str, Call] = {
    "add": call(torch.add, f(4, 3), f(3)),
    "sub": call(torch.sub, f(4, 3), f(3)),
    "mul_": call(T.mul_, f(4, 3), f(3)),
    "where": call(torch.where, f(3) > 0, f(3), f(3)),
    "lerp": call(torch.lerp, f(3), f(3), 0.5),
    "addcmul": call(torch.addcmul, f(3), f(3), f(3)),
    "masked_fill": call(T.masked_fill, f(3, 2), f(3, 2) > 0, 0.0),
    "mm": call(torch.mm, f(2, 3), f(3, 4)),
    "addmm": call(torch.addmm, f(4), f(2, 3), f(3, 4)),
    "bmm": call(torch.bmm, f(2, 2, 3), f(2, 3, 4)),
    "baddbmm": call(torch.baddbmm, f(2, 2, 4), f(2, 2, 3), f(2, 3, 4)),
    "mv": call(torch.mv, f(2, 3), f(3)),
    "dot": call(torch.dot, f(3), f(3)),
    "matmul": call(torch.matmul, f(2, 3, 4), f(4, 2)),
    "einsum": call(torch.einsum, "bij,bjk->bik", f(2, 3, 4), f(2, 4, 2)),
    "linear": call(F.linear, f(2, 3), f(4, 3), f(4)),
    "linear without bias": call(F.linear, f(2, 2, 3), f(4, 3)),
    "layer_norm": call(F.layer_norm, f(2, 3), (3,), f(3), f(3)),
    "group_norm": call(F.group_norm, f(2, 4, 3), 2, f(4), f(4)),
    "batch_norm": call(F.batch_norm, f(4, 3), f(3), f(3), f(3), f(3), training=True),
    "softmax": call(torch.softmax, f(2, 3), 1),
    "log_softmax": call(torch.log_softmax, f(2, 3), 1),
    "gelu": call(F.gelu, f(3)),
    "silu": call(F.silu, f(3)),
    "relu": call(F.relu, f(3)),
    "conv1d": call(F.conv1d, f(2, 3, 8), f(4, 3, 3), f(4)),
    "conv2d": call(F.conv2d, f(2, 4, 8, 8), f(4, 2, 3, 3), f(4), groups=2),
    "conv_transpose2d": call(F.conv_transpose2d, f(2, 4, 8, 8), f(4, 3, 3, 3), f(3)),
    "embedding": call(F.embedding, i(2, 3), f(5, 4)),
    "cross_entropy": call(F.cross_entropy, f(4, 5), i(4), f(5)),
    "nll_loss": call(F.nll_loss, f(4, 5), i(4)),
    "mse_loss": call(F.mse_loss, f(4), f(4)),
    "binary_cross_entropy": call(F.binary_cross_entropy, f(4), f(4)),
    "attention": call(F.scaled_dot_product_attention, f(2, 2, 4, 8), f(2, 2, 4, 8), f(2, 2, 4, 8)),
    "attention, masked": call(
        F.scaled_dot_product_attention, f(2, 2, 4, 8), f(2, 2, 4, 8), f(2, 2, 4, 8), f(4, 4)
    ),
    "cat": call(torch.cat, [f(2, 3), f(2, 3)]),
    "stack": call(torch.stack, [f(2, 3), f(2, 3)]),
    "gather": call(torch.gather, f(4, 3), 0, i(2, 3)),
    "scatter": call(torch.scatter, f(4, 3), 0, i(2, 3), f(2, 3)),
    "scatter_add": call(torch.scatter_add, f(4, 3), 0, i(2, 3), f(2, 3)),
    "index_select": call(torch.index_select, f(4, 3), 0, i(2)),
    "index_add": call(torch.index_add, f(4, 3), 0, i(2), f(2, 3)),
    "index_copy": call(torch.index_copy, f(4, 3), 0, i(2), f(2, 3)),
    "index_fill": call(torch.index_fill, f(4, 3), 0, i(2), 1.0),
    "index_put": call(torch.index_put, f(4, 3), (i(2),), f(2, 3)),
    "getitem": call(lambda x, index: x[index], f(4, 3), i(2)),
    "slice_scatter": call(torch.slice_scatter, f(4, 3), f(2, 3), 0, 0, 2),
    "select_scatter": call(torch.select_scatter, f(4, 3), f(3), 0, 1),
    "sort": call(torch.sort, f(4, 3), -2),
    "argmax": call(torch.argmax, f(4, 3), 1),
    "var": call(torch.var, f(4, 3), 1),
    "mean": call(torch.mean, f(4, 3), 1),
    "cumsum": call(torch.cumsum, f(4, 3), 1),
    "allclose": call(torch.allclose, f(3), f(3)),
    "expand": call(lambda x: x.expand(4, 3), f(3)),
    "view": call(lambda x: x.view(3, 4), f(4, 3)),
    "multinomial": call(torch.multinomial, f(4) + 1, 2),
}


def _longer(x: T) -> T | None:
    return torch.cat([x, x.narrow(-1, 0, 1)], -1) if x.dim() else None


def _more_rows(x: T) -> T | None:
    return torch.cat([x, x.narrow(0, 0, 1)], 0) if x.dim() > 1 else None


def _fewer_dimensions(x: T) -> T | None:
    return x.select(0, 0) if x.dim() else None


CHANGES: dict[str, Callable[[T], T | None]] = {
    "bf16": lambda x: x.to(torch.bfloat16),
    "f64": lambda x: x.to(torch.float64),
    "i64": lambda x: x.to(torch.int64),
    "i32": lambda x: x.to(torch.int32),
    "bool": lambda x: x.to(torch.bool),
    "longer": _longer,
    "more rows": _more_rows,
    "one dimension more": lambda x: x.unsqueeze(0),
    "one dimension less": _fewer_dimensions,
}


@dataclass(frozen=True)
class Case:
    """A call; ``change`` of the tensor at ``place``, None for the call as it is right."""

    call_name: str
    change: str | None
    place: int

    @property
    def name(self) -> str:
        return self.call_name if self.change is None else f"{self.call_name}: {self.change}@{self.place}"

    def run(self, device: str) -> Exception | None:
        """What the call raises on a device."""
        function, args, kwargs = CALLS[self.call_name]
        counted = iter(range(100))

        def moved(value: Any) -> Any:
            if isinstance(value, (list, tuple)):
                return type(value)(moved(item) for item in value)
            if not isinstance(value, T):
                return value
            changed = value
            if next(counted) == self.place and self.change is not None:
                other = CHANGES[self.change](value)
                assert other is not None
                changed = other
            return changed.clone().to(device)

        args, kwargs = moved(args), {name: moved(value) for name, value in kwargs.items()}
        try:
            function(*args, **kwargs)
        except Exception as error:
            return error
        return None


def cases() -> Iterator[Case]:
    """All of them, those that change something."""
    for name, (_, args, _) in CALLS.items():
        yield Case(name, None, 0)
        tensors = [t for value in args for t in (value if isinstance(value, (list, tuple)) else [value])]
        for place, tensor in enumerate(t for t in tensors if isinstance(t, T)):
            for change, apply in CHANGES.items():
                changed = apply(tensor)
                if changed is not None and (changed.shape, changed.dtype) != (tensor.shape, tensor.dtype):
                    yield Case(name, change, place)
