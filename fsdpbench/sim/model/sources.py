"""Where each constant of a profile comes from: its source, and whether anybody measured it.

A packaged profile says for every key of its own file where the figure comes from: `[sources]` names the key
or a section above it, or `estimated` does. A test refuses a packaged file that does not.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_NOT_FIGURES = frozenset(
    ("base", "name", "title", "source", "gpus_per_node", "runs_use", "estimated", "sources", "libraries")
)


@dataclass(frozen=True)
class Constant:
    """One figure of a profile's file. ``source``: that of the key or the nearest section above it; of an
    estimate only what is stated of it itself."""

    key: str
    value: Any
    source: str | None
    estimated: bool


def constants(table: Mapping[str, Any]) -> list[Constant]:
    """The figures that one profile's file gives itself (``table``: as TOML has it), in its order.

    Tables of libraries have one source each, which their section cannot be without.
    """
    sources: Mapping[str, str] = table.get("sources", {})
    estimated: Sequence[str] = table.get("estimated", ())
    figures = {name: value for name, value in table.items() if name not in _NOT_FIGURES}
    return [_constant(key, value, sources, estimated) for key, value in _leaves(figures, "")]


def unsourced(table: Mapping[str, Any]) -> list[str]:
    """Keys of the file that have neither a source nor a place in `estimated`."""
    return [found.key for found in constants(table) if found.source is None and not found.estimated]


def _constant(key: str, value: Any, sources: Mapping[str, str], estimated: Sequence[str]) -> Constant:
    source, estimate = _nearest(key, sources), _nearest(key, estimated)
    # The source of a whole section is not that of a key in it which is called an estimate.
    own = source is not None and (estimate is None or len(source) >= len(estimate))
    return Constant(key, value, sources[source] if source and own else None, estimate is not None)


def _leaves(table: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in table.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _nearest(key: str, told: Container[str]) -> str | None:
    """``key`` or the nearest section above it of which something is told."""
    while key and key not in told:
        key = key.rpartition(".")[0]
    return key or None
