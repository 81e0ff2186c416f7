"""Sweeps and baselines for the gate's mutations: written from what is committed, or run here."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from typing import Any

from fsdpbench.answers.check.records.baseline import torch_minor
from fsdpbench.reports.result_figures import spread
from fsdpbench.sweep.runner import first_run, merged

from .gate_edits import FIGURES, Files, put, read, write

CommandLine = Callable[..., subprocess.CompletedProcess[str]]

CI = Path(__file__).parents[3] / "ci"
RUNS = 12
SPEEDS = ("samples_per_s_per_gpu", "tokens_per_s_per_gpu", "tflops_per_gpu", "hardware_tflops_per_gpu")
TINY = "layers=2,d_model=64,heads=2,vocab=128,max_seq=32"
SIMULATED = ["--model", "gpt-125m", "--shape", "layers=2", "--device", "sim", "--gpus", "8", "--seq", "256"]
MEASURED = ["--model", "gpt", "--shape", TINY, "--device", "cpu", "--gpus", "2", "--repeat", "2"]


def committed(place: Path) -> Files:
    """Two simulated configurations with the figures of the committed baseline, as a sweep leaves them."""
    committed_baseline = read(CI / "baseline.json")
    figures = next(iter(committed_baseline["sets"].values()))
    figures["configurations"] = dict(list(figures["configurations"].items())[:2])
    figures["surroundings"]["torch"] = torch_minor()
    baseline = place / "baseline.json"
    write(baseline, {**committed_baseline, "sets": {torch_minor(): figures}})
    for name, record in figures["configurations"].items():
        key = f"{len(name):08x}"
        result = a_result(figures["surroundings"], record["runs"][0])
        write_run(place / "sweep" / f"{name}-{key}", name, result)
    return finished(place)


def repeated(place: Path, fsdpbench: CommandLine) -> Files:
    """Two measured configurations of as many runs as the recorded pool's first ones, and a baseline made of
    them."""
    pool = read(CI / "measured" / "cpu_pool.json")["runs"][:RUNS]
    for name in ("impl-fsdp2-block", "impl-fsdp2-root"):
        for number, run in enumerate(pool, 1):
            result = a_result({"device": "cpu", "model": "gpt"}, a_measured_run(run["step_times_s"]))
            folder = f"{name}-{len(name):08x}" + (f".run{number}" if number > 1 else "")
            if number == 1:
                result["repeats"] = merged_runs([each["step_times_s"] for each in pool])
                result["step_time_s"] = median(result["repeats"]["step_time_s"])
            write_run(place / "sweep" / folder, name, result)
    return with_baseline(place, fsdpbench)


def swept(place: Path, fsdpbench: CommandLine, *words: str) -> Files:
    """A sweep that is run here; its baseline; of repeated ones the runs of the recorded pool."""
    ran = fsdpbench("sweep", *words, "--system", "impl-fsdp1", "--wrap", "block", "-o", str(place / "ran"))
    assert ran.returncode == 0, ran.stderr
    (place / "sweep").mkdir()
    shutil.copy(place / "ran" / "sweep.toml", place / "sweep")
    for folder in (path for path in (place / "ran").iterdir() if (path / "result.json").is_file()):
        (place / "sweep" / folder.name).mkdir()
        for file in ("config.json", "result.json"):
            shutil.copy(folder / file, place / "sweep" / folder.name)
        if "--repeat" not in words:  # of repeated ones the figures are not those of their records
            ignored = shutil.ignore_patterns("*.gz")
            shutil.copytree(folder / "trace", place / "sweep" / folder.name / "trace", ignore=ignored)
    if "--repeat" in words:
        with_pool(place / "sweep")
    return with_baseline(place, fsdpbench, names=False)


def with_pool(sweep: Path) -> None:
    """As many runs of each configuration as it takes to judge, with the recorded pool's step times."""
    pool = [run["step_times_s"] for run in read(CI / "measured" / "cpu_pool.json")["runs"][:RUNS]]
    for first in [path for path in sweep.iterdir() if path.is_dir() and ".run" not in path.name]:
        second = read(sweep / f"{first.name}.run2" / "result.json")
        for number, steps in enumerate(pool[1:], 2):
            result = with_samples(second, steps)
            folder = sweep / f"{first.name}.run{number}"
            folder.mkdir(exist_ok=True)
            shutil.copy(first / "config.json", folder)
            write(folder / "result.json", result)
        own = with_samples(first_run(read(first / "result.json")), pool[0])
        others = [read(sweep / f"{first.name}.run{number}" / "result.json") for number in range(2, RUNS + 1)]
        write(first / "result.json", merged(own, others))


def with_samples(result: dict[str, Any], steps: list[float]) -> dict[str, Any]:
    """A run that took these steps: the times of its trace and its speeds are as much longer or shorter."""
    step = median(steps)
    longer = step / result["step_time_s"]
    speeds = {name: result[name] / longer for name in SPEEDS if result.get(name) is not None}
    kinds = result["communication"].items()
    scaled = {
        kind: {
            key: value * longer if value and key.endswith("_s") and "per_s" not in key else value
            for key, value in figures.items()
        }
        for kind, figures in kinds
    }
    for figures in scaled.values():
        for key in ("bus_bandwidth_bytes_per_s", "best_bus_bandwidth_bytes_per_s"):
            figures[key] = figures[key] and figures[key] / longer
    late = result["late_all_gathers"]
    causes = {
        cause: {"count": each["count"], "time_s": each["time_s"] * longer}
        for cause, each in late["causes"].items()
    }
    measured = {**result["measured"], "step_times_s": steps, "spread": spread(steps)}
    return {
        **result,
        **speeds,
        "step_time_s": step,
        "traced_step_time_s": result["traced_step_time_s"] * longer,
        "time_s": {part: value * longer for part, value in result["time_s"].items()},
        "communication": scaled,
        "late_all_gathers": {**late, "late_s": late["late_s"] * longer, "causes": causes},
        "measured": measured,
    }


def merged_runs(pool: list[list[float]]) -> dict[str, Any]:
    """As the store merges them into the first run's result."""
    steps = [median(samples) for samples in pool]
    return {"runs": len(pool), "failed": 0, "step_time_s": steps, "samples_s": pool}


def with_baseline(place: Path, fsdpbench: CommandLine, names: bool = True) -> Files:
    files = finished(place, names)
    done = fsdpbench("baseline", "create", str(files.folder), str(files.baseline))
    assert done.returncode == 0, done.stderr
    return files


def finished(place: Path, names: bool = True) -> Files:
    """With the space's file, if asked for, and thresholds that allow nothing."""
    files = Files(place / "sweep", place / "baseline.json", place / "thresholds.toml")
    if names:
        points = [path.name for path in files.first_runs]
        (files.folder / "sweep.toml").write_text(
            f'schema = 1\nmodel = "gpt"\npoints = {json.dumps(points)}\n'
        )
    shutil.copy(CI / "thresholds.toml", files.thresholds)
    return files


def write_run(folder: Path, name: str, result: Mapping[str, Any]) -> None:
    """Its settings are named as it is, so that no other configuration's files pass for its own."""
    folder.mkdir(parents=True)
    config = {**result["config"], "settings": {"as_named": name}}
    write(folder / "config.json", {**config, "name": name, "key": folder.name.split(".run")[0][-8:]})
    write(folder / "result.json", {**result, "config": config})


def a_result(surroundings: Mapping[str, str], figures: Mapping[str, Any]) -> dict[str, Any]:
    """A result with these figures, and of these surroundings."""
    shape = {
        key.removeprefix("shape "): value for key, value in surroundings.items() if key.startswith("shape ")
    }
    versions = {"torch": f"{torch_minor()}.0", "python": "3.11.7"}
    result: dict[str, Any] = {
        "schema": 1,
        "status": "ok",
        "cause": None,
        "device": surroundings["device"],
        "hardware": {"name": surroundings.get("hardware", "cpu")},
        "config": {"model": surroundings["model"], "shape": shape, "gpus_per_node": 8, "data": None},
        "environment": {"versions": versions, "machine": {"processor": "a processor", "cores": 2}},
        "time_s": {"overlapped": 0},
        "measured": {"step_times_s": [figures["step_time_s"]]},
        "peak_memory_bytes": {},
        "communication": {
            kind: {"count": 0, "bytes": None} for kind in ("all_gather", "reduce_scatter", "all_reduce")
        },
        "late_all_gathers": {},
        "work": {},
    }
    for figure, (path, _, _) in FIGURES.items():
        if figure in figures:
            put(result, path, figures[figure])
    times = result["time_s"]
    exposed, overlap = times["exposed_communication"], figures["overlap_fraction"]
    times["overlapped"] = figures.get("overlapped_s", overlap * exposed / (1 - overlap))
    times["compute_only"] -= times["overlapped"]
    times["idle"] = max(figures["step_time_s"] - figures["compute_s"] - exposed, 0.0)
    result["traced_step_time_s"] = figures["compute_s"] + exposed + times["idle"]
    if surroundings["device"] == "sim":
        return result
    return result | {"peak_memory_bytes": None, "alloc_retries_per_step": None, "ooms": None}


def a_measured_run(steps: list[float]) -> dict[str, Any]:
    """Of a run whose step times were recorded; the rest is what such a run on a CPU has."""
    return {
        "step_time_s": median(steps),
        "fastest_step_s": steps,
        "exposed_communication_s": min(steps) / 10,
        "compute_s": min(steps) / 2,
        "overlap_fraction": 0.25,
        "all_gather_count": 5,
        "all_gather_bytes": 40960,
        "reduce_scatter_count": 3,
        "reduce_scatter_bytes": 40960,
        "all_reduce_count": 0,
        "prefetched_all_gathers": 2,
        "late_all_gathers": 3,
        "kernels": 812,
        "copies": 24,
        "limiter_waits": 0,
    }
