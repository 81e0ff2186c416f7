"""How the files of a sweep and its baseline are changed, by where figures lie in them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Figure -> where it lies in result.json, which way is worse, whether a real step can have 0 of it.
FIGURES: dict[str, tuple[tuple[str, ...], int, bool]] = {
    "step_time_s": (("step_time_s",), +1, False),
    "fastest_step_s": (("measured", "step_times_s"), +1, False),
    "exposed_communication_s": (("time_s", "exposed_communication"), +1, True),
    "compute_s": (("time_s", "compute_only"), +1, True),
    "overlap_fraction": (("overlap_fraction",), -1, True),
    "peak_allocated_bytes": (("peak_memory_bytes", "allocated"), +1, False),
    "peak_active_bytes": (("peak_memory_bytes", "active"), +1, False),
    "peak_reserved_bytes": (("peak_memory_bytes", "reserved"), +1, False),
    "alloc_retries_per_step": (("alloc_retries_per_step",), +1, True),
    "ooms": (("ooms",), +1, True),
    "all_gather_count": (("communication", "all_gather", "count"), +1, False),
    "all_gather_bytes": (("communication", "all_gather", "bytes"), +1, False),
    "reduce_scatter_count": (("communication", "reduce_scatter", "count"), +1, False),
    "reduce_scatter_bytes": (("communication", "reduce_scatter", "bytes"), +1, False),
    "all_reduce_count": (("communication", "all_reduce", "count"), +1, True),
    "prefetched_all_gathers": (("late_all_gathers", "prefetched"), -1, True),
    "late_all_gathers": (("late_all_gathers", "late"), +1, True),
    "kernels": (("work", "kernels"), +1, False),
    "copies": (("work", "copies"), +1, True),
    "limiter_waits": (("work", "limiter_waits"), 0, True),
}

SLOWER = 3
"""More than the slowest run of the recorded pool is to its fastest one: no rank test can miss it, however
many figures are compared beside it."""

MISSING = object()


@dataclass(frozen=True)
class Files:
    """A sweep's folder, a baseline made of it, and thresholds; a case changes a copy of them."""

    folder: Path
    baseline: Path
    thresholds: Path

    @property
    def first_runs(self) -> list[Path]:
        return sorted(path for path in self.folder.iterdir() if path.is_dir() and ".run" not in path.name)

    @property
    def runs(self) -> list[Path]:
        """Every run's folder of the first configuration, the first one first."""
        first = self.first_runs[0]
        return sorted(self.folder.glob(f"{first.name}*"), key=lambda path: (len(path.name), path.name))

    def copied(self, place: Path) -> Files:
        shutil.copytree(self.folder, place / "sweep")
        shutil.copy(self.baseline, place / "baseline.json")
        shutil.copy(self.thresholds, place / "thresholds.toml")
        return Files(place / "sweep", place / "baseline.json", place / "thresholds.toml")


def at(content: Any, path: tuple[str, ...]) -> Any:
    for key in path:
        content = content.get(key) if isinstance(content, dict) else None
    return content


def read(path: Path) -> Any:
    return json.loads(path.read_text())


def write(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content))


def name_of(folder: Path) -> str:
    name: str = read(folder / "config.json")["name"]
    return name


def put(content: Any, path: tuple[str, ...], value: Any) -> None:
    for key in path[:-1]:
        content = content[key]
    if value is MISSING:
        content.pop(path[-1], None)
    else:
        content[path[-1]] = value


def in_result(run: int, path: tuple[str, ...], value: Any) -> Callable[[Files], None]:
    def mutate(files: Files) -> None:
        file = files.runs[run] / "result.json"
        content = read(file)
        put(content, path, value)
        write(file, content)

    return mutate


def in_every_run(
    files: Files, path: tuple[str, ...], change: Callable[[Any], Any]
) -> Callable[[Files], None]:
    """Of the first configuration; of a repeated first run its own step time."""

    def mutate(files: Files) -> None:
        for run in files.runs:
            content = read(run / "result.json")
            put(content, path, change(at(content, path)))
            if path == ("step_time_s",) and "repeats" in content:
                steps = content["repeats"]["step_time_s"]
                content["repeats"]["step_time_s"] = [change(step) for step in steps]
            write(run / "result.json", content)

    return mutate


def slower(files: Files, which: int) -> Callable[[Files], None]:
    """Every run of a configuration takes `SLOWER` times as long."""

    def mutate(files: Files) -> None:
        first = files.first_runs[which]
        for run in files.folder.glob(f"{first.name}*"):
            content = read(run / "result.json")
            content["step_time_s"] *= SLOWER
            if "repeats" in content:
                content["repeats"]["step_time_s"] = [
                    SLOWER * step for step in content["repeats"]["step_time_s"]
                ]
            content["measured"]["step_times_s"] = [
                SLOWER * step for step in content["measured"]["step_times_s"]
            ]
            write(run / "result.json", content)

    return mutate


def both(*changes: Callable[[Files], object]) -> Callable[[Files], None]:
    def mutate(files: Files) -> None:
        for change in changes:
            change(files)

    return mutate


def one_set(content: Any) -> Any:
    (figures,) = content["sets"].values()
    return figures


def record_of(content: Any, name: str) -> Any:
    return one_set(content)["configurations"][name]


def run_of(content: Any, name: str) -> Any:
    return record_of(content, name)["runs"][-1]


def baseline_run(content: Any, name: str, run: int) -> Mapping[str, Any]:
    found: Mapping[str, Any] = record_of(content, name)["runs"][run]
    return found


def in_content(change: Callable[[Any], object]) -> Callable[[Files], None]:
    def mutate(files: Files) -> None:
        content = read(files.baseline)
        change(content)
        write(files.baseline, content)

    return mutate


def in_record(name: str, key: str, value: Any) -> Callable[[Files], None]:
    return in_content(lambda content: put(record_of(content, name), (key,), value))


def in_baseline(name: str, run: int, figure: str, value: Any) -> Callable[[Files], None]:
    return in_content(lambda content: put(record_of(content, name)["runs"][run], (figure,), value))


def without_old(name: str) -> Callable[[Files], None]:
    return in_content(lambda content: one_set(content)["configurations"].pop(name))


def old_status(name: str, status: str) -> Callable[[Files], None]:
    """As a baseline would hold it: figures of what ended well alone."""
    changes: dict[str, Any] = {"status": status} if status == "ok" else {"status": status, "runs": [{}]}
    return in_content(lambda content: record_of(content, name).update(changes))


def new_status(run: int, status: str) -> Callable[[Files], None]:
    """`run` 0: what did not work at first is not repeated."""

    def mutate(files: Files) -> None:
        if status == "ok":
            return
        file = files.runs[run] / "result.json"
        content = read(file)
        content |= {"status": status, "cause": {"message": "rank 0: it was made so", "log": "stderr.log"}}
        figures = {path[0] for path, _, _ in FIGURES.values()}
        content |= dict.fromkeys(figures) if status != "race" else {}
        content.pop("repeats", None)
        write(file, content)
        if run == 0:
            for further in files.runs[1:]:
                shutil.rmtree(further)

    return mutate


def cut_to(size: int) -> Callable[[Files], object]:
    return lambda files: files.baseline.write_bytes(files.baseline.read_bytes()[:size])


def write_baseline(raw: bytes) -> Callable[[Files], object]:
    return lambda files: files.baseline.write_bytes(raw)


def write_result(raw: bytes) -> Callable[[Files], object]:
    return lambda files: (files.runs[-1] / "result.json").write_bytes(raw)


def cut_result(part: float) -> Callable[[Files], object]:
    def mutate(files: Files) -> None:
        file = files.runs[-1] / "result.json"
        raw = file.read_bytes()
        file.write_bytes(raw[: int(len(raw) * part)])

    return mutate


def write_thresholds(text: str) -> Callable[[Files], object]:
    return lambda files: files.thresholds.write_text(text)
