"""Typed content of the two files of a configuration's folder: `result.json` and `config.json`.

This module needs neither torch nor the bench, so pages and the bench read the same type. Old files lack
keys; newer files and plugins add some. A missing key is None. Keys without a field stay in `content`, which
is written back. Fields are in the order of the file; of `config.json` only the fields that the page shows
are typed.
"""

from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any, Self, TypeVar

import msgspec

from fsdpbench.base import reading
from fsdpbench.base.files.documents import converted, to_json
from fsdpbench.base.result_sections import MemoryAccount, ObservedScript, PlaceholderDecision, ScriptReport

Span = tuple[int | float, int | float]
"""The low and the high end of an interval."""


class Status(StrEnum):
    """The outcome of a rank or a configuration (`not_applicable`: only the latter). `race`: the sanitizer
    found a race; `rank_mismatch`: a script's ranks call different collectives. Both keep their figures."""

    OK = "ok"
    OOM = "oom"
    TIMEOUT = "timeout"
    ERROR = "error"
    CRASH = "crash"
    RACE = "race"
    RANK_MISMATCH = "rank_mismatch"
    NOT_APPLICABLE = "not_applicable"

    @property
    def is_answer(self) -> bool:
        """Whether the run answers the question (ok, out of memory, not applicable), rather than failing."""
        return self in (Status.OK, Status.OOM, Status.NOT_APPLICABLE)


class Cause(msgspec.Struct, frozen=True):
    """The reason why a configuration has no figures: one line, and the log with more details."""

    message: str | None = None
    log: str | None = None
    error: str | None = None
    """`message` as early versions named it; so is `line`."""
    line: str | None = None

    @property
    def words(self) -> str | None:
        """The reason, in one line."""
        return self.message or self.error or self.line


class Bench(msgspec.Struct, frozen=True):
    """The run itself: its start (ISO 8601), its duration (seconds), and its script's data loader."""

    started: str | None = None
    duration_s: float = 0.0
    cpu_s: float | None = None
    loader: dict[str, float] | None = None


class Collective(msgspec.Struct, frozen=True):
    """The collectives of one kind in a mean step: calls, bytes, seconds, bytes a second."""

    count: float | None = None
    bytes: float | None = None
    wire_bytes: float | None = None
    time_s: float | None = None
    exposed_s: float | None = None
    bus_bandwidth_bytes_per_s: float | None = None
    best_bus_bandwidth_bytes_per_s: float | None = None
    roof_bus_bandwidth_bytes_per_s: float | None = None
    roof_share: float | None = None


class PeakMemory(msgspec.Struct, frozen=True):
    """Peaks over steps and ranks, bytes."""

    allocated: float | None = None
    active: float | None = None
    reserved: float | None = None


class StepParts(msgspec.Struct, frozen=True):
    """The traced step's four parts, seconds; they sum to the traced step."""

    compute_only: float
    overlapped: float
    exposed_communication: float
    idle: float


class Measured(msgspec.Struct, frozen=True):
    """The samples of one run's step time: seconds, and shares of the median or of the untraced step."""

    step_times_s: list[float] = []
    spread: float | None = None
    warmup_times_s: list[float] = []
    warmup_stable: bool | None = None
    profiler_overhead: float | None = None


WIDE = 0.35
"""Half width of an interval, as a share of its middle, from which it is too asymmetric for a ±."""


class Interval(msgspec.Struct, frozen=True):
    """Intervals of simulated figures, each [low, high]; each holds the real value with probability `level`.

    `because`: why it is wider than for known runs. `risky`: memory fits only within the prediction's error,
    or the allocator retries. For differences: `apart`, the share below which two steps count as equal;
    `shared`, half widths without and with the part due to settings that no published run has; `link`, |ln| of
    how much shorter and longer the host link may make the step; `work`, the share of the step in kernels.
    """

    level: float
    step_time_s: Span
    samples_per_s_per_gpu: Span | None = None
    tokens_per_s_per_gpu: Span | None = None
    tflops_per_gpu: Span | None = None
    hardware_tflops_per_gpu: Span | None = None
    mfu: Span | None = None
    hfu: Span | None = None
    peak_memory_bytes: dict[str, Span] = {}
    risky: bool = False
    because: list[str] = []
    runs: int = 0
    apart: float = 0.0
    shared: Span | None = None
    link: Span = (0.0, 0.0)
    work: float | None = None

    @property
    def half_width(self) -> float:
        """Half the interval of the step time, as a share of its middle."""
        low, high = self.step_time_s
        return (high - low) / (high + low) if high + low > 0 else 0.0


class Repeats(msgspec.Struct, frozen=True):
    """Runs of a configuration: step times and samples (seconds), spread of steps (quartiles / median)."""

    runs: int = 1
    failed: int = 0
    step_time_s: list[float] = []
    spread: float | None = None
    samples_s: list[list[float]] = []


class Access(msgspec.Struct, frozen=True):
    """One of two unordered accesses to the same memory."""

    operation: str = ""
    access: str = ""
    stream: str = ""
    unit: str | None = None
    phase: str = ""
    step: int = 0
    line: str = ""
    stack: list[str] = []
    forward_line: str | None = None
    forward_stack: list[str] = []


class RaceFinding(msgspec.Struct, frozen=True):
    """A finding of the sanitizer: two accesses to the same bytes, how often, and the usual fix."""

    kind: str
    first: Access
    second: Access
    count: int = 1
    bytes: int = 0
    role: str = ""
    hint: str = ""


class Hint(msgspec.Struct, frozen=True):
    """A hint of the sanitizer that is not a race."""

    kind: str
    hint: str = ""
    count: int = 1
    stack: list[str] = []


class SanitizerReport(msgspec.Struct, frozen=True):
    """The sanitizer's findings; `counts` by kind, repetitions included."""

    accesses: int = 0
    counts: dict[str, int] = {}
    findings: list[RaceFinding] = []
    hints: list[Hint] = []


class RankFrame(msgspec.Struct, frozen=True):
    """A line of a rank's stack."""

    file: str = ""
    line: int = 0
    function: str = ""


class RankDifference(msgspec.Struct, frozen=True):
    """A place where two ranks call different collectives, with both stacks."""

    message: str
    rank: int | None = None
    other_rank: int | None = None
    call: str | None = None
    other_call: str | None = None
    stack: list[RankFrame] = []
    other_stack: list[RankFrame] = []


class ComparedCalls(msgspec.Struct, frozen=True):
    """The number of collectives that each rank called, and how each rank ended, by rank."""

    calls: dict[str, int] = {}
    ended: dict[str, str] = {}


class RankComparison(msgspec.Struct, frozen=True):
    """The ranks that ran, and their first difference."""

    ranks: list[int] = []
    collectives: ComparedCalls = ComparedCalls()
    difference: RankDifference | None = None


class OverSteps(msgspec.Struct, frozen=True):
    """Memory of a soak by step (evaluation included): bytes and counts; None if the device does not know."""

    training_step: list[int]
    allocated: list[int | None]
    reserved: list[int | None]
    inactive_split: list[int | None]
    alloc_retries: list[int | None]


class SoakReport(msgspec.Struct, frozen=True):
    """A soak: many consecutive steps of different lengths; steps count from 1."""

    steps: int
    steps_done: int
    over_steps: OverSteps
    retries: int = 0
    first_retry_step: int | None = None
    last_device_alloc_step: int | None = None
    out_of_memory_step: int | None = None
    distinct_shapes: int = 0


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """The content of `result.json`. A figure that the device cannot know is None.

    `content`: the file as read or made; `to_dict` returns it. Only `of` sets it.
    """

    schema: int = 1
    config: reading.JsonObject | None = None
    device: str = ""
    hardware: reading.JsonObject | str | None = None
    software: str | None = None
    environment: reading.JsonObject | None = None
    status: Status
    cause: Cause | str | None = None
    compiled: bool | None = None
    parameters: int | None = None
    step_time_s: float | None = None
    samples_per_s_per_gpu: float | None = None
    tokens_per_s_per_gpu: float | None = None
    tflops_per_gpu: float | None = None
    hardware_tflops_per_gpu: float | None = None
    mfu: float | None = None
    hfu: float | None = None
    peak_memory_bytes: PeakMemory | None = None
    alloc_retries_per_step: float | None = None
    ooms: float | None = None
    traced_step_time_s: float | None = None
    time_s: StepParts | None = None
    communication: dict[str, Collective] | None = None
    overlap_fraction: float | None = None
    loss: list[float | None] | None = None
    measured: Measured | None = None
    interval: Interval | None = None
    trace_trusted: bool | None = None
    trace_warnings: list[str] | None = None
    verdict: reading.JsonObject | None = None
    late_all_gathers: reading.JsonObject | None = None
    work: reading.JsonObject | None = None
    unknown_operators: reading.JsonObject | None = None
    script: ScriptReport | None = None
    placeholder_decisions: list[PlaceholderDecision] | None = None
    redirected_files: reading.JsonObject | list[str] | None = None
    rank_check: RankComparison | None = None
    sanitizer: SanitizerReport | None = None
    memory_account: MemoryAccount | None = None
    compilation: reading.JsonObject | None = None
    memory_traffic: reading.JsonObject | None = None
    soak: SoakReport | None = None
    graph: reading.JsonObject | None = None
    buffer_rows: dict[str, float] | None = None
    unread_settings: list[str] | None = None
    network_share: float | None = None
    traces: list[Any] | None = None
    bench: Bench | None = None
    folder: str | None = None
    repeats: Repeats | None = None
    content: reading.JsonObject = {}

    @classmethod
    def of(cls, content: Mapping[str, Any]) -> Self:
        """Return `content` of a `result.json` as a result.

        Raises:
            msgspec.ValidationError: a field is missing or of a wrong type; the message names it.
        """
        named = {**content, "content": content} if isinstance(content, Mapping) else content
        return converted(named, cls)

    def to_dict(self) -> reading.JsonObject:
        """Return the content to write to `result.json`, including keys that have no field."""
        return self.content

    def at(self, path: str) -> Any:
        """Return the typed value at a dotted path; None if it is missing."""
        found: Any = self
        for part in path.split("."):
            found = found.get(part) if isinstance(found, Mapping) else getattr(found, part, None)
        return self.stored(path) if found is None else found

    def stored(self, path: str) -> Any:
        """Return the value in the file at a dotted path; None if it is missing."""
        found: Any = self.content
        for part in path.split("."):
            found = found.get(part) if isinstance(found, Mapping) else None
        return found

    def to_json(self) -> str:
        """Return the text of `result.json`."""
        return to_json(self.content, 1, allow_nan=False)

    def replaced(self, **changes: object) -> Self:
        """Return a copy of the result with some fields replaced; new fields come last in the file."""
        return type(self).of({**self.content, **msgspec.to_builtins(changes)})

    @property
    def message(self) -> str | None:
        """The reason why the result has no figures, in one line."""
        return self.cause.words if isinstance(self.cause, Cause) else self.cause

    @property
    def observed(self) -> ObservedScript | None:
        """The observations of its script; None for the bench's models, and if no step was timed."""
        return self.script.observed if self.script else None

    @property
    def reserved(self) -> float | None:
        """Peak reserved memory, bytes, which decides whether a configuration fits."""
        return self.peak_memory_bytes.reserved if self.peak_memory_bytes else None

    @property
    def machine(self) -> Mapping[str, Any]:
        """The hardware's description; empty if there is none."""
        return {"name": self.hardware} if isinstance(self.hardware, str) else self.hardware or {}

    @property
    def warnings(self) -> list[str]:
        """The reasons to doubt the figures, as reported by the machine or its profile."""
        found = (self.environment or {}).get("warnings")
        return [str(line) for line in found] if isinstance(found, list) else []

    @property
    def throughput(self) -> float | None:
        """Tokens per second and GPU, or samples if the model has no tokens."""
        return self.tokens_per_s_per_gpu or self.samples_per_s_per_gpu

    @property
    def step_times_s(self) -> list[float]:
        """The samples of the step time, seconds."""
        return self.measured.step_times_s if self.measured else []

    @property
    def is_risky(self) -> bool:
        """Whether memory fits only inside the prediction's error, or the allocator retries."""
        return self.interval is not None and self.interval.risky

    @property
    def steps_spread(self) -> float | None:
        """The spread of the timed steps if the allocator retries, which makes steps differ; else None."""
        return self.measured.spread if self.measured and self.alloc_retries_per_step else None


class FolderContentError(Exception):
    """Raised if a configuration's folder cannot be read; the message is one line."""


class ConfigFile(msgspec.Struct, frozen=True):
    """`config.json`: the requested configuration."""

    settings: reading.JsonObject
    name: str = ""
    key: str = ""
    model: str = ""
    shape: reading.JsonObject | None = None
    parameters: int | None = None
    system: str = ""
    device: str = ""
    hardware: reading.JsonObject | str | None = None
    gpus: int | None = None
    gpus_per_node: int | None = None
    gpus_used_per_node: int | None = None
    software: str | None = None
    command: str | list[str] | None = None


FileT = TypeVar("FileT", ConfigFile, Result)


def read_file(path: Path, kind: type[FileT]) -> tuple[FileT, reading.JsonObject]:
    """Return one of the two files as its type, and its whole content.

    Raises:
        FolderContentError: the file is missing, unreadable, cut off, not JSON, or a field is of a wrong type.
    """
    try:
        content = reading.read_bytes(path, reading.LARGEST_JSON)
    except reading.UnreadableError as error:
        if not path.exists():
            raise FolderContentError(f"{path.name} is missing") from None
        raise FolderContentError(f"{path.name} {error.reason}") from None
    try:
        # Made printable once, here: terminals, Markdown and pages show the strings as they are read.
        decoded = reading.all_on_one_line(msgspec.json.decode(content))
        if kind is Result:
            return Result.of(decoded), decoded  # type: ignore[return-value]
        return converted(decoded, kind), decoded
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise FolderContentError(f"{path.name} ({len(content)} bytes): {reading.one_line(error)}") from None
    except RecursionError:
        raise FolderContentError(f"{path.name}: nested too deeply") from None
