"""Sizes of element types by the names that profilers give them."""

from __future__ import annotations

_SIZES = {
    "bfloat16": 2,
    "bf16": 2,
    "half": 2,
    "float16": 2,
    "fp16": 2,
    "float": 4,
    "float32": 4,
    "fp32": 4,
    "double": 8,
    "float64": 8,
    "byte": 1,
    "uint8": 1,
    "char": 1,
    "int8": 1,
    "short": 2,
    "int16": 2,
    "int": 4,
    "int32": 4,
    "long": 8,
    "int64": 8,
    "bool": 1,
    "complexfloat": 8,
    "complexdouble": 16,
}

_FROM_C_TYPE = {
    "c10::bfloat16": "BFloat16",
    "c10::half": "Half",
    "float": "Float",
    "double": "Double",
    "long int": "Long",
    "long": "Long",
    "int": "Int",
    "unsigned char": "Byte",
    "signed char": "Char",
    "bool": "Bool",
}


def dtype_bytes(dtype: str | None) -> int | None:
    """Bytes an element of "BFloat16", "Float", "torch.float32", ...; None when the name is not known."""
    if dtype is None:
        return None
    name = dtype.lower().removeprefix("torch.").removeprefix("c10::")
    if name.startswith("float8") or name == "float4_e2m1fn_x2":  # two in a byte, which is an element
        return 1
    return _SIZES.get(name)


def dtype_from_input_type(input_type: str) -> str | None:
    """The profiler's name of a dtype from the C++ type in "Input type" ("c10::BFloat16" -> "BFloat16")."""
    return _FROM_C_TYPE.get(input_type.lower())
