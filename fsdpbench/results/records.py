"""What one rank leaves behind: `rank{r}_record.json` beside its trace. Written whole or not at all.

A record is written once per outcome of the rank, also before an out-of-memory error unwinds, since an
exception inside a backward hook ends the process.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from fsdpbench.files.lock_owner import UnreadableFileError, read_json_object
from fsdpbench.files.whole_files import write_whole
from fsdpbench.reports.result import Status as Status

TRACE_FOLDER = "trace"
OF_SCRIPTS = ("script", "placeholder_decisions", "redirected_files", "compiled", "rank_check")
"""What the records of scripts alone hold."""
OPTIONAL = (
    *OF_SCRIPTS,
    "sanitizer",
    "memory_account",
    "compilation",
    "memory_traffic",
    "soak",
    "graph",
    "buffer_rows",
    "unread_settings",
)
"""What a record holds only where there is something to say."""
_REAL_TIME = ("loader",)
"""Likewise; it is measured in real time, and is in the result's `bench`."""


def compiled_graphs(compilation: Mapping[str, Any]) -> int:
    """Graphs of a run by its `compilation`: compiled ones, or on real devices those that Dynamo traced."""
    found: int = compilation.get("graphs", compilation.get("traced", 0))
    return found


@dataclass
class RankRecord:
    """Seconds, bytes and FLOPs of one rank; `None` is what its device cannot know. What is known of a user's
    own script alone: `script`, `placeholder_decisions`, `redirected_files`, `compiled` and `rank_check`."""

    rank: int
    world_size: int
    device: str
    status: Status = Status.OK
    cause: str | None = None
    losses: list[float] | None = None
    step_times_s: list[float] = field(default_factory=list)
    memory_per_step: list[dict[str, int]] | None = None
    flops_per_step: dict[str, float] = field(default_factory=dict)
    samples_per_step: float | None = 0
    tokens_per_step: float | None = None
    peak_flops: float | None = None
    hardware: dict[str, Any] | None = None
    unknown_operators: dict[str, int] = field(default_factory=dict)
    profiler_step_times_s: list[float] = field(default_factory=list)
    warmup_times_s: list[float] = field(default_factory=list)
    warmup_stable: bool | None = None
    trace: str | None = None
    script: dict[str, Any] | None = None
    placeholder_decisions: list[dict[str, Any]] | None = None
    redirected_files: dict[str, Any] | None = None
    compiled: bool | None = None
    sanitizer: dict[str, Any] | None = None
    rank_check: dict[str, Any] | None = None
    memory_account: dict[str, Any] | None = None
    compilation: dict[str, Any] | None = None
    """Of a compiled run: graphs that Dynamo traced, breaks, recompilations; on simulated GPUs the compiled
    graphs, their kernels and fallbacks too."""
    memory_traffic: dict[str, Any] | None = None
    """Simulated GPUs, a mean traced step: bytes of kernels that memory limits."""

    loader: dict[str, float] | None = None
    """Of a script with loaders: what a batch takes the host, seconds, and batches a step."""
    soak: dict[str, Any] | None = None
    """Of a soak: memory over its steps (docs/lengths.md)."""

    buffer_rows: dict[str, float] | None = None
    """Of experts with a capacity, a step: rows `sent` to them, `dropped` of these, and `empty` places."""

    graph: dict[str, Any] | None = None
    """Of a step captured as one CUDA graph (simulated, estimated): launches, streams, warm-up, replays."""
    unread_settings: list[str] | None = None
    """Settings that were given and that the system never read: they had no effect."""

    def add_sanitizer(self, found: dict[str, Any] | None) -> None:
        """What the sanitizer found, if it ran; a run that is fine otherwise ends with `race`."""
        self.sanitizer = found
        if found is not None and found["findings"] and self.status is Status.OK:
            self.status, self.cause = Status.RACE, _first_finding(found)

    def write(self, folder: Path) -> Path:
        """Write into `folder`/trace, over an earlier record of this rank."""
        path = record_path(folder, self.rank)
        path.parent.mkdir(parents=True, exist_ok=True)
        content = asdict(self)
        for name in (*OPTIONAL, *_REAL_TIME):
            if content[name] is None:
                del content[name]
        write_whole(path, json.dumps({"schema": 1, **content}, indent=1))
        return path


def _first_finding(found: dict[str, Any]) -> str:
    findings = found["findings"]
    first, second = (
        f"{side['operation']} ({side['access']}, {side['stream'].partition(' (')[0]}, {side['line']})"
        for side in (findings[0]["first"], findings[0]["second"])
    )
    rest = "" if len(findings) == 1 else f" (and {len(findings) - 1} more)"
    return f"{second} is not ordered after {first}{rest}"


def record_path(folder: Path, rank: int) -> Path:
    """Where a rank writes its record."""
    return folder / TRACE_FOLDER / f"rank{rank}_record.json"


def trace_path(folder: Path, rank: int) -> Path:
    """Where a rank writes its trace."""
    return folder / TRACE_FOLDER / f"rank{rank}_trace.json.gz"


def read_records(folder: Path) -> list[dict[str, Any]]:
    """Every rank's record in `folder`, by rank; broken files are left out (their rank did not finish
    writing)."""
    records = []
    for path in sorted((folder / TRACE_FOLDER).glob("rank*_record.json")):
        with contextlib.suppress(UnreadableFileError):
            records.append(read_json_object(path))
    whole = [record for record in records if isinstance(record.get("rank"), int)]
    return sorted(whole, key=lambda record: record["rank"])
