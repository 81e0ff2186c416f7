"""Files of other configurations, figures changed together, edited baselines: what the gate must say of each.

As in `gate_mutations.py`, the oracle knows what was done and which way each figure gets worse, and nothing of
the gate: a figure that is worse is never passed (1, or 3), and what contradicts itself is not judged (3).
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from .gate_edits import FIGURES, Files, at, baseline_run, in_content, name_of, put, read, record_of, write
from .gate_mutations import OK, UNKNOWN, WORSE, Case

FACTORS = (0, 0.33, 0.5, 1.5, 3, 5)
_SPEEDS = (
    "samples_per_s_per_gpu",
    "tokens_per_s_per_gpu",
    "tflops_per_gpu",
    "hardware_tflops_per_gpu",
    "mfu",
    "hfu",
)
_PARTS = tuple(f"time_s.{part}" for part in ("compute_only", "overlapped", "exposed_communication", "idle"))
_STEP = ("step_time_s", "measured.step_times_s")
GROUPS = {
    "the step alone": ("step_time_s",),
    "its samples alone": ("measured.step_times_s",),
    "the step and its samples": _STEP,
    "the step and its interval": ("step_time_s", "interval.step_time_s"),
    "the step, its samples and its interval": (*_STEP, "interval.step_time_s"),
    "the speeds": _SPEEDS,
    "the speeds and their intervals": (*_SPEEDS, *(f"interval.{speed}" for speed in _SPEEDS)),
    "FLOPs": ("tflops_per_gpu", "mfu"),
    "FLOPs with recomputation": ("hardware_tflops_per_gpu", "hfu"),
    "the traced step alone": ("traced_step_time_s",),
    "the traced step and its parts": ("traced_step_time_s", *_PARTS),
    "the traced step and the speeds": ("traced_step_time_s", *_SPEEDS),
    "idle time": ("time_s.idle",),
    "computation": ("time_s.compute_only",),
    "all computation": ("time_s.compute_only", "time_s.overlapped"),
    "exposed communication": ("time_s.exposed_communication",),
    "overlap": ("overlap_fraction",),
    "overlap and its time": ("overlap_fraction", "time_s.overlapped"),
    "repeats alone": ("repeats.step_time_s",),
    "samples of repeats alone": ("repeats.samples_s",),
    "a collective's exposed time": ("communication.all_gather.exposed_s",),
    "late time": ("late_all_gathers.late_s",),
}
"""Dotted places in result.json that are scaled by one factor; one group is never all that rests on it."""


def cross_file(files: Files, kind: str) -> Iterator[Case]:
    """Whole files and folders in other places."""

    def over(*names: str, back: bool = False) -> Callable[[Files], None]:
        """The second configuration's files over the first one's; `back`: and the first one's over its own."""

        def mutate(copy: Files) -> None:
            first, second = copy.first_runs[:2]
            for name in names:
                other = (first / name).read_bytes()
                shutil.copy(second / name, first / name)
                if back:
                    (second / name).write_bytes(other)

        return mutate

    def renamed(copy: Files) -> None:
        first = copy.first_runs[0]
        shutil.copytree(first, copy.folder / f"{first.name[:-8]}deadbeef")
        file = copy.folder / "sweep.toml"
        file.write_text(file.read_text().replace(first.name, f"{first.name[:-8]}deadbeef"))

    names = ["result.json", "config.json"]
    names += ["trace/rank0_record.json"] if (files.first_runs[0] / "trace").is_dir() else []
    for name in names:
        for back in (False, True):
            way = "exchanged" if back else "of another configuration"
            yield Case(f"{kind}: {name} {way}", over(name, back=back), frozenset({UNKNOWN}))
    for back in (False, True):
        both = over("result.json", "config.json", back=back)
        yield Case(f"{kind}: both files of another folder, back {back}", both, frozenset({UNKNOWN}))
    yield Case(f"{kind}: folder under another name", renamed, frozenset({UNKNOWN}))
    for name, value in {
        "gpus_per_node": 4,
        "model": "another",
        "settings": {"batch": 64},
        "software": "fsdp1-2022",
        "gpus": 64,
        "device": "cuda",
        "hardware": "h100-80gb",
    }.items():
        for file, path in (("config.json", (name,)), ("result.json", ("config", name))):
            mutate = _in_file(file, path, value)
            yield Case(f"{kind}: {name} in {file}", mutate, frozenset({UNKNOWN}))


def _in_file(file: str, path: tuple[str, ...], value: Any) -> Callable[[Files], None]:
    def mutate(copy: Files) -> None:
        place: Path = copy.first_runs[0] / file
        content = read(place)
        put(content, path, value)
        write(place, content)

    return mutate


def coordinated(files: Files, kind: str) -> Iterator[Case]:
    """Each group of figures by each factor, in all runs of the first configuration."""
    result = read(files.runs[0] / "result.json")
    for label, group in GROUPS.items():
        known = [name for name in group if _known(result, name)]
        # Of what is written for these tests, not all that binds a figure is there.
        if not known or ("interval" not in result and len(files.runs) == 1):
            continue
        for factor in FACTORS:
            if len(files.runs) > 1 and 0.3 < factor < 2 and label.startswith("the traced"):
                continue  # a pass of its own, which may be so much slower
            if label == "the speeds and their intervals" and len(known) < len(group):
                continue
            expected = {UNKNOWN} | ({WORSE} if _can_be_worse(known, factor) else set())
            if label == "a collective's exposed time" and factor == 1.5:
                expected |= {OK}  # it is bounded by others, and not yet beyond them
            yield Case(f"{kind}: {label} x {factor}", _scaled(known, factor), frozenset(expected))


def _known(result: Any, name: str) -> bool:
    value = at(result, tuple(name.split(".")))
    return bool(value) and not (isinstance(value, list) and not any(value))


def _can_be_worse(names: list[str], factor: float) -> bool:
    """Whether a judged figure in these places gets worse by the factor."""
    ways = {".".join(path): way for path, way, _ in FIGURES.values()} | {"time_s.overlapped": +1}
    return any(ways.get(name, 0) * (factor - 1) > 0 for name in names)


def _times(value: Any, factor: float) -> Any:
    if isinstance(value, list):
        return [_times(each, factor) for each in value]
    scaled = value * factor
    return int(scaled) if isinstance(value, int) and scaled == int(scaled) else scaled


def _scaled(names: list[str], factor: float) -> Callable[[Files], None]:
    def mutate(copy: Files) -> None:
        for run in copy.runs:
            content = read(run / "result.json")
            for name in names:
                path = tuple(name.split("."))
                if at(content, path) is not None:
                    put(content, path, _times(at(content, path), factor))
            write(run / "result.json", content)

    return mutate


def changed_together(files: Files, factors: Mapping[str, float]) -> Case:
    """Judged figures by a factor each, in all runs: never passed where one is worse by it."""
    names = {".".join(FIGURES[figure][0]): factor for figure, factor in factors.items()}

    def mutate(copy: Files) -> None:
        for name, factor in names.items():
            _scaled([name], factor)(copy)

    worse = any(FIGURES[figure][1] * (factor - 1) > 0 for figure, factor in factors.items())
    expected = {UNKNOWN, WORSE if worse else OK}
    if worse and len(files.runs) > 1 and all(0.3 < factor < 3 for factor in factors.values()):
        expected |= {OK}  # half as much again may be noise of the runs
    return Case(f"together: {dict(factors)}", mutate, frozenset(expected))


def in_the_baseline(files: Files, kind: str) -> Iterator[Case]:
    """Each figure of the baseline by each factor, in all runs: what it was better by is worse now."""
    name = name_of(files.first_runs[0])
    for figure, value in baseline_run(read(files.baseline), name, -1).items():
        if not value:
            continue
        for factor in FACTORS:
            worse = FIGURES.get(figure, ((), 0, True))[1] * (1 - factor) > 0
            expected = {UNKNOWN, WORSE} if worse else {UNKNOWN, OK}
            if len(files.runs) > 1 and 0.3 < factor < 3:
                expected |= {OK, WORSE}
            if figure in ("step_time_s", "overlap_fraction", "exposed_communication_s", "idle_s") and (
                len(files.runs) == 1
            ):
                expected = {UNKNOWN}
            yield Case(
                f"{kind}: baseline's {figure} x {factor}",
                _scaled_old(name, figure, factor),
                frozenset(expected),
            )


def _scaled_old(name: str, figure: str, factor: float) -> Callable[[Files], None]:
    def change(content: Any) -> None:
        for run in record_of(content, name)["runs"]:
            run[figure] = _times(run[figure], factor)

    return in_content(change)
