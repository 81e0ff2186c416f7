"""The history of a gate: the figures of a committed baseline at each commit that changed it. Also exports
figures for the history pages of other tools: asv's results folder, pytest-benchmark's file."""

import json
import math
import platform
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import mean, median, quantiles, stdev

import numpy as np
import numpy.typing as npt

from fsdpbench.answers.check.metrics import METRICS
from fsdpbench.answers.check.records.baseline import Baseline, replace_file, torch_minor
from fsdpbench.answers.check.records.entries import Entry
from fsdpbench.answers.check.records.sides import Side
from fsdpbench.base.errors import CannotJudgeError, UsageError, written
from fsdpbench.base.reading import one_line, parse_json
from fsdpbench.engine.results.records import Status
from fsdpbench.reports.figures import Worse
from fsdpbench.reports.pages.history_page import Commit, History, Series, Step

MOST_COMMITS = 1000
_GIT_S = 60
_SEPARATOR = "\x1f"


@dataclass(frozen=True)
class _Figures:
    """The figures of a commit; `revision` is "" for figures that are not committed yet."""

    revision: str
    date: str
    subject: str
    entries: Mapping[str, Entry] = field(repr=False)
    surroundings: Mapping[str, str] = field(repr=False, default_factory=dict)

    @property
    def label(self) -> str:
        return self.revision[:9] or "now"


def read_history(path: Path, now: Side | None = None) -> History:
    """Return the history of the baseline at `path`, followed by `now`.

    Raises `UsageError` if there is no history, `CannotJudgeError` if no commit has figures.
    """
    commits, notes = _commits(path)
    if now is not None:
        commits.append(_Figures("", "", "not committed", now.entries, now.surroundings.facts))
    if not commits:
        note = f": {notes[0]}" if notes else ""
        raise CannotJudgeError(f"{path}: no commit has figures that can be read{note}")
    if len(commits) == 1:
        notes.append("the history has one commit: a shallow clone has no more (fetch-depth: 0 gets all)")
    notes += _changes(commits)
    series = _series(commits)
    points = [Commit(each.revision or None, each.date, each.subject) for each in commits]
    return History(1, str(path), points, series, _steps(commits, series), notes)


def _commits(path: Path) -> tuple[list[_Figures], list[str]]:
    folder = path.resolve().parent
    git_says(folder, "rev-parse", "--is-inside-work-tree", of=path)
    form = _SEPARATOR.join(("%H", "%ad", "%s"))
    asked = ("log", f"--max-count={MOST_COMMITS}", "--date=short", f"--format={form}", "--", path.name)
    log = git_says(folder, *asked, of=path)
    lines = [line.split(_SEPARATOR) for line in log.splitlines() if line.count(_SEPARATOR) == 2]
    if not lines:
        raise UsageError(f"{path}: git knows no commit of it; --history reads a committed baseline")
    found: list[_Figures] = []
    notes: list[str] = []
    for revision, date, subject in reversed(lines):
        try:
            text = git_says(folder, "show", f"{revision}:./{path.name}", of=path)
            baseline = Baseline.of(parse_json(text.encode(), str(path)), path)
        except UsageError as error:
            notes.append(f"{revision[:9]} is left out: {one_line(error)}")
            continue
        figures = baseline.sets.get(torch_minor())
        if figures is None:
            notes.append(f"{revision[:9]} is left out: no figures for torch {torch_minor()}")
            continue
        found.append(_Figures(revision, date, subject, figures.entries(), figures.surroundings))
    return found, notes


def git_says(folder: Path, *words: str, of: object) -> str:
    """Run git in `folder` and return its output. Raises `UsageError` that names `of`."""
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *words],
            capture_output=True, text=True, timeout=_GIT_S, check=True, errors="replace",
        )  # fmt: skip
    except FileNotFoundError:
        raise UsageError(f"{of}: needs git, and there is none on the path") from None
    except subprocess.CalledProcessError as error:
        lines = error.stderr.strip().splitlines()
        raise UsageError(f"{of}: git: {one_line(lines[-1] if lines else error)}") from None
    except (OSError, subprocess.SubprocessError) as error:
        raise UsageError(f"{of}: git: {one_line(error)}") from None
    return done.stdout


def _changes(commits: Sequence[_Figures]) -> list[str]:
    """Return notes on commits where the surroundings of the figures changed (torch, hardware profile, model).
    These may cause a step there, instead of the code."""
    notes = []
    for before, after in pairwise(commits):
        names = before.surroundings.keys() | after.surroundings.keys()
        changed = sorted(n for n in names if before.surroundings.get(n) != after.surroundings.get(n))
        if changed:
            notes.append(f"{after.label}: {', '.join(changed)} changed")
    return notes


def _series(commits: Sequence[_Figures]) -> list[Series]:
    names = dict.fromkeys(name for commit in commits for name in commit.entries)
    found = (
        Series(name, metric, [_value(commit.entries.get(name), metric) for commit in commits], row.unit)
        for name in names
        for metric, row in METRICS.items()
    )
    return [each for each in found if set(each.values) != {None}]


def _value(entry: Entry | None, metric: str) -> float | None:
    """Return the median of a metric over runs, or None."""
    known = entry.values(metric) if entry is not None else []
    return float(median(known)) if known else None


def _steps(commits: Sequence[_Figures], series: Sequence[Series]) -> list[Step]:
    found: list[tuple[int, Step]] = []
    for each in series:
        places = [place for place, value in enumerate(each.values) if value is not None]
        values = [value for value in each.values if value is not None]
        last = commits[places[-1]].entries[each.configuration]
        at = exact_steps(values) if last.is_exact else measured_steps(values)
        edges = [0, *at, len(values)]
        for number, place in enumerate(at, start=1):
            before = float(median(values[edges[number - 1] : place]))
            after = float(median(values[place : edges[number + 1]]))
            worse = _is_worse(each, before, after)
            change = (after - before) / abs(before) if before else None
            revision = commits[places[place]].revision or None
            step = Step(revision, each.configuration, each.metric, before, after, change, worse)
            found.append((places[place], step))
    order = {metric: number for number, metric in enumerate(METRICS)}
    found.sort(key=lambda one: (one[0], order[one[1].metric], one[1].configuration))
    return [step for _, step in found]


def _is_worse(series: Series, before: float, after: float) -> bool | None:
    direction = METRICS[series.metric].worse
    if direction is Worse.NEITHER or before == after:
        return None
    return (after > before) is (direction is Worse.HIGHER)


# Change point detection in a series of figures over commits.
# Exact (simulated) figures have a step wherever they differ. For measured ones, steps are found by E-divisive
# means (Matteson and James, "A nonparametric approach for multiple change point analysis of multivariate
# data", JASA 2014): take the split whose two sides have the largest energy distance, accept it if few
# permutations of the series split as well, and repeat on each side. The method assumes nothing about the
# distribution of noise and is used for performance tests of databases (Daly et al., "The use of change point
# detection to identify software performance regressions in a continuous integration system", ICPE 2020).

EXACT = 1e-12
"""Smaller relative differences come from rounding in sums."""
LEVEL = 0.05
PERMUTATIONS = 199
LEAST_SEGMENT = 3
"""Minimum number of commits on each side of a step of measured figures; fewer look like noise at `LEVEL`."""

Floats = npt.NDArray[np.float64]


def exact_steps(values: Sequence[float]) -> list[int]:
    """Return each index whose value differs from the previous one."""
    pairs = enumerate(pairwise(values), start=1)
    return [place for place, pair in pairs if not math.isclose(*pair, rel_tol=EXACT)]


def measured_steps(values: Sequence[float]) -> list[int]:
    """Return the indices where a new level begins, in order. Permutations use a fixed seed, so the result is
    deterministic."""
    series = np.asarray(values, np.float64)
    found: list[int] = []
    random = np.random.default_rng(0)
    parts = [(0, len(series))]
    while parts:
        low, high = parts.pop()
        split = _split(series[low:high], random)
        if split is not None:
            found.append(low + split)
            parts += [(low, low + split), (low + split, high)]
    return sorted(found)


def _split(series: Floats, random: np.random.Generator) -> int | None:
    """Return the most likely index of a step; None if permutations of the series split as well."""
    if len(series) < 2 * LEAST_SEGMENT or not np.ptp(series):
        return None
    apart = np.abs(series[:, None] - series[None, :])
    best, place = _farthest(apart)
    as_good = 0
    for _ in range(PERMUTATIONS):
        order = random.permutation(len(series))
        as_good += _farthest(apart[np.ix_(order, order)])[0] >= best
    return place if (as_good + 1) / (PERMUTATIONS + 1) <= LEVEL else None


def _farthest(apart: Floats) -> tuple[float, int]:
    """Return the largest scaled energy distance of two sides, and the index where the second side begins.

    For sides of n and m values: mn/(m+n) (2 mean|x-y| - mean|x-x'| - mean|y-y'|).
    """
    count = len(apart)
    # Sums of the distances inside the first k, inside the rest, and between both, vectorised over k.
    upper = np.triu(apart, 1)
    first = np.cumsum(upper.sum(axis=0))
    rest = np.cumsum(upper.sum(axis=1)[::-1])[::-1]
    n = np.arange(LEAST_SEGMENT, count - LEAST_SEGMENT + 1)
    m = count - n
    inside, beyond = first[n - 1], rest[n]
    between = upper.sum() - inside - beyond
    energy = 2 * between / (n * m) - 2 * inside / (n * (n - 1)) - 2 * beyond / (m * (m - 1))
    scaled = n * m / count * energy
    best = int(np.argmax(scaled))
    return float(scaled[best]), int(n[best])


def export(side: Side, exports: Iterable[tuple[str, Path]]) -> None:
    """Write the successful configurations of `side` for `asv` (its `results_dir`) or `benchmark` (a file for
    `pytest-benchmark compare`), each to its path. Raises `BenchError`, also outside of a git repository."""
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
    """Return the step time of a configuration over its runs, with all other figures as extra info."""
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
    """Write a benchmark for each figure, with the configuration as its parameter."""
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
