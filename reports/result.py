"""The two files of a configuration's folder as typed parts: `result.json` and `config.json`.

It is among what reads traces, which needs neither torch nor the bench, so that pages and the bench read
the same type.  Old files lack keys, newer files and plugins add some: a key that is missing is None, and what
no field names stays in `content`, which is what is written again.  Fields are in the order of the file; of
`config.json` only those that the page shows are typed.
"""

from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any, Self, TypeVar

import msgspec

from fsdpbench.base.files.documents import converted, to_json
from fsdpbench.base.reading import (
    LARGEST_JSON,
    JsonObject,
    UnreadableError,
    all_on_one_line,
    one_line,
    read_bytes,
)
from fsdpbench.base.result_sections import MemoryAccount, ObservedScript, PlaceholderDecision, ScriptReport

Span = tuple[int | float, int | float]
"""The low and the high end of an interval."""


class Status(StrEnum):
    """The outcome of a rank, and of a configuration (`not_applicable` only of the latter). `race`: the
    sanitizer found one; `rank_mismatch`: a script's ranks call different collectives. Both keep figures."""

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
        """Whether it answers the question asked, and is not a failure of the configuration to do so."""
        return self in (Status.OK, Status.OOM, Status.NOT_APPLICABLE)


class Cause(msgspec.Struct, frozen=True):
    """The reason why a configuration has no figures: one line, and the log that tells more."""

    message: str | None = None
    log: str | None = None
    error: str | None = None
    """`message`, as early versions wrote it; likewise `line`."""
    line: str | None = None

    @property
    def words(self) -> str | None:
        """The reason in a line."""
        return self.message or self.error or self.line


class Bench(msgspec.Struct, frozen=True):
    """The run itself: when it began (ISO 8601), how long it took (seconds), its script's loader of data."""

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
"""Half an interval, as a share of its middle, from which on its ends are too far from symmetric for a ±."""


class Interval(msgspec.Struct, frozen=True):
    """The intervals that hold simulated figures in a share `level` of cases, each as [low, high].

    `because`: what makes it wider than that of known runs. `risky`: memory fits only inside its error, or the
    allocator retries. Of differences: `apart`, below which no two steps are distinguished, a share; `shared`,
    half widths without what settings of no published run make unknown, and with it; `link`, |ln| of how much
    shorter and longer the step may be for the link to the host; `work`, the share of the step in kernels.
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
    """One of two accesses that nothing orders."""

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
    """A remark of the sanitizer beside races."""

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
    """The collectives that each rank called, and how it ended, by rank."""

    calls: dict[str, int] = {}
    ended: dict[str, str] = {}


class RankComparison(msgspec.Struct, frozen=True):
    """The ranks that ran, and their first difference."""

    ranks: list[int] = []
    collectives: ComparedCalls = ComparedCalls()
    difference: RankDifference | None = None


class OverSteps(msgspec.Struct, frozen=True):
    """A soak, step by step (evaluation included): bytes and counts; None where the device keeps none."""

    training_step: list[int]
    allocated: list[int | None]
    reserved: list[int | None]
    inactive_split: list[int | None]
    alloc_retries: list[int | None]


class SoakReport(msgspec.Struct, frozen=True):
    """Many steps of different lengths on end; steps count from 1."""

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

    `content`: the file as it was read or made, which `to_dict` gives back. Only `of` fills it.
    """

    schema: int = 1
    config: JsonObject | None = None
    device: str = ""
    hardware: JsonObject | str | None = None
    software: str | None = None
    environment: JsonObject | None = None
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
    verdict: JsonObject | None = None
    late_all_gathers: JsonObject | None = None
    work: JsonObject | None = None
    unknown_operators: JsonObject | None = None
    script: ScriptReport | None = None
    placeholder_decisions: list[PlaceholderDecision] | None = None
    redirected_files: JsonObject | list[str] | None = None
    rank_check: RankComparison | None = None
    sanitizer: SanitizerReport | None = None
    memory_account: MemoryAccount | None = None
    compilation: JsonObject | None = None
    memory_traffic: JsonObject | None = None
    soak: SoakReport | None = None
    graph: JsonObject | None = None
    buffer_rows: dict[str, float] | None = None
    unread_settings: list[str] | None = None
    network_share: float | None = None
    traces: list[Any] | None = None
    bench: Bench | None = None
    folder: str | None = None
    repeats: Repeats | None = None
    content: JsonObject = {}

    @classmethod
    def of(cls, content: Mapping[str, Any]) -> Self:
        """Return `content` of a `result.json` as a result.

        Raises:
            msgspec.ValidationError: a field is missing or of a wrong type; the message names it.
        """
        named = {**content, "content": content} if isinstance(content, Mapping) else content
        return converted(named, cls)

    def to_dict(self) -> JsonObject:
        """Return what is written to `result.json`, keys that no field names among it."""
        return self.content

    def at(self, path: str) -> Any:
        """Return what is at a dotted path, by its type; None if it is missing."""
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
        """Return the result with other values of some fields; new ones come last in the file."""
        return type(self).of({**self.content, **msgspec.to_builtins(changes)})

    @property
    def message(self) -> str | None:
        """The reason why it has no figures, in a line."""
        return self.cause.words if isinstance(self.cause, Cause) else self.cause

    @property
    def observed(self) -> ObservedScript | None:
        """The observations of its script; None of the bench's models and where no step was timed."""
        return self.script.observed if self.script else None

    @property
    def reserved(self) -> float | None:
        """Peak reserved memory, bytes, which decides whether a configuration fits."""
        return self.peak_memory_bytes.reserved if self.peak_memory_bytes else None

    @property
    def machine(self) -> Mapping[str, Any]:
        """The hardware's description; empty where there is none."""
        return {"name": self.hardware} if isinstance(self.hardware, str) else self.hardware or {}

    @property
    def warnings(self) -> list[str]:
        """The reasons that make the figures doubtful, as the machine or its profile says it."""
        found = (self.environment or {}).get("warnings")
        return [str(line) for line in found] if isinstance(found, list) else []

    @property
    def throughput(self) -> float | None:
        """Tokens a second and GPU, samples where the model has no tokens."""
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
        """The spread of the timed steps where the allocator retries and no step is like the next."""
        return self.measured.spread if self.measured and self.alloc_retries_per_step else None


class FolderContentError(Exception):
    """One configuration's folder cannot be read; the message is one line for people."""


class ConfigFile(msgspec.Struct, frozen=True):
    """`config.json`: what was asked for."""

    settings: JsonObject
    name: str = ""
    key: str = ""
    model: str = ""
    shape: JsonObject | None = None
    parameters: int | None = None
    system: str = ""
    device: str = ""
    hardware: JsonObject | str | None = None
    gpus: int | None = None
    gpus_per_node: int | None = None
    gpus_used_per_node: int | None = None
    software: str | None = None
    command: str | list[str] | None = None


FileT = TypeVar("FileT", ConfigFile, Result)


def read_file(path: Path, kind: type[FileT]) -> tuple[FileT, JsonObject]:
    """Return one of the two files as its type, and all that is in it.

    Raises:
        FolderContentError: the file is missing, unreadable, cut off, not JSON, or a field is of a wrong type.
    """
    try:
        content = read_bytes(path, LARGEST_JSON)
    except UnreadableError as error:
        if not path.exists():
            raise FolderContentError(f"{path.name} is missing") from None
        raise FolderContentError(f"{path.name} {error.reason}") from None
    try:
        # Whoever shows what is in it, on a terminal, in Markdown or on a page, shows it as it is read here.
        decoded = all_on_one_line(msgspec.json.decode(content))
        if kind is Result:
            return Result.of(decoded), decoded  # type: ignore[return-value]
        return converted(decoded, kind), decoded
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise FolderContentError(f"{path.name} ({len(content)} bytes): {one_line(error)}") from None
    except RecursionError:
        raise FolderContentError(f"{path.name}: nested too deeply") from None
