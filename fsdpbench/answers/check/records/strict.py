"""Committed files as typed structs: unknown keys are refused with the nearest names."""

from __future__ import annotations

import difflib
import enum
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar

import msgspec

from fsdpbench.base.errors import UsageError
from fsdpbench.base.files.documents import converted
from fsdpbench.base.reading import one_line

T = TypeVar("T")
Part = tuple[str, object, Any]
"""Where it stands, what is there, and the type that it should have."""

_LONGEST_SHOWN = 60
_NEAR = 3


def strictly(content: object, kind: type[T], origin: str) -> T:
    """Return `content` as a struct `kind`. Raises `UsageError` with `origin`, key and what it must be."""
    # Ahead of the conversion, which stops at an unknown key and offers no name.
    _refuse_unknown(("", content, kind), origin)
    try:
        return converted(content, kind)
    except msgspec.ValidationError:
        where, value, wanted = _culprit(("", content, kind))
        shown = one_line(repr(value), _LONGEST_SHOWN)
        raise UsageError(f"{origin}: {where or 'it'} must be {_words(wanted)}, not {shown}") from None


def check_names(names: Iterable[str], known: Iterable[str], origin: str, where: str, what: str) -> None:
    """Raise `UsageError` for the first of `names` that is not `known`, with the nearest that are."""
    known = list(known)
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name[:_LONGEST_SHOWN], known, n=_NEAR, cutoff=0.4)
            offer = f"did you mean {' or '.join(near)}?" if near else f"known: {', '.join(known)}"
            raise UsageError(f"{origin}: {_below(where, name)} is not a {what}; {offer}")


def _refuse_unknown(part: Part, origin: str) -> None:
    where, value, kind = part
    if isinstance(value, Mapping) and _is_struct(kind) and kind.__struct_config__.forbid_unknown_fields:
        fields = [field.encode_name for field in msgspec.structs.fields(kind)]
        check_names(value, fields, origin, where, "key")
    for inner in _parts(part):
        _refuse_unknown(inner, origin)


def _culprit(part: Part) -> Part:
    """Return the innermost part that has not its type; a missing key is its object's fault."""
    for inner in _parts(part):
        try:
            converted(inner[1], inner[2])
        except msgspec.ValidationError:
            return _culprit(inner)
    return part


def _parts(part: Part) -> Iterator[Part]:
    where, value, kind = part
    if isinstance(value, Mapping) and _is_struct(kind):
        types_of = {field.encode_name: _without_none(field.type) for field in msgspec.structs.fields(kind)}
        yield from ((_below(where, name), value[name], types_of[name]) for name in value if name in types_of)
    elif isinstance(value, Mapping) and typing.get_origin(kind) is dict:
        inner = typing.get_args(kind)[1]
        yield from ((_below(where, name), item, inner) for name, item in value.items())
    elif isinstance(value, list) and typing.get_origin(kind) is list:
        (inner,) = typing.get_args(kind)
        yield from ((f"{where}[{index}]", item, inner) for index, item in enumerate(value))


def _is_struct(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct)


def _without_none(kind: Any) -> Any:
    if isinstance(kind, types.UnionType) and types.NoneType in typing.get_args(kind):
        return next(inner for inner in typing.get_args(kind) if inner is not types.NoneType)
    return kind


def _words(kind: Any) -> str:
    """Return a type as people say it."""
    if typing.get_origin(kind) is typing.Annotated:
        _, meta = typing.get_args(kind)
        pairs = (meta.ge, meta.gt), (meta.le, meta.lt)
        low, high = (next((limit for limit in pair if limit is not None), None) for pair in pairs)
        return f"a number from {low:g}" + (f" up to {high:g}" if high is not None else " up")
    if typing.get_origin(kind) is typing.Literal:
        return " or ".join(map(str, typing.get_args(kind)))
    if _is_struct(kind):
        needed = [field.encode_name for field in msgspec.structs.fields(kind) if field.required]
        return f"a table with {', '.join(needed)}" if needed else "a table"
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return f"one of {', '.join(str(each.value) for each in kind)}"
    plain = {dict: "a table", list: "a list", str: "text", int: "a whole number", float: "a number"}
    return plain.get(typing.get_origin(kind) or kind, str(kind))


def _below(where: str, name: str) -> str:
    shown = one_line(name, _LONGEST_SHOWN)
    return f"{where}.{shown}" if where else shown
