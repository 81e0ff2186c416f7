"""What the gate reads of a result besides its figures, checked: how it ended, and what it belongs to."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from fsdpbench.check.records.strict import strictly
from fsdpbench.results.records import Status


class _Environment(msgspec.Struct, frozen=True):
    versions: dict[str, Any] | None = None
    machine: dict[str, Any] | None = None
    variables: dict[str, Any] | None = None


class _Config(msgspec.Struct, frozen=True):
    shape: dict[str, Any] | None = None


class _SeenResult(msgspec.Struct, frozen=True):
    status: Status
    device: str
    schema: Literal[1] = 1
    config: _Config | None = None
    hardware: dict[str, Any] | None = None
    environment: _Environment | None = None


def checked_result(content: Any) -> dict[str, Any]:
    """`content`, if it is a result. Raises `UsageError` saying where and what it is not."""
    strictly(content, _SeenResult, "its result")
    result: dict[str, Any] = content
    return result
