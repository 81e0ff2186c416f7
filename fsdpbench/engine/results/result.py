"""The result of one configuration, as `fsdpbench run --json` prints it (docs/reference/results.md).

This module adds configuration, status, cause and environment. All figures are computed from trace files and
rank records by `reports`, in the same way on every device.
"""

import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsdpbench.base.configuration.config import Config
from fsdpbench.base.reading import JsonObject, one_line
from fsdpbench.base.writing import remove, write_whole
from fsdpbench.engine.results.provenance import environment
from fsdpbench.engine.results.records import TRACE_FOLDER, Status, read_records
from fsdpbench.engine.results.residuals.intervals import interval_of
from fsdpbench.reports.analysis import analyze
from fsdpbench.reports.analysis.analyze import Draw
from fsdpbench.reports.analysis.model import Analysis
from fsdpbench.reports.figures import computed, nothing
from fsdpbench.reports.rank_record import RankRecord, compiled_graphs
from fsdpbench.reports.result import Result
from fsdpbench.sim.model.keys import far_figures
from fsdpbench.sim.model.profile import load_profile
from fsdpbench.sim.model.software import CURRENT, load_software

SCHEMA = 1
_WORST_FIRST = (Status.CRASH, Status.TIMEOUT, Status.OOM, Status.ERROR, Status.RACE)


@dataclass(frozen=True)
class Outcome:
    """How the ranks of a configuration ended. `log`: a log file with details, relative to the folder."""

    status: Status
    cause: str | None = None
    log: str | None = None

    def __post_init__(self) -> None:
        # A cause comes from a rank: torch's messages may have paragraphs, a script's may contain anything.
        if self.cause is not None:
            object.__setattr__(self, "cause", one_line(self.cause))


def outcome_of_records(records: list[RankRecord], world_recorded: int) -> Outcome:
    """Return a configuration's outcome: the worst of its ranks' records, or `crash` if one is missing."""
    by_status = {record.status: record for record in reversed(records)}
    for status in _WORST_FIRST:
        if status in by_status:
            record = by_status[status]
            return Outcome(status, f"rank {record.rank}: {record.cause}", "stderr.log")
    if len(records) < world_recorded:
        missing = sorted(set(range(world_recorded)) - {record.rank for record in records})
        return Outcome(Status.CRASH, f"no record of rank {', '.join(map(str, missing))}", "stderr.log")
    return Outcome(Status.OK)


def record_result(
    config: Config,
    folder: Path,
    outcome: Outcome,
    duration_s: float,
    started: str,
    observed: Mapping[str, Any] | None = None,
    cpu_s: float | None = None,
    draw: Draw | None = None,
) -> Result:
    """Build the result of `config` from the files in `folder` and write `result.json` there atomically.

    If a trace cannot be read, the result says so. If the disk is full, the trace is removed to make room for
    a result that says so. `observed`: the machine's state around the run, for the result's `environment`.
    `cpu_s`: processor time of all ranks. `draw` is called with each trace and its analysis.

    Raises `OSError` if even that cannot be written.
    """
    loader = next((record.loader for record in read_records(folder)[:1]), None)
    bench = {
        "started": started,
        "duration_s": round(duration_s, 3),
        "cpu_s": None if cpu_s is None else round(cpu_s, 3),
        **({"loader": loader} if loader is not None else {}),
    }

    def write(outcome: Outcome, draw: Draw | None) -> Result:
        result = build_result(config, folder, outcome, draw)
        result = result.replaced(environment={**(result.environment or {}), **(observed or {})}, bench=bench)
        write_whole(folder / "result.json", result.to_json())
        return result

    try:
        return write(outcome, draw)
    except OSError as error:
        remove(folder / TRACE_FOLDER)
        cause = f"the result cannot be written: {error.strerror or error}"
    except Exception as error:
        traceback.print_exc()
        cause = f"the trace cannot be analysed: {type(error).__name__}: {error}".splitlines()[0]
    return write(Outcome(Status.ERROR, cause, "stderr.log"), None)


def build_result(config: Config, folder: Path, outcome: Outcome, draw: Draw | None = None) -> Result:
    """Return the result of the records and traces in `folder`, without `bench`."""
    records = read_records(folder)
    figures: dict[str, object] = {**nothing()}
    # Figures that were measured before a script failed are kept.
    measured = config.script is not None and bool(records) and bool(records[0].step_times_s)
    has_figures = outcome.status in (Status.OK, Status.RACE) or measured
    if has_figures:
        # A script may end before tracing starts.
        traced = config.measurement.traced_steps > 0 and not (config.script and not records[0].trace)
        analysis = Analysis(ranks=(), configurations={})
        if traced:
            analysis = analyze([folder / TRACE_FOLDER], draw=draw)
        figures |= computed(records, analysis)
    first = records[0] if records else RankRecord(0, config.gpus, config.device)
    traces = (folder / TRACE_FOLDER).glob("*_trace.json.gz") if has_figures else ()
    # True if compilation was requested, unless the compiler is known to have made no graph.
    graphs = compiled_graphs(first.compilation) if first.step_times_s and first.compilation else True
    made = Result.of(
        _head(config, outcome, first, environment(config) | _doubts(config))
        | {"compiled": None if config.script else bool(config.settings.compile and graphs), **figures}
        | {"unknown_operators": first.unknown_operators, **first.optional}
        | {"traces": sorted(path.relative_to(folder).as_posix() for path in traces)}
    )
    return made.replaced(interval=interval_of(config, made, first.step_work)) if has_figures else made


def _head(config: Config, outcome: Outcome, first: RankRecord, around: JsonObject) -> JsonObject:
    """Return the part of a result before its figures. `around`: its environment."""
    cause = {"message": outcome.cause, "log": outcome.log}
    return {
        "schema": SCHEMA,
        "config": config.to_dict(),
        "device": config.device,
        "hardware": first.hardware or {"name": config.hardware, "simulated": config.device == "sim"},
        **({"software": load_software(config.software).name} if config.software else {}),
        "environment": around,
        "status": outcome.status.value,
        "cause": None if outcome.status is Status.OK else cause,
    }


def not_applicable_result(config: Config, reasons: dict[str, str]) -> Result:
    """Return the result for a configuration that its system does not support; nothing was run."""
    because = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
    outcome = Outcome(Status.NOT_APPLICABLE, f"{config.system} cannot run this: {because}")
    content = _head(config, outcome, RankRecord(0, config.gpus, config.device), environment(config))
    content |= {"compiled": bool(config.settings.compile), **nothing()}
    return Result.of(content | {"unknown_operators": {}, "traces": []})


def _doubts(config: Config) -> dict[str, list[str]]:
    """Return the `warnings` about a simulated machine and its software, if any."""
    if config.hardware is None:
        return {}
    software = load_software(config.software or CURRENT)
    found = software.applied_to(load_profile(config.hardware)).doubts() + far_figures(software)
    return {"warnings": found} if found else {}
