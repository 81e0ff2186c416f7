"""The record of one rank, as its file holds it: what results are made of."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

import msgspec

from fsdpbench.base.files.documents import converted
from fsdpbench.base.reading import JsonObject
from fsdpbench.base.result_sections import MemoryAccount, PlaceholderDecision, ScriptReport
from fsdpbench.reports.result import Status

OF_SCRIPTS = ("script", "placeholder_decisions", "redirected_files", "compiled", "rank_check")
"""Fields that the records of scripts alone have."""
OPTIONAL = (
    *OF_SCRIPTS, "parameters", "sanitizer", "memory_account", "compilation", "memory_traffic", "soak",
    "graph", "buffer_rows", "unread_settings", "network_share",
)  # fmt: skip
"""Fields that a record has only where there is something to say; its result has them too."""
_REAL_TIME = ("loader", "step_work")
"""Likewise; the first is measured in real time, and is in the result's `bench`, the other in its interval."""


@dataclass
class RankRecord:
    """The seconds, bytes and FLOPs of one rank; `None` is what its device cannot know. Only the ranks of a
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
    """Of a compiled run: graphs that Dynamo traced, breaks, recompilations; on simulated GPUs the compiled
    graphs, their kernels and fallbacks too."""
    memory_traffic: JsonObject | None = None
    """Simulated GPUs, a mean traced step: bytes of kernels that memory limits."""

    loader: dict[str, int | float] | None = None
    """Of a script with loaders: what a batch takes the host, seconds, and batches a step."""
    soak: JsonObject | None = None
    """Of a soak: memory over its steps (docs/lengths.md)."""

    parameters: int | None = None
    """Of the whole model, tied ones once; None of a script."""
    buffer_rows: dict[str, int | float] | None = None
    """Of experts with a capacity, a step: rows `sent` to them, `dropped` of these, and `empty` places."""

    graph: JsonObject | None = None
    """Of a step captured as one CUDA graph (simulated, estimated): launches, streams, warm-up, replays."""
    unread_settings: list[str] | None = None
    """Settings that were given and that the system never read: they had no effect."""
    network_share: float | None = None
    """Simulated GPUs of several nodes: durations of collectives between them, alone, over the steps' time."""

    step_work: dict[str, float] | None = None
    """Simulated GPUs, seconds of a step: `kernels`, `host_copies`, `host_optimizer`, each alone and added
    up, and `slow_link_step`, the step if that link takes twice as long; absent where that was not tried."""

    def add_sanitizer(self, found: JsonObject | None) -> None:
        """Take the sanitizer's findings, if it ran; a run that is fine otherwise ends with `race`."""
        self.sanitizer = found
        if found is not None and found["findings"] and self.status is Status.OK:
            self.status, self.cause = Status.RACE, _first_finding(found)

    @classmethod
    def of(cls, content: Mapping[str, Any]) -> Self:
        """Return the record in a file's content. Raises `msgspec.ValidationError`, which names the field."""
        return converted(content, cls)

    def to_dict(self) -> JsonObject:
        """Return what the file holds."""
        empty = {name for name in (*OPTIONAL, *_REAL_TIME) if getattr(self, name) is None}
        fields: JsonObject = msgspec.to_builtins(self)
        return {"schema": 1} | {name: value for name, value in fields.items() if name not in empty}

    @property
    def optional(self) -> JsonObject:
        """The optional fields that it has, for its result."""
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
    """Return the graphs of a run by its `compilation`: compiled ones; on real devices those traced."""
    found: int = compilation.get("graphs", compilation.get("traced", 0))
    return found
