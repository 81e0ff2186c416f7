"""Workloads that are a name and one shape: what every family shares of that."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, ClassVar, Generic, Self, TypeVar

from fsdpbench.workloads.shape import make_shape

S = TypeVar("S")


class Shaped(Generic[S]):
    """Holds name and shape, a dataclass of type `shape_type`; stands before `Workload` among the bases."""

    shape_type: ClassVar[type]

    def __init__(self, name: str, shape: S) -> None:
        self.name = name
        self._shape = shape

    @classmethod
    def from_values(cls, name: str, values: Mapping[str, Any]) -> Self:
        """Raises: ShapeError, a field is unknown, missing or impossible."""
        return cls(name, make_shape(cls.shape_type, values))

    @property
    def shape(self) -> dict[str, Any]:
        """All fields of the shape, which are plain values (`asdict` would copy each)."""
        return {each.name: getattr(self._shape, each.name) for each in fields(self._shape)}  # type: ignore[arg-type]
