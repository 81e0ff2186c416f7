"""Texts of torch's errors, and the names of calls and dtypes in them."""

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch

from fsdpbench.base.files.documents import table_beside, texts_beside

Arguments = dict[str, Any]
error_text = texts_beside(__file__, "errors.toml")
# C++ names of dtypes; errors use these, or c10's (`name_of`).
_CPP_TYPES = {getattr(torch, name): text for name, text in table_beside(__file__, "types.toml").items()}

# Running mean and variance, whose writes the schemas do not declare.
UNDECLARED_WRITES = dict.fromkeys(
    ("aten::native_batch_norm", "aten::cudnn_batch_norm", "aten::batch_norm_update_stats"),
    ("running_mean", "running_var"),
)


def bind(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Arguments:
    """Return a call's arguments by name, in the schema's order, including defaults."""
    arguments = operator._schema.arguments
    given = {each.name: value for each, value in zip(arguments, args, strict=False)}
    return given | {each.name: kwargs.get(each.name, each.default_value) for each in arguments[len(args) :]}


def packet_of(operator: Any) -> str:
    """Return an operator's name without namespace, overload and the in-place form's underscore."""
    namespace, _, name = str(operator._schema.name).partition("::")
    if namespace != "aten":
        return ""
    return name[:-1] if name.endswith("_") and not name.endswith("__") else name


def scalar_type(tensor: torch.Tensor) -> str:
    """Return a tensor's dtype as `Float`, `BFloat16`, ..."""
    return name_of(tensor.dtype)


@cache
def name_of(dtype: torch.dtype) -> str:
    """Return a dtype as `Float`, `BFloat16`, ..."""
    return torch.empty(0, dtype=dtype, device="cpu").type().removeprefix("torch.").removesuffix("Tensor")


def cpp_type(tensor: torch.Tensor) -> str:
    """Return a tensor's C++ type: `float`, `c10::BFloat16`, ..."""
    return _CPP_TYPES.get(tensor.dtype) or f"c10::{scalar_type(tensor)}"


def legacy_type(tensor: torch.Tensor) -> str:
    """Return `torch.cuda.FloatTensor`, or `torch.FloatTensor` for a host tensor."""
    device = tensor.device
    place = "" if device.type == "cpu" else f"{device.type}."
    return f"torch.{place}{scalar_type(tensor)}Tensor"


def refuse_broadcast(first: Sequence[int], second: Sequence[int]) -> None:
    """Raise torch's error for shapes that cannot be broadcast together."""
    count = max(len(first), len(second))
    for back in range(1, min(len(first), len(second)) + 1):
        a, b = first[-back], second[-back]
        if a != b and a != 1 and b != 1:
            raise RuntimeError(error_text("broadcast", a, b, count - back))


def sizes(tensor: torch.Tensor) -> str:
    """Return a tensor's shape as `[2, 3]`."""
    return str(list(tensor.shape))
