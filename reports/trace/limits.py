"""How much a trace may ask for before it is refused: a few bytes of gzip can hold gigabytes.

Memory follows the limits: columns of about 100 bytes an event, its text in pieces that are no longer than the
longest event and a block, and the names, each once.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from typing import Any

VARIABLE = "FSDPBENCH_TRACE_LIMITS"
"""Environment variable with limits as `analyze --limit` takes them, separated by commas."""

_LEAST = {"unpacked": 1, "depth": 4, "event": 4 << 20, "events": 1}
_MOST = 2**62
_WRITTEN = re.compile(r"([0-9]{1,19})\s*([kmgt]?i?b?)", re.IGNORECASE | re.ASCII)
_UNITS = {
    "": 1,
    "b": 1,
    **{f"{letter}b": 1000**power for power, letter in enumerate("kmgt", 1)},
    **{f"{letter}ib": 1024**power for power, letter in enumerate("kmgt", 1)},
}


@dataclass(frozen=True)
class TraceLimits:
    """Limits of one trace file.

    Args:
        unpacked: bytes of its JSON, unpacked; of a memory snapshot, of the file.
        depth: levels to which objects and lists nest (a usual trace has 6).
        event: bytes of one event, and of all that is beside the events.
        events: events of any kind, metadata included.
    """

    unpacked: int = 4 << 30
    depth: int = 200
    event: int = 16 << 20
    events: int = 10_000_000

    def __post_init__(self) -> None:
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if type(value) is not int or not least <= value <= _MOST:
                raise ValueError(f"limit {name}={value!r} must be a whole number from {least} to {_MOST}")

    def with_texts(self, texts: Iterable[str]) -> TraceLimits:
        """These limits with others instead of some, each given as `unpacked=16GB`.

        Raises:
            ValueError: in one line, an unknown name or an impossible value.
        """
        given: dict[str, Any] = {}
        known = [each.name for each in fields(self)]
        for text in texts:
            name, _, written = text.partition("=")
            if name.strip() not in known:
                raise ValueError(f"limit {text[:80]!r} must be NAME=VALUE, of a name in {', '.join(known)}")
            found = _WRITTEN.fullmatch(written.strip())
            unit = found and _UNITS.get(found[2].lower())
            if not found or not unit:
                raise ValueError(
                    f"limit {text[:80]!r} needs a whole number, such as 16000000000, 16GB or 16GiB"
                )
            given[name.strip()] = int(found[1]) * unit
        return replace(self, **given)

    @classmethod
    def from_environment(cls) -> TraceLimits:
        """The defaults, and what `FSDPBENCH_TRACE_LIMITS` says. Raises ValueError, in one line."""
        texts = [text for text in os.environ.get(VARIABLE, "").split(",") if text.strip()]
        try:
            return cls().with_texts(texts)
        except ValueError as error:
            raise ValueError(f"{VARIABLE}: {error}") from None

    def refusal(self, name: str, found: str) -> str:
        """What to say of a file that goes beyond the limit `name`: what was found, and how to raise it."""
        value = getattr(self, name)
        limit = f"{value:,}" if name in ("depth", "events") else told_bytes(value)
        return f"{found}, and the limit `{name}` is {limit} (raise it: --limit {name}=..., or {VARIABLE})"


def told_bytes(count: int) -> str:
    """`4 GiB`, `43.1 MB`: binary units where they are whole."""
    for power, (binary, decimal) in enumerate(
        (("KiB", "kB"), ("MiB", "MB"), ("GiB", "GB"), ("TiB", "TB")), 1
    ):
        last = power == 4 or count < 1000 ** (power + 1)
        if count >= 1000**power and last:
            exact = count % 1024**power == 0 and count // 1024**power
            return f"{exact} {binary}" if exact else f"{count / 1000**power:.1f} {decimal}"
    return f"{count} bytes"
