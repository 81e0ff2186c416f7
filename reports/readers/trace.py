"""A decoded trace: integer columns with one row per event; and the limits on a file's demands.

A Kineto trace of one rank has about a hundred thousand to some millions of events.  One object per event
would cost gigabytes, so an event is a row of numpy columns, and names are indices into `Trace.names`.
All times are integer nanoseconds on the trace's own clock."""

import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields, replace
from enum import IntEnum
from functools import reduce
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar

import numpy as np
import numpy.typing as npt

from fsdpbench.base.errors import UsageError, error_text
from fsdpbench.base.files.documents import table_beside
from fsdpbench.base.reading import JsonObject

Int64 = npt.NDArray[np.int64]
Int32 = npt.NDArray[np.int32]
Int8 = npt.NDArray[np.int8]
Float64 = npt.NDArray[np.float64]
Bool = npt.NDArray[np.bool_]

T = TypeVar("T")

MISSING = -1
"""Value for "the event does not say" in the columns correlation, stream and device."""


class TraceError(UsageError):
    """Raised for a file that cannot be read as a trace: `path`, and the `reason` in one line."""

    def __init__(self, path: Path | str, reason: str) -> None:
        super().__init__(f"{path}: {reason}")
        self.path = Path(path)
        self.reason = reason


class Category(IntEnum):
    """The kinds of events that the analysis uses; others (flows, Python frames except those of modules) are
    not kept."""

    CPU_OP = 1
    USER_ANNOTATION = 2
    GPU_USER_ANNOTATION = 3
    RUNTIME = 4
    KERNEL = 5
    MEMCPY = 6
    MEMSET = 7
    SYNC = 8
    MODULE = 9


class Columns:
    """A dataclass of arrays of equal length, one row per event."""

    def __len__(self) -> int:
        return len(self.columns()[0])

    def columns(self) -> tuple[Any, ...]:
        """Return the arrays, in the order of their declaration."""
        return tuple(getattr(self, each.name) for each in fields(self))  # type: ignore[arg-type]

    def select(self, rows: Bool | Int64) -> Self:
        """Return the rows of a mask or of an index array, in its order."""
        return type(self)(*(column[rows] for column in self.columns()))


@dataclass(frozen=True, eq=False)
class Events(Columns):
    """Complete events as columns of equal length.

    start, duration: int64, ns.  category: int8, `Category`.  name: int32, index into `Trace.names`.
    lane: int32, index into `Trace.lanes`.  correlation: int64.  stream, device: int32.
    """

    DTYPES: ClassVar = (np.int64, np.int64, np.int8, np.int32, np.int32, np.int64, np.int32, np.int32)

    start: Int64
    duration: Int64
    category: Int8
    name: Int32
    lane: Int32
    correlation: Int64
    stream: Int32
    device: Int32

    @property
    def end(self) -> Int64:
        """Return the ends, int64 ns."""
        return self.start + self.duration

    def ends(self, rows: Int64) -> Int64:
        """Return the ends of these rows, which is faster than selecting from all ends."""
        return self.start[rows] + self.duration[rows]


def of_categories(category: Int8, chosen: Iterable[Category]) -> Bool:
    """Return a mask of a column's rows of the `chosen` categories. For few, it is faster than `np.isin`."""
    return reduce(np.bitwise_or, (category == int(each) for each in chosen))


@dataclass(frozen=True)
class CollectiveInfo:
    """The profiler's metadata of one collective (elements of one rank, as NCCL counts them).

    group_ranks: the list of the group's ranks as text, shortened for large groups.
    """

    name: str
    in_elements: int | None
    out_elements: int | None
    dtype: str | None
    group_size: int | None
    group_name: str | None
    group_ranks: str | None = None


@dataclass(frozen=True)
class OperatorCall:
    """The inputs of an operator's call (`record_shapes`): of each its sizes (empty if it is not a tensor, or
    has no dimension), its type and, for a plain value, its text; all as in the file. strides: of each input,
    as far as they are known.  moved: bytes, if a fused kernel states them.  lists: sizes in each list of
    tensors.
    """

    sizes: tuple[tuple[int, ...], ...]
    types: tuple[str, ...]
    values: tuple[str, ...]
    strides: tuple[tuple[int, ...], ...] = ()
    moved: int | None = None
    lists: tuple[tuple[tuple[int, ...], ...], ...] = ()


@dataclass(frozen=True, eq=False)
class Calls:
    """Inputs of calls. rows: int64, of the operators' events.  number: int32, into the distinct `inputs`."""

    rows: Int64
    number: Int32
    inputs: tuple[OperatorCall, ...]

    def by_row(self) -> dict[int, OperatorCall]:
        """Return the inputs by row, in the order of the file; this takes 70 bytes per call."""
        numbers = self.number.tolist()
        return dict(zip(self.rows.tolist(), map(self.inputs.__getitem__, numbers), strict=True))


@dataclass(frozen=True, eq=False)
class MemoryEvents(Columns):
    """Allocations and frees: int64 columns time (ns), bytes (signed), allocated and reserved (totals after
    the event), address, device_type (0 CPU, 1 CUDA, 20 PrivateUse1), device_id, active (the total including
    blocks that other streams still use; usually MISSING: only simulated traces have it)."""

    time: Int64
    bytes: Int64
    allocated: Int64
    reserved: Int64
    address: Int64
    device_type: Int64
    device_id: Int64
    active: Int64


@dataclass(frozen=True, eq=False)
class RetryEvents(Columns):
    """Allocator retries: int64 columns time (ns), bytes requested, bytes freed by the retry."""

    time: Int64
    bytes: Int64
    freed: Int64


@dataclass(frozen=True, eq=False)
class EventColumns:
    """All of a trace that comes from its list of events.

    `collectives` maps a row of `events` to its metadata; `calls`: of operators whose cost follows from their
    shapes (`is_shaped`); `lanes`: (pid, tid) as in the file.  Findings
    of the decoder, one line each: `problems` are missing data or contradictions that may affect figures,
    `remarks` are harmless.
    """

    events: Events
    names: tuple[str, ...]
    lanes: tuple[tuple[int | str, int | str], ...]
    collectives: dict[int, CollectiveInfo]
    calls: Calls
    memory: MemoryEvents
    retries: RetryEvents
    problems: tuple[str, ...]
    remarks: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class Trace(EventColumns):
    """One rank's trace; `simulated` is the file's "fsdpbench" object or None."""

    path: Path
    rank: int | None
    world_size: int | None
    backend: str | None
    devices: tuple[JsonObject, ...]
    simulated: JsonObject | None

    def rows(self, *categories: Category) -> Int64:
        """Return row numbers of the events of these categories, in the file's order."""
        return np.flatnonzero(of_categories(self.events.category, categories))

    def names_that(self, test: Callable[[str], object]) -> Bool:
        """Return a mask of the `names` that pass `test`. A trace has some hundred names, each tested once."""
        return np.fromiter((bool(test(name)) for name in self.names), np.bool_, len(self.names))

    def rows_named(self, test: Callable[[str], object], *categories: Category) -> Int64:
        """Return row numbers of the events of these categories whose name passes `test`, in file order."""
        rows = self.rows(*categories)
        return rows[self.names_that(test)[self.events.name[rows]]]

    def parsed_annotations(self, parse: Callable[[str], T | None]) -> Iterator[tuple[T, int, int, int]]:
        """Yield (what `parse` returns for the name, start ns, end ns, lane) of annotations, by their start.

        Each name is parsed once; annotations for which `parse` returns None are left out.
        """
        found = {number: each for number, name in enumerate(self.names) if (each := parse(name)) is not None}
        events, rows = self.events, self.rows(Category.USER_ANNOTATION)
        rows = self.by_start(rows[np.isin(events.name[rows], np.fromiter(found, np.int64, len(found)))])
        columns = (events.name[rows], events.start[rows], events.ends(rows), events.lane[rows])
        for name, *place in zip(*(column.tolist() for column in columns), strict=True):
            yield found[name], *place

    def by_start(self, rows: Int64) -> Int64:
        """Return these rows sorted by their events' start; events that start together keep their order."""
        return rows[np.argsort(self.events.start[rows], kind="stable")]

    def name_of(self, row: int) -> str:
        """Return the name of the event in this row."""
        return self.names[int(self.events.name[row])]


# Traces beyond these limits are refused: a few bytes of gzip can expand to gigabytes.
# Memory follows the limits: about 100 bytes of columns per event, text in pieces no longer than the longest
# event and a block, and each name once.

VARIABLE = "FSDPBENCH_TRACE_LIMITS"
"""Environment variable with limits in the form of `analyze --limit`, separated by commas."""

_LEAST = {"unpacked": 1, "depth": 4, "event": 4 << 20, "events": 1}
_MOST = 2**62
_WRITTEN = re.compile(r"([0-9]{1,19})\s*([kmgt]?i?b?)", re.IGNORECASE | re.ASCII)
_UNITS = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgt", 1):
    _UNITS |= {f"{_letter}b": 1000**_power, f"{_letter}ib": 1024**_power}


@dataclass(frozen=True)
class TraceLimits:
    """Limits of one trace file.

    Args:
        unpacked: bytes of its JSON, unpacked; for a memory snapshot, of the file.
        depth: nesting levels of objects and lists (a usual trace has 6).
        event: bytes of one event, and of everything beside the events.
        events: number of events of any kind, metadata included.
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

    def with_texts(self, texts: Iterable[str]) -> "TraceLimits":
        """Return these limits with some replaced, each given as `unpacked=16GB`.

        Raises:
            ValueError: in one line, an unknown name or an impossible value.
        """
        given: dict[str, int] = {}
        known = [each.name for each in fields(self)]
        for text in texts:
            name, _, written = text.partition("=")
            if name.strip() not in known:
                raise ValueError(f"limit {text[:80]!r} must be NAME=VALUE, of a name in {', '.join(known)}")
            found = _WRITTEN.fullmatch(written.strip())
            unit = found and _UNITS.get(found[2].lower())
            if not found or not unit:
                raise ValueError(error_text("trace.limit", text[:80]))
            given[name.strip()] = int(found[1]) * unit
        return replace(self, **given)

    @classmethod
    def from_environment(cls) -> "TraceLimits":
        """Return the defaults, changed by `FSDPBENCH_TRACE_LIMITS`. Raises ValueError, in one line."""
        texts = [text for text in os.environ.get(VARIABLE, "").split(",") if text.strip()]
        try:
            return cls().with_texts(texts)
        except ValueError as error:
            raise ValueError(f"{VARIABLE}: {error}") from None

    def refusal(self, name: str, found: str) -> str:
        """Return why a file beyond the limit `name` is refused: what was `found`, how to raise the limit."""
        value = getattr(self, name)
        limit = f"{value:,}" if name in ("depth", "events") else bytes_text(value)
        return f"{found}, and the limit `{name}` is {limit} (raise it: --limit {name}=..., or {VARIABLE})"


def bytes_text(count: int) -> str:
    """Return bytes as text, `4 GiB`, `43.1 MB`: with a binary unit if the number is then whole."""
    for power, (binary, decimal) in enumerate(
        (("KiB", "kB"), ("MiB", "MB"), ("GiB", "GB"), ("TiB", "TB")), 1
    ):
        last = power == 4 or count < 1000 ** (power + 1)
        if count >= 1000**power and last:
            exact = count % 1024**power == 0 and count // 1024**power
            return f"{exact} {binary}" if exact else f"{count / 1000**power:.1f} {decimal}"
    return f"{count} bytes"


_NAMES = table_beside(__file__, "names.toml")
_SIZES = {name: int(size) for size, names in _NAMES["bytes"].items() for name in names}


def dtype_bytes(dtype: str | None) -> int | None:
    """Return the bytes of an element of "BFloat16", "Float", "torch.float32", ...; None if unknown."""
    if dtype is None:
        return None
    name = dtype.lower().removeprefix("torch.").removeprefix("c10::")
    if name.startswith("float8") or name == "float4_e2m1fn_x2":  # two values per byte; an element is a byte
        return 1
    return _SIZES.get(name)


def dtype_from_input_type(input_type: str) -> str | None:
    """Return the profiler's name of a dtype for a C++ type ("c10::BFloat16" -> "BFloat16")."""
    return _NAMES["from_cpp"].get(input_type.lower())


OPERATORS = _NAMES["operators"]
"""Operators whose shapes are read, by kind."""

# Categories of the profiler's events.
_IGNORED = frozenset(_NAMES["categories"].pop("ignored"))
"""Other categories of Kineto, which the analysis does not need."""
CATEGORIES = {name: Category[kind] for kind, names in _NAMES["categories"].items() for name in names}
"""Categories by their names in a trace."""

# Accelerators whose work Kineto writes under their own categories, none of them "kernel".
_ACCELERATOR = re.compile(
    r"^(mtia|hpu|glow|xla|tpu|npu|ascend|neuron|musa|mlu|ipu|vulkan|mps|metal|gcu|dlc|sdaa|supa)([_ ]|$)",
    re.I,
)
_MODULE = "nn.Module: "


def is_module(category: str, name: str) -> bool:
    """Return whether an event is the frame of a module's call (`with_modules`, `with_stack`)."""
    return category == "python_function" and name.startswith(_MODULE)


def unknown_categories(found: Counter[str], on_device: bool) -> tuple[list[str], list[str]]:
    """Return lines about the categories of complete events: problems, which make a trace untrusted, and
    remarks, which do not. `on_device`: there are also kernels or copies."""
    unknown = {name: count for name, count in found.items() if name not in _IGNORED}
    accelerators = {name: count for name, count in unknown.items() if _ACCELERATOR.match(name)}
    others = {name: count for name, count in unknown.items() if name not in accelerators}
    problems = []
    if accelerators:
        problems.append(error_text("trace.accelerator", _listed(accelerators)))
    if not others:
        return problems, []
    text = f"events of categories that are not known do not count: {_listed(others)}"
    if on_device or accelerators:
        return problems, [text]
    # No other event shows what a device did: these may be its work.
    return [f"{text}; if they are a device's work, the figures lack it"], []


def _listed(counts: dict[str, int]) -> str:
    some = ", ".join(f"{name[:40]!r} ({counts[name]})" for name in sorted(counts)[:5])
    return some + (f" and {len(counts) - 5} more" if len(counts) > 5 else "")
