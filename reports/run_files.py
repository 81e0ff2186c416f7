"""What a configuration's folder holds, as typed structs, and reading it without trusting it.

Only the fields that the page shows are typed; everything else in the files is ignored, so that a newer bench
can add to them. A file that is missing, cut off or of the wrong types raises
`FolderContentError` in one line.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

import msgspec

from fsdpbench.reports.reading import LARGEST_JSON, UnreadableError, all_on_one_line, one_line, read_bytes


class FolderContentError(Exception):
    """One configuration's folder cannot be read; the message is one line for people."""


class ConfigFile(msgspec.Struct, frozen=True):
    """`config.json`: what was asked for."""

    settings: dict[str, Any]
    name: str = ""
    key: str = ""
    model: str = ""
    shape: dict[str, Any] | None = None
    parameters: int | None = None
    system: str = ""
    device: str = ""
    hardware: dict[str, Any] | str | None = None
    gpus: int | None = None
    gpus_per_node: int | None = None
    gpus_used_per_node: int | None = None
    software: str | None = None
    command: str | list[str] | None = None


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
    """How one run's step time was sampled: seconds, and shares of the median or of the untraced step."""

    step_times_s: list[float] = []
    spread: float | None = None
    warmup_stable: bool | None = None
    profiler_overhead: float | None = None


class Interval(msgspec.Struct, frozen=True):
    """Where a simulated figure really is in a share `level` of cases, each as [low, high].

    `because`: what makes it wider than that of known runs. `risky`: memory fits only inside its error, or the
    allocator retries. `apart`: step times nearer than this share cannot be distinguished.
    """

    level: float
    step_time_s: tuple[float, float]
    tokens_per_s_per_gpu: tuple[float, float] | None = None
    samples_per_s_per_gpu: tuple[float, float] | None = None
    peak_memory_bytes: dict[str, tuple[float, float]] = {}
    risky: bool = False
    because: list[str] = []
    runs: int = 0
    apart: float = 0.0

    @property
    def half_width(self) -> float:
        """Half the interval of the step time, as a share of its middle."""
        low, high = self.step_time_s
        return (high - low) / (high + low) if high + low > 0 else 0.0


class Repeats(msgspec.Struct, frozen=True):
    """All runs of a configuration: step times (seconds), and their spread (quartiles over median)."""

    runs: int = 1
    failed: int = 0
    step_time_s: list[float] = []
    spread: float | None = None


class PlaceholderDecision(msgspec.Struct, frozen=True):
    """What one line of a script asked of a simulated tensor, what it was told, and how often."""

    file: str
    line: int
    operation: str
    answer: bool | int | float | str | None
    count: int


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
    """What the sanitizer found: two accesses to the same bytes, how often, and the usual fix."""

    kind: str
    first: Access
    second: Access
    count: int = 1
    bytes: int = 0
    role: str = ""
    hint: str = ""


class Hint(msgspec.Struct, frozen=True):
    """What the sanitizer noticed beside races."""

    kind: str
    hint: str = ""
    count: int = 1
    stack: list[str] = []


class SanitizerReport(msgspec.Struct, frozen=True):
    """All that the sanitizer found; `counts` by kind, repetitions included."""

    counts: dict[str, int] = {}
    findings: list[RaceFinding] = []
    hints: list[Hint] = []


class RankFrame(msgspec.Struct, frozen=True):
    """A line of a rank's stack."""

    file: str = ""
    line: int = 0
    function: str = ""


class RankDifference(msgspec.Struct, frozen=True):
    """Where two ranks call different collectives, with both stacks."""

    message: str
    rank: int | None = None
    other_rank: int | None = None
    call: str | None = None
    other_call: str | None = None
    stack: list[RankFrame] = []
    other_stack: list[RankFrame] = []


class RankComparison(msgspec.Struct, frozen=True):
    """The ranks that ran, and their first difference."""

    ranks: list[int] = []
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


class ResultFile(msgspec.Struct, frozen=True):
    """`result.json`: what came of it. A figure that the device cannot know is None."""

    status: str
    cause: Any = None
    compiled: bool | None = None
    device: str = ""
    hardware: dict[str, Any] | str | None = None
    environment: dict[str, Any] | None = None
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
    communication: dict[str, Any] | None = None
    overlap_fraction: float | None = None
    loss: list[float | None] | None = None
    traces: list[Any] | None = None
    measured: Measured | None = None
    interval: Interval | None = None
    repeats: Repeats | None = None
    placeholder_decisions: list[PlaceholderDecision] | None = None
    sanitizer: SanitizerReport | None = None
    rank_check: RankComparison | None = None
    software: str | None = None
    work: dict[str, Any] | None = None
    memory_traffic: dict[str, Any] | None = None
    soak: SoakReport | None = None
    graph: dict[str, Any] | None = None

    @property
    def steps_spread(self) -> float | None:
        """How far apart the timed steps are where the allocator retries: none says what the next is like."""
        return self.measured.spread if self.measured and self.alloc_retries_per_step else None


FileT = TypeVar("FileT", ConfigFile, ResultFile)


def read_file(path: Path, kind: type[FileT]) -> tuple[FileT, dict[str, Any]]:
    """Decode one of the two files: what the page shows of it, and all that is in it.

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
        return msgspec.convert(decoded, kind), decoded
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise FolderContentError(f"{path.name} ({len(content)} bytes): {one_line(error)}") from None
    except RecursionError:
        raise FolderContentError(f"{path.name}: nested too deeply") from None
