"""Allocator settings in the format of `PYTORCH_CUDA_ALLOC_CONF`, and costs of its driver calls."""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass

from fsdpbench.base.errors import error_text
from fsdpbench.base.files.documents import table_beside
from fsdpbench.base.numbers import finite_number, whole_number

MIB = 1 << 20
UNLIMITED = (1 << 63) - 1
CONF_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
# One entry per power of two of the size in MiB: 1 and below, 2, 4, ..., 32768 and above.
POWER2_INTERVALS = 16
_SETTINGS = table_beside(__file__, "conf.toml")


def conf_in(variables: Mapping[str, str]) -> str:
    """Return the allocator settings in environment variables, as torch reads them, or an empty string."""
    return next((variables[name] for name in CONF_VARIABLES if variables.get(name)), "")


class AllocatorConfError(ValueError):
    """An unknown allocator setting, or an invalid value."""


@dataclass(frozen=True)
class AllocatorCosts:
    """Host time of the allocator's driver calls, in nanoseconds (and nanoseconds per GiB)."""

    malloc_ns: int = 250_000
    malloc_ns_per_gib: int = 0
    free_ns: int = 250_000
    free_ns_per_gib: int = 0
    event_ns: int = 1_000

    def __post_init__(self) -> None:
        for name in ("malloc_ns", "malloc_ns_per_gib", "free_ns", "free_ns_per_gib", "event_ns"):
            if getattr(self, name) < 0:
                raise AllocatorConfError(f"{name} = {getattr(self, name)}: must not be negative")


@dataclass(frozen=True)
class AllocatorConf:
    """Settings of the caching allocator; the defaults are torch's.

    `roundup_power2_divisions` is empty (off) or has one number of divisions per power of two of the size,
    from 1 MiB and below to 32 GiB and above. As in torch, garbage collection works only if
    `per_process_memory_fraction` is set.
    """

    max_split_bytes: int = UNLIMITED
    max_non_split_rounding_bytes: int = 20 * MIB
    garbage_collection_threshold: float = 0.0
    roundup_power2_divisions: tuple[int, ...] = ()
    expandable_segments: bool = False
    per_process_memory_fraction: float | None = None

    def __post_init__(self) -> None:
        if self.max_split_bytes <= 20 * MIB:
            raise AllocatorConfError(f"max_split_size_mb: {self.max_split_bytes // MIB} must be above 20")
        if self.max_non_split_rounding_bytes < 20 * MIB:
            raise AllocatorConfError(error_text("conf.rounding", self.max_non_split_rounding_bytes // MIB))
        if not 0.0 <= self.garbage_collection_threshold < 1.0:
            raise AllocatorConfError(error_text("conf.collection", self.garbage_collection_threshold))
        if len(self.roundup_power2_divisions) not in (0, POWER2_INTERVALS):
            raise AllocatorConfError(f"roundup_power2_divisions: needs {POWER2_INTERVALS} entries or none")
        for divisions in self.roundup_power2_divisions:
            if divisions < 0 or divisions & (divisions - 1):
                raise AllocatorConfError(error_text("conf.divisions", divisions))
        fraction = self.per_process_memory_fraction
        if fraction is not None and not 0.0 < fraction <= 1.0:
            raise AllocatorConfError(f"per_process_memory_fraction: {fraction} must be in (0, 1]")

    @classmethod
    def parse(cls, text: str) -> "AllocatorConf":
        """Parse ``key:value,key:[a:b,c:d]``, the format of the environment variable.

        Raises `AllocatorConfError` for an unknown key (and suggests the nearest) or an invalid value.
        """
        values: dict[str, object] = {}
        for key, value in _pairs(text):
            if key in _SETTINGS["without_effect"]:
                continue
            try:
                name, parsed = _parse_value(key, value)
            except ValueError as error:
                if isinstance(error, AllocatorConfError):
                    raise
                raise AllocatorConfError(f"{key:.80}:{value:.80}: {error}") from None
            values[name] = parsed
        return cls(**values)  # type: ignore[arg-type]


def _pairs(text: str) -> list[tuple[str, str]]:
    """Split at commas outside brackets, then at the first colon."""
    parts, depth, start = [], 0, 0
    for index, char in enumerate(text):
        if char in "[]":
            depth += 1 if char == "[" else -1
        elif char == "," and depth == 0:
            parts.append(text[start:index])
            start = index + 1
    if depth != 0:
        raise AllocatorConfError(f"{text!r:.80}: brackets do not match")
    pairs = []
    for part in [*parts, text[start:]]:
        if not part.strip():
            continue
        key, colon, value = part.partition(":")
        if not colon:
            raise AllocatorConfError(f"{part.strip()!r:.80}: expected key:value")
        pairs.append((key.strip(), value.strip()))
    return pairs


def _parse_value(key: str, value: str) -> tuple[str, object]:
    if key == "max_split_size_mb":
        return "max_split_bytes", whole_number(value) * MIB
    if key == "max_non_split_rounding_mb":
        return "max_non_split_rounding_bytes", whole_number(value) * MIB
    if key in ("garbage_collection_threshold", "per_process_memory_fraction"):
        return key, finite_number(value)
    if key == "expandable_segments":
        if value not in ("True", "False"):
            raise AllocatorConfError(f"expandable_segments:{value:.80}: must be True or False")
        return key, value == "True"
    if key == "roundup_power2_divisions":
        return key, _parse_divisions(value)
    near = difflib.get_close_matches(key, _SETTINGS["known"], n=1)
    hint = f"; did you mean {near[0]}?" if near else f"; known are {', '.join(_SETTINGS['known'])}"
    raise AllocatorConfError(f"unknown allocator setting {key!r:.80}{hint}")


def _parse_divisions(value: str) -> tuple[int, ...]:
    """Parse `4` (all sizes) or `[256:1,512:2,>:8]`: divisions by power of two in MiB, `>` for the rest."""
    if not value.startswith("["):
        return (whole_number(value),) * POWER2_INTERVALS
    table = [0] * POWER2_INTERVALS
    last = -1
    for number, item in enumerate(value.strip("[]").split(",")):
        bound, _, divisions = item.partition(":")
        if bound.strip() == ">":
            table[last + 1 :] = [whole_number(divisions)] * (POWER2_INTERVALS - last - 1)
            continue
        last = min(max(whole_number(bound).bit_length() - 1, 0), POWER2_INTERVALS - 1)
        if number == 0:
            table[:last] = [whole_number(divisions)] * last
        table[last] = whole_number(divisions)
    return tuple(table)
