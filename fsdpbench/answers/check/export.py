"""A side's figures for the history pages of other tools: asv's folder of results, pytest-benchmark's file."""

from __future__ import annotations

import json
import platform
from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import mean, median, quantiles, stdev

from fsdpbench.answers.check.history import git_says
from fsdpbench.answers.check.metrics import METRICS
from fsdpbench.answers.check.records.baseline import replace_file
from fsdpbench.answers.check.records.entries import Entry
from fsdpbench.answers.check.records.sides import Side
from fsdpbench.base.errors import written
from fsdpbench.engine.results.records import Status


def export(side: Side, exports: Iterable[tuple[str, Path]]) -> None:
    """Write what ended well of `side` for `asv` (its `results_dir`), or for `benchmark` (a file that
    `pytest-benchmark compare` reads), each to its path. Raises `BenchError`, also outside of git."""
    entries = {name: entry for name, entry in side.entries.items() if entry.status is Status.OK}
    facts = dict(side.surroundings.facts)
    for kind, path in exports:
        said = git_says(Path(), "show", "--no-patch", "--format=%H,%ct,%cI", "HEAD", of="--export")
        commit, seconds, date = said.strip().split(",")
        if kind == "asv":
            _write_asv(entries, facts, commit, int(seconds), path)
            continue
        every = {"machine_info": facts, "commit_info": {"id": commit, "time": date}, "datetime": date}
        benchmarks = [_benchmark(name, entry) for name, entry in entries.items()]
        replace_file(path, json.dumps(every | {"benchmarks": benchmarks, "version": "5"}, indent=1))


def _benchmark(name: str, entry: Entry) -> dict[str, object]:
    """Return the step time of a configuration, over its runs, and every other figure beside it."""
    others = {metric: median(values) for metric in METRICS if (values := entry.values(metric))}
    runs = entry.values("step_time_s")
    q1, _, q3 = quantiles(runs, n=4, method="inclusive") if len(runs) > 1 else runs * 3
    least, most, spread = min(runs), max(runs), stdev(runs) if len(runs) > 1 else 0.0
    stats: dict[str, object] = {"min": least, "max": most, "mean": mean(runs), "median": median(runs)}
    stats |= {"stddev": spread, "stddev_outliers": 0, "iqr_outliers": 0}
    stats |= {"q1": q1, "q3": q3, "iqr": q3 - q1, "ld15iqr": least, "hd15iqr": most, "total": sum(runs)}
    stats |= {"rounds": len(runs), "iterations": 1, "ops": 1 / mean(runs), "outliers": "0;0", "data": runs}
    named = {"group": "step_time_s", "name": name, "fullname": f"fsdpbench::{name}", "param": None}
    return {**named, "params": None, "extra_info": others, "options": {}, "stats": stats}


def _write_asv(
    entries: Mapping[str, Entry], facts: Mapping[str, str], commit: str, seconds: int, folder: Path
) -> None:
    """Write a benchmark for each figure, whose parameter is the configuration."""
    machine = facts["hardware" if facts["device"] == "sim" else "processor"].replace("/", "-")
    about = {"machine": machine, "cpu": machine, "os": "", "arch": "", "num_cpu": "", "ram": ""}
    parameters, environment = [[repr(name) for name in entries]], f"torch{facts['torch']}"
    known, results = {}, {}
    for metric, row in METRICS.items():
        values = [median(runs) if (runs := entry.values(metric)) else None for entry in entries.values()]
        if any(value is not None for value in values):
            results[metric] = [values, parameters, "1"]
            unit = {"s": "seconds", "B": "bytes"}.get(row.unit, "count")
            asked = {"name": metric, "type": "track", "unit": unit, "params": parameters, "version": "1"}
            known[metric] = asked | {"param_names": ["configuration"], "timeout": 60.0, "code": ""}
    result = {"commit_hash": commit, "env_name": environment, "date": seconds * 1000, "params": about}
    result |= {"python": platform.python_version(), "requirements": {"torch": facts["torch"]}, "env_vars": {}}
    result |= {"result_columns": ["result", "params", "version"], "results": results, "durations": {}}
    with written(folder):
        (folder / machine).mkdir(parents=True, exist_ok=True)
    for path, content, version in (
        (Path(machine, "machine.json"), about, 1),
        (Path(machine, f"{commit[:8]}-{environment}.json"), result, 2),
        (Path("benchmarks.json"), known, 2),
    ):
        replace_file(folder / path, json.dumps(content | {"version": version}))
