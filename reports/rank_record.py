"""The record of one rank, as stored in its file. Results are computed from these records."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

import msgspec

from fsdpbench.base.files.documents import converted
from fsdpbench.base.reading import JsonObject
from fsdpbench.base.result_sections import MemoryAccount, PlaceholderDecision, ScriptReport
from fsdpbench.reports.result import Status

OF_SCRIPTS = ("script", "placeholder_decisions", "redirected_files", "compiled", "rank_check")
"""Fields that only records of scripts have."""
OPTIONAL = (
    *OF_SCRIPTS, "parameters", "sanitizer", "memory_account", "compilation", "memory_traffic", "soak",
    "graph", "buffer_rows", "unread_settings", "network_share",
)  # fmt: skip
"""Fields that a record, and its result, have only if there is something to report."""
_REAL_TIME = ("loader", "step_work")
"""Also optional. In the result, `loader` (real time) is in `bench`, and `step_work` in `interval`."""


@dataclass
class RankRecord:
    """The seconds, bytes and FLOPs of one rank; `None` if its device cannot know a value. Only ranks of a
    user's own script have `script`, `placeholder_decisions`, `redirected_files`, `compiled`, `rank_check`."""

    rank: int
    world_size: int
    device: str
    status: Status = Status.OK
    cause: str | None = None
    losses: list[float] | None = None
    step_times_s: list[float] = field(default_factory=list)
    memory_per_step: list[dict[str, int | None]] | None = None
    flops_per_step: dict[str, float] = field(default_factory=dict)
    samples_per_step: int | float | None = 0
    tokens_per_step: int | float | None = None
    peak_flops: float | None = None
    hardware: JsonObject | None = None
    unknown_operators: dict[str, int] = field(default_factory=dict)
    profiler_step_times_s: list[float] = field(default_factory=list)
    warmup_times_s: list[float] = field(default_factory=list)
    warmup_stable: bool | None = None
    trace: str | None = None
    script: ScriptReport | None = None
    placeholder_decisions: list[PlaceholderDecision] | None = None
    redirected_files: JsonObject | None = None
    compiled: bool | None = None
    sanitizer: JsonObject | None = None
    rank_check: JsonObject | None = None
    memory_account: MemoryAccount | None = None
    compilation: JsonObject | None = None
    """Compiled runs: graphs that Dynamo traced, breaks, recompilations; on simulated GPUs also the compiled
    graphs, their kernels and fallbacks."""
    memory_traffic: JsonObject | None = None
    """Simulated GPUs: bytes that memory-bound kernels move in a mean traced step."""

    loader: dict[str, int | float] | None = None
    """Scripts with data loaders: host seconds for a batch, and batches per step."""
    soak: JsonObject | None = None
    """Soaks: memory over the steps (docs/lengths.md)."""

    parameters: int | None = None
    """Parameters of the whole model, tied ones counted once; None for scripts."""
    buffer_rows: dict[str, int | float] | None = None
    """Experts with a capacity, per step: rows `sent` to them, those `dropped`, and `empty` places."""

    graph: JsonObject | None = None
    """A step captured as one CUDA graph (simulated, estimated): launches, streams, warm-up, replays."""
    unread_settings: list[str] | None = None
    """Settings that were given but that the system never read: they had no effect."""
    network_share: float | None = None
    """Simulated GPUs: time of collectives between nodes or over PCIe, as a share of the time of the steps."""

    step_work: dict[str, float] | None = None
    """Simulated GPUs, seconds per step without contention: `kernels`, `host_copies` (over the host link) and
    `host_optimizer`; and `slow_link_step`, the step if that link takes twice as long, absent if not tried."""

    def add_sanitizer(self, found: JsonObject | None) -> None:
        """Store the sanitizer's findings, if it ran; if it found any, an `ok` run becomes `race`."""
        self.sanitizer = found
        if found is not None and found["findings"] and self.status is Status.OK:
            self.status, self.cause = Status.RACE, _first_finding(found)

    @classmethod
    def of(cls, content: Mapping[str, Any]) -> Self:
        """Return the record in a file's content. Raises `msgspec.ValidationError`, which names the field."""
        return converted(content, cls)

    def to_dict(self) -> JsonObject:
        """Return the content of the record's file."""
        empty = {name for name in (*OPTIONAL, *_REAL_TIME) if getattr(self, name) is None}
        fields: JsonObject = msgspec.to_builtins(self)
        return {"schema": 1} | {name: value for name, value in fields.items() if name not in empty}

    @property
    def optional(self) -> JsonObject:
        """The optional fields that are set, for the result."""
        return {name: value for name, value in self.to_dict().items() if name in OPTIONAL}


def _first_finding(found: JsonObject) -> str:
    findings = found["findings"]
    first, second = (
        f"{side['operation']} ({side['access']}, {side['stream'].partition(' (')[0]}, {side['line']})"
        for side in (findings[0]["first"], findings[0]["second"])
    )
    rest = "" if len(findings) == 1 else f" (and {len(findings) - 1} more)"
    return f"{second} is not ordered after {first}{rest}"


def compiled_graphs(compilation: Mapping[str, Any]) -> int:
    """Return the number of graphs in a run's `compilation`: compiled ones, on real devices traced ones."""
    found: int = compilation.get("graphs", compilation.get("traced", 0))
    return found
