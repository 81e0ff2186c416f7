"""Mutations of a real sweep and its baseline, and what the gate's contract says of each (docs/gate.md).

The oracle knows what was done to the files, and where figures lie in them; it calls nothing of the gate.
`expected` are the exit codes that the contract allows: several where a file may be refused (2) or a figure
judged by name (3).
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from .gate_edits import (
    FIGURES,
    MISSING,
    Files,
    at,
    baseline_run,
    both,
    cut_result,
    cut_to,
    in_baseline,
    in_content,
    in_every_run,
    in_record,
    in_result,
    name_of,
    new_status,
    old_status,
    one_set,
    read,
    record_of,
    run_of,
    slower,
    without_old,
    write_baseline,
    write_result,
    write_thresholds,
)

OK, WORSE, USAGE, UNKNOWN, FAILED = 0, 1, 2, 3, 4

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
            recorded = figure.startswith("peak") and (files.first_runs[0] / "trace").is_dir()
            expected = {OK, UNKNOWN} if recorded and measured else {UNKNOWN} if recorded else {OK}
            yield Case(f"{side_words}: {figure} one byte more", byte, frozenset(expected))
    better = in_every_run(files, ("step_time_s",), lambda old: old * 0.999)
    if len(files.runs) == 1:
        # Alone: the samples, and the speeds, are as before.
        yield Case(f"{side_words}: step_time_s better", better, frozenset({UNKNOWN}))
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
