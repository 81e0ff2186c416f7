"""The result of one configuration, as `fsdpbench run --json` prints it (docs/reference/results.md).

The bench adds what it knows (configuration, status, cause, environment); every figure comes from the trace
files and the ranks' records through `reports`, on every device alike.
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
    """How the ranks of a configuration ended; `log`: the file that tells more, from the folder."""

    status: Status
    cause: str | None = None
    log: str | None = None

    def __post_init__(self) -> None:
        # A rank's words: torch's own go on for paragraphs, a script's may hold anything.
        if self.cause is not None:
            object.__setattr__(self, "cause", one_line(self.cause))


def outcome_of_records(records: list[RankRecord], world_recorded: int) -> Outcome:
    """Return a configuration's outcome from its ranks' records: the worst, or `crash` if one is missing."""
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
    """Assemble the result of `config` from what is in `folder` and write `result.json` there, whole.

    Where a trace cannot be read, that is the result; where the disk is full, the trace makes room for the
    result that says so. `observed`: the machine's state around the run, for the result's `environment`.
    `cpu_s`: processor time of the run, all ranks. `draw` is called with each trace and its analysis.

    Raises `OSError` if not even that can be written.
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
    """Return the result of the records and traces in `folder`; all of it but `bench`."""
    records = read_records(folder)
    figures: dict[str, object] = {**nothing()}
    # A later failure takes nothing from what was measured of a script before.
    measured = config.script is not None and bool(records) and bool(records[0].step_times_s)
    has_figures = outcome.status in (Status.OK, Status.RACE) or measured
    if has_figures:
        # A script may end before tracing begins.
        traced = config.measurement.traced_steps > 0 and not (config.script and not records[0].trace)
        analysis = Analysis(ranks=(), configurations={})
        if traced:
            analysis = analyze([folder / TRACE_FOLDER], draw=draw)
        figures |= computed(records, analysis)
    first = records[0] if records else RankRecord(0, config.gpus, config.device)
    traces = (folder / TRACE_FOLDER).glob("*_trace.json.gz") if has_figures else ()
    # What was asked for, unless the compiler is known to have made no graph of what ran.
    graphs = compiled_graphs(first.compilation) if first.step_times_s and first.compilation else True
    made = Result.of(
        _head(config, outcome, first, environment(config) | _doubts(config))
        | {"compiled": None if config.script else bool(config.settings.compile and graphs), **figures}
        | {"unknown_operators": first.unknown_operators, **first.optional}
        | {"traces": sorted(path.relative_to(folder).as_posix() for path in traces)}
    )
    return made.replaced(interval=interval_of(config, made, first.step_work)) if has_figures else made


def _head(config: Config, outcome: Outcome, first: RankRecord, around: JsonObject) -> JsonObject:
    """Return what a result says before its figures. `around`: its environment."""
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
    """Return the answer for a configuration that its system cannot do; nothing was run."""
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
