"""Mutations of a real sweep and its baseline, and what the gate's contract says of each (docs/gate.md).

The oracle knows what was done to the files, and where figures lie in them; it calls nothing of the gate.
`expected` are the exit codes that the contract allows: several where a file may be refused (2) or a figure
judged by name (3).
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

OK, WORSE, USAGE, UNKNOWN, FAILED = 0, 1, 2, 3, 4

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
BROKEN: dict[str, Any] = {
    "missing": MISSING,
    "null": None,
    "nan": math.nan,
    "infinite": math.inf,
    "minus infinite": -math.inf,
    "negative": -3,
    "text": "1.5",
    "empty text": "",
    "true": True,
    "list": [1.5],
    "object": {"value": 1},
    "beyond 2^63": 2**64,
    "1e300": 1e300,
}
ANSWERS = ("ok", "oom", "not_applicable")
STATUSES = (*ANSWERS, "error", "crash", "timeout", "race")


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


@dataclass(frozen=True)
class Case:
    """`words`: what an error must name where the code is 3."""

    label: str
    mutate: Callable[[Files], object]
    expected: frozenset[int]
    words: tuple[str, ...] = ()


def every_case(files: Files, side_words: str) -> Iterator[Case]:
    """All systematic mutations of these files."""
    yield Case(f"{side_words}: nothing", lambda files: None, frozenset({OK}))
    yield from broken_figures(files, side_words)
    yield from changed_figures(files, side_words)
    yield from ended_otherwise(files, side_words)
    yield from broken_files(files, side_words)
    yield from thresholds_that_are_none(side_words)


def broken_figures(files: Files, side_words: str) -> Iterator[Case]:
    """Every known figure x every corruption x both sides, and each again beside a regression elsewhere."""
    result, name = read(files.runs[-1] / "result.json"), name_of(files.first_runs[0])
    for figure, (path, _, can_be_0) in FIGURES.items():
        value = at(result, path)
        if value is None or figure not in baseline_run(read(files.baseline), name, -1):
            continue
        impossible = dict(BROKEN) if can_be_0 or value == 0 else {**BROKEN, "zero": 0}
        for label, broken in impossible.items():
            if figure == "fastest_step_s" and label == "list":
                broken = [1.5, math.nan]  # of samples, one
            told = f"{side_words}: {figure} {label}"
            new = in_result(-1, path, broken)
            words = (name, "not usable" if label == "beyond 2^63" else figure.removesuffix("_s"))
            yield Case(f"{told}, newer", new, frozenset({UNKNOWN}), words)
            old = in_baseline(name, -1, figure, broken)
            yield Case(f"{told}, older", old, frozenset({UNKNOWN, USAGE}))
            yield Case(f"{told}, newer, and worse elsewhere", both(new, slower(files, 1)), frozenset({WORSE}))
    for label, broken in BROKEN.items():
        if "repeats" in read(files.runs[0] / "result.json"):
            for inner in ((), ("step_time_s",), ("samples_s",)):
                mutate = in_result(0, ("repeats", *inner), broken)
                codes = {OK} if not inner and label in ("missing", "null") else {UNKNOWN}
                if codes == {UNKNOWN}:
                    yield Case(f"{side_words}: repeats {inner} {label}", mutate, frozenset(codes), (name,))


def changed_figures(files: Files, side_words: str) -> Iterator[Case]:
    """Figures that can be: all runs worse, all better, a rounding's worth more, one byte more."""
    name = name_of(files.first_runs[0])
    result = read(files.runs[-1] / "result.json")
    for figure, (path, direction, _) in FIGURES.items():
        value = at(result, path)
        if value is None or isinstance(value, list) or figure == "compute_s":
            continue
        measured = len(files.runs) > 1
        if direction > 0:
            more = in_every_run(files, path, lambda old: old * 2 + (1 if isinstance(old, int) else 0.5))
            yield Case(f"{side_words}: {figure} doubled", more, frozenset({WORSE}))
        if direction < 0 and value:
            less = in_every_run(files, path, lambda old: old * 0.5)
            yield Case(f"{side_words}: {figure} halved", less, frozenset({WORSE}))
        if isinstance(value, float) and value and not measured:
            rounding = in_every_run(files, path, lambda old: math.nextafter(old, math.inf))
            yield Case(f"{side_words}: {figure} rounded", rounding, frozenset({OK}))
        if figure.endswith("_bytes"):
            byte = in_every_run(files, path, lambda old: old + 1)
            yield Case(f"{side_words}: {figure} one byte more", byte, frozenset({OK}))
    better = in_every_run(files, ("step_time_s",), lambda old: old * 0.999)
    if len(files.runs) == 1:
        yield Case(f"{side_words}: step_time_s better", better, frozenset({OK}))
    yield Case(f"{side_words}: {name} slower", slower(files, 0), frozenset({WORSE}), ())


def ended_otherwise(files: Files, side_words: str) -> Iterator[Case]:
    """Every status against every other, and a configuration that one side alone has."""
    name = name_of(files.first_runs[0])
    for before in STATUSES:
        for after in STATUSES:
            code = ended(before, after)
            words = (name, before, after) if code == UNKNOWN else ()
            mutate = both(old_status(name, before), new_status(0, after))
            yield Case(f"{side_words}: {before} to {after}", mutate, frozenset({code}), words)
    for after in STATUSES[1:]:
        code = WORSE  # one run of many, or the only one: it was ok
        yield Case(f"{side_words}: a run {after}", new_status(-1, after), frozenset({code}))
        mutate = both(without_old(name), new_status(0, after))
        code = OK if after in ANSWERS else FAILED
        yield Case(f"{side_words}: added with {after}", mutate, frozenset({code}))
        mutate = both(without_old(name), new_status(0, after), slower(files, 1))
        yield Case(f"{side_words}: added with {after}, worse elsewhere", mutate, frozenset({WORSE}))
    for label, status in (("unknown", "splendid"), ("null", None), ("number", 3), ("missing", MISSING)):
        new, codes = in_result(-1, ("status",), status), frozenset({UNKNOWN})
        yield Case(f"{side_words}: status {label}, newer", new, codes, (name,))
        old = in_record(name, "status", status)
        yield Case(f"{side_words}: status {label}, older", old, frozenset({UNKNOWN, USAGE}))


def broken_files(files: Files, side_words: str) -> Iterator[Case]:
    """Results and baselines that are cut short, gone, or something else."""
    name = name_of(files.first_runs[0])
    size = files.baseline.stat().st_size
    for part in range(1, 20):
        cut = size * part // 20
        yield Case(f"{side_words}: baseline cut at {part}/20", cut_to(cut), frozenset({USAGE}))
    for label, text in {
        "empty": "",
        "null": "null",
        "list": "[]",
        "deep": "[" * 5000,
        "latin-1": "\xff",
    }.items():
        raw = text.encode("latin-1")
        yield Case(f"{side_words}: baseline {label}", write_baseline(raw), frozenset({USAGE}))
        yield Case(f"{side_words}: result {label}", write_result(raw), frozenset({UNKNOWN}), (name,))
    for part in range(1, 10):
        yield Case(
            f"{side_words}: result cut at {part}/10", cut_result(part / 10), frozenset({UNKNOWN}), (name,)
        )
    for label, change in {
        "unknown figure": lambda content: run_of(content, name).update(step_tme_s=1.0),
        "unknown key": lambda content: content.update(sett={}),
        "unknown key in a set": lambda content: one_set(content).update(configuration={}),
        "runs are text": lambda content: record_of(content, name).update(runs="x"),
        "a run is text": lambda content: record_of(content, name).update(runs=["x"]),
        "device is null": lambda content: record_of(content, name).update(device=None),
        "another device": lambda content: record_of(content, name).update(device="cuda"),
        "sets is a list": lambda content: content.update(sets=[]),
        "space is a list": lambda content: content.update(space=[]),
        "schema 2": lambda content: content.update(schema=2),
    }.items():
        yield Case(f"{side_words}: baseline, {label}", in_content(change), frozenset({USAGE, UNKNOWN}))
    no_runs = in_content(lambda content: record_of(content, name).update(runs=[]))
    yield Case(f"{side_words}: baseline without runs", no_runs, frozenset({USAGE, UNKNOWN}))
    no_figures = in_content(lambda content: record_of(content, name).update(runs=[{}]))
    yield Case(f"{side_words}: baseline without figures", no_figures, frozenset({USAGE, UNKNOWN}))
    nothing = in_content(lambda content: one_set(content).update(configurations={}))
    yield Case(f"{side_words}: baseline without configurations", nothing, frozenset({UNKNOWN, USAGE}))
    gone = Case("", lambda files: shutil.rmtree(files.first_runs[0]), frozenset())
    yield Case(f"{side_words}: configuration gone", gone.mutate, frozenset({UNKNOWN}), (name,))
    worse_too = both(slower(files, 1), gone.mutate)
    yield Case(f"{side_words}: configuration gone, worse elsewhere", worse_too, frozenset({WORSE}))


def thresholds_that_are_none(side_words: str) -> Iterator[Case]:
    for text in (
        "[relative_change]\nstep_time_s = {}",
        "[measured]\nlevel = {}",
        "[measured]\nminimum_effect = {}",
        "[measured.minimum_effect]\nstep_time_s = {}",
        "[measured]\nminimum_effect = {{ peak_reserved_bytes = {} }}",
    ):
        for value in (
            "nan",
            "inf",
            "-inf",
            "-0.01",
            "'3'",
            "true",
            "[0.1]",
            "1e400",
            "99999999999999999999",
            "50",
        ):
            told = text.format(value)
            yield Case(f"{side_words}: thresholds {told!r}", write_thresholds(told), frozenset({USAGE}))
    for told, near in (
        ("[relative_chnge]\nstep_time_s = 0.1", "relative_change"),
        ("[relative_change]\nstep_tme_s = 0.1", "step_time_s"),
        ("[measured]\nlevels = 0.1", "level"),
        ("[measured]\nminimum_efect = { step_time_s = 0.1 }", "minimum_effect"),
        ("[measured.minimum_effect]\npeak_reserved = 0.1", "peak_reserved_bytes"),
        ("[mesured]\nlevel = 0.1", "measured"),
        ("level = 0.1", "known: relative_change, measured"),
        ("[measured]\nlevel = 0", "level"),
        ("[measured]\nlevel = 1", "level"),
        ("[relative_change", "TOML"),
        ("relative_change = 0.1", "table"),
        ("[[measured]]\nlevel = 0.1", "table"),
    ):
        yield Case(f"{side_words}: thresholds {told!r}", write_thresholds(told), frozenset({USAGE}), (near,))


def ended(before: str, after: str) -> int:
    """The contract's table of outcomes."""
    if before in ANSWERS and after not in ANSWERS:
        return WORSE
    if before == "ok":
        return OK if after == "ok" else WORSE
    if after == "ok" or (before == after and before in ANSWERS):
        return OK
    return UNKNOWN


def is_possible(figure: str, value: object) -> bool:
    """Whether a value that was put in a figure's place could be one; compared with `FIGURES`."""
    if figure == "fastest_step_s":
        return isinstance(value, list) and bool(value) and all(is_possible("step_time_s", v) for v in value)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 2**63:
        return False
    return value > 0 or FIGURES[figure][2]


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
