"""A side's figures for the history pages of other tools: asv's folder of results, pytest-benchmark's file."""

from __future__ import annotations

import datetime
import json
import platform
import subprocess
from collections.abc import Mapping
from pathlib import Path
from statistics import mean, median, quantiles, stdev

from fsdpbench.answers.check.metrics import METRICS
from fsdpbench.answers.check.records.baseline import replace_file
from fsdpbench.answers.check.records.entries import Entry
from fsdpbench.answers.check.records.sides import Side
from fsdpbench.base.errors import UsageError, written
from fsdpbench.engine.results.records import Status

_UNITS = {"s": "seconds", "B": "bytes"}


def export(side: Side, kind: str, path: Path) -> None:
    """Write what ended well of `side` for `asv` (its `results_dir`), or for `benchmark` (a file that
    `pytest-benchmark compare` reads). Raises `BenchError`."""
    entries = {name: entry for name, entry in side.entries.items() if entry.status is Status.OK}
    facts = side.surroundings.facts
    commit, date = _commit()
    if kind == "asv":
        _write_asv(entries, facts, commit, date, path)
        return
    now = datetime.datetime.now(datetime.UTC).isoformat()
    content = {
        "machine_info": {**facts, "node": platform.node(), "python_version": platform.python_version()},
        "commit_info": {
            "id": commit,
            "time": datetime.datetime.fromtimestamp(date, datetime.UTC).isoformat(),
        },
        "benchmarks": [_benchmark(name, entry) for name, entry in entries.items()],
        "datetime": now,
        "version": "5.0.0",
    }
    replace_file(path, json.dumps(content, indent=1))


def _benchmark(name: str, entry: Entry) -> dict[str, object]:
    """Return the step time of a configuration, over its runs, and every other figure beside it."""
    others = {metric: median(values) for metric in METRICS if (values := entry.values(metric))}
    runs = entry.values("step_time_s")
    q1, _, q3 = quantiles(runs, n=4, method="inclusive") if len(runs) > 1 else runs * 3
    spread = stdev(runs) if len(runs) > 1 else 0.0
    stats = {"min": min(runs), "max": max(runs), "mean": mean(runs), "stddev": spread, "median": median(runs)}
    stats |= {"q1": q1, "q3": q3, "iqr": q3 - q1, "ld15iqr": min(runs), "hd15iqr": max(runs), "data": runs}
    stats |= {"rounds": len(runs), "iterations": 1, "total": sum(runs), "ops": 1 / mean(runs)}
    stats |= {"iqr_outliers": 0, "stddev_outliers": 0, "outliers": "0;0"}
    named = {"group": "step_time_s", "name": name, "fullname": f"fsdpbench::{name}", "params": None}
    return {**named, "param": None, "extra_info": others, "options": {}, "stats": stats}


def _write_asv(
    entries: Mapping[str, Entry], facts: Mapping[str, str], commit: str, date: int, folder: Path
) -> None:
    """Write a benchmark for each figure, whose parameter is the configuration; `date` in seconds."""
    machine = f"{facts['hardware']}-{facts['device']}" if facts["device"] == "sim" else facts["processor"]
    about = {name: "" for name in ("os", "arch", "cpu", "num_cpu", "ram")}
    about |= {"machine": machine, "os": platform.system(), "cpu": facts["hardware"]}
    parameters, values = [[repr(name) for name in entries]], {}
    for metric in METRICS:
        every = [entry.values(metric) for entry in entries.values()]
        if any(every):
            values[metric] = [[median(runs) if runs else None for runs in every], parameters, "1"]
    python, environment = ".".join(platform.python_version_tuple()[:2]), f"torch{facts['torch']}"
    result = {
        **{"commit_hash": commit, "env_name": environment, "date": date * 1000, "params": about},
        **{"python": python, "requirements": {"torch": facts["torch"]}, "env_vars": {}, "durations": {}},
        **{"result_columns": ["result", "params", "version"], "results": values, "version": 2},
    }
    known = {
        metric: {
            **{
                "name": metric,
                "type": "track",
                "unit": _UNITS.get(METRICS[metric].unit, "count"),
                "code": "",
            },
            **{"param_names": ["configuration"], "params": parameters, "timeout": 60.0, "version": "1"},
        }
        for metric in values
    }
    with written(folder):
        (folder / machine).mkdir(parents=True, exist_ok=True)
    replace_file(folder / machine / "machine.json", json.dumps({**about, "version": 1}))
    replace_file(folder / machine / f"{commit[:8]}-{environment}.json", json.dumps(result))
    replace_file(folder / "benchmarks.json", json.dumps({**known, "version": 2}))


def _commit() -> tuple[str, int]:
    """Return the commit of the working folder and its time (seconds). Raises `UsageError` outside of git."""
    command = ["git", "show", "--no-patch", "--format=%H %ct", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        raise UsageError("--export: histories go by commits, and this folder has none of git's") from None
    commit, _, seconds = done.stdout.strip().partition(" ")
    return commit, int(seconds)
