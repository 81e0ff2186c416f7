"""What an operator is called with, written as Kineto does with `record_shapes=True`.

    aten::mul(float32 [4, 8], 2)   "Concrete Inputs":["","2"],"Input type":["float","Scalar"],
                                   "Input Strides":[[8,1],[]],"Input Dims":[[4,8],[]]

The text is made once for each plan, and for each set of numbers that the plan does not depend on.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
import torch

from fsdpbench.sim.torch_device.strict.words import bind, cpp_type

_MOST_SCALARS = 30
"""Kineto leaves longer lists of numbers out."""
_NUMBERS: dict[Any, int] = {
    torch.uint8: 0, torch.int8: 1, torch.int16: 2, torch.int32: 3, torch.int64: 4, torch.float16: 5,
    torch.float32: 6, torch.float64: 7, torch.complex32: 8, torch.complex64: 9, torch.complex128: 10,
    torch.bool: 11, torch.bfloat16: 15, torch.float8_e5m2: 23, torch.float8_e4m3fn: 24, torch.uint16: 27,
    torch.uint32: 28, torch.uint64: 29, torch.float8_e8m0fnu: 44, torch.strided: 0,
    torch.contiguous_format: 0, torch.preserve_format: 1, torch.channels_last: 2, torch.channels_last_3d: 3,
}  # fmt: skip
"""Types, layouts and memory formats are numbers to C++."""
_WRAPPED = {int: "long int", float: "double", bool: "bool", complex: "c10::complex<double>"}
_SCALARS = tuple(_WRAPPED)
_MEMBERS = ("Concrete Inputs", "Input type", "Input Strides", "Input Dims")
_Input = tuple[str, str, Any, Any]
"""Value, type, strides, sizes."""
_OTHER: _Input = ("", "", [], [])


def call_text(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Members of the arguments of an operator's event: inputs in the schema's order, defaults included."""
    bound = bind(operator, args, dict(kwargs))
    types = [str(argument.type) for argument in operator._schema.arguments]
    return _text(map(_input, bound.values(), types))


def inputs_text(values: Iterable[Any]) -> str:
    """The same of values without a schema: a kernel's, or a collective's."""
    return _text(_input(value, "") for value in values)


def numbers_in(values: tuple[Any, ...]) -> tuple[Any, ...]:
    """The plain numbers among a call's arguments, which plans of pointwise operators do not depend on."""
    lists = [tuple(each) for each in values if isinstance(each, (list, tuple)) and each]
    numbers = [each for each in values if type(each) in _SCALARS]
    return (*numbers, *(each for each in lists if type(each[0]) in _SCALARS))


def _text(inputs: Iterable[_Input]) -> str:
    columns = [list(column) for column in zip(*inputs, strict=True)] or [[]] * len(_MEMBERS)
    return msgspec.json.encode(dict(zip(_MEMBERS, columns, strict=True)))[1:-1].decode()


def _input(value: Any, declared: str) -> _Input:
    if isinstance(value, torch.Tensor):
        return "", cpp_type(value), value.stride(), tuple(value.shape)
    if isinstance(value, (list, tuple)):
        return _list(value, declared)
    if isinstance(value, _SCALARS) or value in _NUMBERS:
        if "Tensor" in declared:  # torch gives kernels in Python the number of a tensor that wraps one
            return "", _WRAPPED[type(value)], [], []
        return _number(value), "Scalar", [], []
    return _OTHER


def _list(values: Sequence[Any], declared: str) -> _Input:
    if declared == "List[Tensor]" or (values and all(isinstance(value, torch.Tensor) for value in values)):
        if "Optional" in declared:
            return _OTHER
        return "", "TensorList", [v.stride() for v in values], [tuple(v.shape) for v in values]
    if (
        "Tensor" in declared
        or len(values) > _MOST_SCALARS
        or not all(isinstance(v, _SCALARS) for v in values)
    ):
        return _OTHER
    return f"[{', '.join(map(_number, values))}]", "ScalarList", [], []


def _number(value: Any) -> str:
    """As C++ prints it: `2`, `2.`, `0.10000000000000001`, `True`."""
    if isinstance(value, complex):
        return f"{_number(value.real)}+{_number(value.imag)}j"
    if not isinstance(value, float):
        return str(_NUMBERS.get(value, value) if not isinstance(value, (int, bool)) else value)
    text = f"{value:.17g}"
    return text if set(text) & set(".en") else text + "."
