"""What contradicts itself, its files or its baseline is not judged; every figure has a rule."""

from __future__ import annotations

import importlib.util
import json
import math
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fsdpbench.answers.check.compare import Comparison, compare
from fsdpbench.answers.check.metrics import ALL, METRICS
from fsdpbench.answers.check.records.baseline import Baseline
from fsdpbench.answers.check.records.entries import entry_of
from fsdpbench.answers.check.records.sides import Side, absent_of, read_side
from fsdpbench.answers.check.text import as_text
from fsdpbench.answers.check.thresholds import Thresholds
from fsdpbench.base.errors import ExitCode
from fsdpbench.engine.results.store import Store
from fsdpbench.reports.consistency import (
    WORDS,
    Contradiction,
    broken_rules,
    leaves,
    rules,
    values_of,
)
from fsdpbench.reports.figures import FIGURES, ranges
from fsdpbench.reports.pages import load_run

from .gate_edits import at, put, read, write

Change = Callable[[Path], object]


def found_in(result: dict[str, Any]) -> list[Contradiction]:
    return broken_rules(values_of(result))


TIMES_S = ("compute_only", "overlapped", "exposed_communication", "idle")
SPEEDS = ("samples_per_s_per_gpu", "tokens_per_s_per_gpu", "tflops_per_gpu", "hardware_tflops_per_gpu")
DERIVED_FIGURES = {
    "compute_s",
    "communication_s",
    "fastest_step_s",
    "prefetched_all_gathers",
    "late_all_gathers",
}
FLAGS = {"compiled", "trace_trusted", "hardware.simulated", "interval.risky", "measured.warmup_stable"}
DERIVED = {"is_ok", "has_cause", "is_sim", "has_retries", "many_traced_steps", "untimed_traced_steps"} | {
    "recomputes", "sequences_a_sample", "packaged_profile", "step_time_s_in_repeats",
}  # fmt: skip


@pytest.fixture
def sweep(planted: Path, tmp_path: Path) -> Path:
    """A simulated sweep of two configurations, as it was run."""
    return Path(shutil.copytree(planted / "base", tmp_path / "sweep"))


@pytest.fixture(scope="module")
def baseline(planted: Path, fsdpbench: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    file: Path = tmp_path_factory.mktemp("baseline") / "baseline.json"
    done: subprocess.CompletedProcess[str] = fsdpbench("baseline", "create", str(planted / "base"), str(file))
    assert done.returncode == 0, done.stderr
    return file


def compared(before: Side, after: Side) -> Comparison:
    return compare(before.entries, after.entries, Thresholds(), absent_of(before, after))


def folders(sweep: Path) -> tuple[Path, Path]:
    first, second = sorted(path for path in sweep.iterdir() if path.is_dir())
    return first, second


def in_first(file: str, change: Callable[[dict[str, Any]], object]) -> Change:
    def edit(sweep: Path) -> None:
        path = folders(sweep)[0] / file
        content = read(path)
        change(content)
        write(path, content)

    return edit


def times(*paths: str, factor: float) -> Change:
    def change(result: dict[str, Any]) -> None:
        for dotted in paths:
            path = tuple(dotted.split("."))
            value = at(result, path)
            put(result, path, [factor * v for v in value] if isinstance(value, list) else factor * value)

    return in_first("result.json", change)


def setting(file: str, dotted: str, value: Any) -> Change:
    return in_first(file, lambda content: put(content, tuple(dotted.split(".")), value))


def copied(file: str, *others: str) -> Change:
    """The second configuration's file over the first one's."""

    def edit(sweep: Path) -> None:
        for name in (file, *others):
            shutil.copy(folders(sweep)[1] / name, folders(sweep)[0] / name)

    return edit


def both(*changes: Change) -> Change:
    return lambda sweep: [change(sweep) for change in changes]


CASES: dict[str, tuple[Change, tuple[str, ...]]] = {
    "another configuration's result": (copied("result.json"), ("in config.json and", "impl-fsdp")),
    "another configuration's config": (copied("config.json"), ("in config.json and", "impl-fsdp")),
    "another configuration's folder": (copied("config.json", "result.json"), ("the folder's name", "key")),
    "another configuration's record": (copied("trace/rank0_record.json"), ("and records.step_time_s is",)),
    "another batch in the result": (
        setting("result.json", "config.settings.batch", 64),
        ("settings.batch is 2 in config.json and 64 in result.json",),
    ),
    "another batch in the config": (setting("config.json", "settings.batch", 64), ("settings.batch is 64",)),
    "another batch in both": (
        both(
            setting("config.json", "settings.batch", 64), setting("result.json", "config.settings.batch", 64)
        ),
        ("config.json was changed: its key is",),
    ),
    "another name": (setting("config.json", "name", "better"), ("was changed: its name is better",)),
    "other GPUs": (setting("result.json", "config.gpus", 16), ("gpus is 8", "and 16")),
    "another hardware": (
        setting("result.json", "hardware.name", "h100-80gb"),
        ("hardware.name is h100-80gb", "packaged_profile is a100-80gb"),
    ),
    "another device in the config": (setting("result.json", "config.device", "cuda"), ("device is sim",)),
    "an older software": (
        setting("result.json", "config.software", "fsdp1-2022"),
        ("software is None in config.json and fsdp1-2022",),
    ),
    "slower beside its samples": (times("step_time_s", factor=1.5), ("median(measured.step_times_s)",)),
    "faster beside its samples": (times("step_time_s", factor=0.5), ("median(measured.step_times_s)",)),
    "faster with its samples": (
        times("step_time_s", "measured.step_times_s", factor=0.5),
        ("samples_per_s_per_gpu", "batch"),
    ),
    "faster with speeds, not its trace": (
        both(
            times("step_time_s", "measured.step_times_s", factor=0.5),
            times(*SPEEDS, "mfu", "hfu", factor=2),
        ),
        ("step_time_s",),
    ),
    "a slower trace and less throughput": (
        both(times("traced_step_time_s", factor=3), times(*SPEEDS, factor=1 / 3)),
        ("samples_per_s_per_gpu", "step_time_s"),
    ),
    "idle five times the step": (
        in_first("result.json", lambda r: put(r, ("time_s", "idle"), 5 * r["step_time_s"])),
        ("time_s.idle is", "traced_step_time_s is"),
    ),
    "no overlap": (times("overlap_fraction", factor=0), ("overlap_fraction 0", "time_s.overlapped is")),
    "all of it hidden": (setting("result.json", "overlap_fraction", 1.0), ("time_s.exposed_communication",)),
    "less FLOPs than were computed": (times("hardware_tflops_per_gpu", factor=0.5), ("tflops_per_gpu is",)),
    "MFU alone": (times("mfu", "interval.mfu", factor=0.5), ("hfu * tflops_per_gpu",)),
    "more memory than there is": (
        times("peak_memory_bytes.reserved", factor=1e3), ("hardware.memory_bytes",)
    ),
    "a figure and its interval": (
        times("step_time_s", "interval.step_time_s", factor=0.33), ("median(measured.step_times_s)",)
    ),
    "a figure that no metric reads": (setting("result.json", "mfu", "0.5"), ("mfu is 0.5", "a number")),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_what_contradicts_itself_is_not_judged(case: str, sweep: Path, planted: Path) -> None:
    """On either side, with and without the ranks' records; nor does a sweep that resumes take it."""
    change, words = CASES[case]
    change(sweep)
    found = compared(read_side(planted / "base"), read_side(sweep))
    assert found.unjudged or found.regressions
    if "record" not in case:
        for trace in sweep.glob("*/trace"):
            shutil.rmtree(trace)
    for sides in ((planted / "base", sweep), (sweep, planted / "base")):
        found = compared(*map(read_side, sides))
        told = " | ".join([*found.unjudged, *(each.reason or "" for each in found.regressions)])
        assert found.regressions or found.unjudged
        assert [word for word in words if word not in told] == []
    if "record" not in case:
        assert len(Store(sweep).points()) == 1


def test_a_sweep_against_itself_is_equal(planted: Path, baseline: Path) -> None:
    for before, after in ((planted / "base", planted / "base"), (baseline, planted / "base")):
        found = compared(read_side(before), read_side(after))
        assert "all figures are equal" in as_text(found)
    assert len(Store(planted / "base").points()) == 2


@pytest.mark.parametrize(
    ("metric", "change"),
    [
        ("overlap_fraction", lambda old: 0.0),
        *[("step_time_s", lambda old, f=f: old * f) for f in (0.33, 0.5, 1.5, 3, 5)],
        *[("compute_s", lambda old, f=f: old * f) for f in (0.5, 1.5)],
        *[("exposed_communication_s", lambda old, f=f: old * f) for f in (0, 0.5, 1.5)],
        ("idle_s", lambda old: 5 * old + 1),
        ("idle_s", lambda old: math.nan),
        ("peak_active_bytes", lambda old: old * 2),
    ],
)
def test_a_baseline_that_contradicts_itself_judges_nothing(
    metric: str, change: Callable[[float], float], planted: Path, baseline: Path, tmp_path: Path
) -> None:
    content = read(baseline)
    (figures,) = content["sets"].values()
    run = next(iter(figures["configurations"].values()))["runs"][0]
    run[metric] = change(run[metric])
    write(tmp_path / "baseline.json", content)
    found = compared(read_side(tmp_path / "baseline.json"), read_side(planted / "base"))
    assert any(metric in line and "on the older side" in line for line in found.unjudged)


def test_a_baseline_without_witnesses_judges_as_before(planted: Path, baseline: Path, tmp_path: Path) -> None:
    content = read(baseline)
    for record in next(iter(content["sets"].values()))["configurations"].values():
        for witness in ALL.keys() - METRICS.keys():
            del record["runs"][0][witness]
    write(tmp_path / "old.json", content)
    found = compared(read_side(tmp_path / "old.json"), read_side(planted / "base"))
    assert "all figures are equal" in as_text(found)


def test_the_gate_ends_with_3_and_a_baseline_is_not_made(
    sweep: Path, baseline: Path, fsdpbench: Any, tmp_path: Path
) -> None:
    CASES["another configuration's result"][0](sweep)
    for words in (
        ("check", str(sweep), "--baseline", str(baseline)),
        ("baseline", "create", str(sweep), str(tmp_path / "new.json")),
    ):
        done = fsdpbench(*words)
        assert done.returncode == ExitCode.CANNOT_JUDGE
        assert "in config.json and" in done.stderr
        assert len(done.stderr.strip().splitlines()) == 1
    assert not (tmp_path / "new.json").exists()


def test_a_page_says_what_cannot_be_believed(sweep: Path) -> None:
    times("time_s.idle", factor=50)(sweep)
    doubtful, sound = load_run(sweep).configurations
    assert "traced_step_time_s is" in (doubtful.problem or "")
    assert sound.problem is None
    copied("result.json")(sweep)
    assert load_run(sweep).configurations[0].status == "unreadable"


STEPS = [[0.10, 0.11, 0.12], [0.20, 0.21, 0.25], [0.30, 0.30, 0.31]]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({}, None),
        ({"step_time_s": 0.31}, "median(repeats.step_time_s) is 0.21"),
        ({"repeats.step_time_s": [0.165, 0.315, 0.45]}, "medians(repeats.samples_s)"),
        ({"repeats.runs": 4}, "repeats.runs is 4"),
        ({"repeats.spread": 0.0}, "repeats.spread is 0"),
        ({"measured.step_times_s": [0.2, 0.2, 0.2]}, "first(repeats.step_time_s) is 0.11"),
        ({"repeats.step_time_s": [0.11, math.nan, 0.3]}, "repeats.step_time_s is nan"),
    ],
)
def test_repeats_agree_with_the_step(changes: dict[str, Any], named: str | None) -> None:
    result: dict[str, Any] = {
        "status": "ok",
        "device": "cpu",
        "step_time_s": 0.21,
        "measured": {"step_times_s": STEPS[0]},
        "repeats": {
            "runs": 3,
            "failed": 0,
            "step_time_s": [0.11, 0.21, 0.30],
            "spread": (0.255 - 0.16) / 0.21,
            "samples_s": STEPS,
        },
    }
    for dotted, value in changes.items():
        put(result, tuple(dotted.split(".")), value)
    found = " | ".join(each.sentence for each in found_in(result))
    assert (named in found) if named else not found


def test_a_further_run_has_the_step_time_that_the_first_ones_result_says() -> None:
    first = {"status": "ok", "device": "cpu", "step_time_s": 0.15}
    first |= {"repeats": {"runs": 2, "failed": 0, "step_time_s": [0.1, 0.2], "samples_s": [[0.1], [0.2]]}}
    second = {"status": "ok", "device": "cpu", "step_time_s": 0.2}
    assert entry_of([first, second]).flaws() == {}
    assert (
        "step_time_s_in_repeats is 0.2"
        in entry_of([first, {**second, "step_time_s": 0.1}]).flaws()["step_time_s"]
    )


def bound_by_rules() -> str:
    """An expression for the names of all figures that a rule speaks of."""
    texts = " ".join(f"{row['left']} {row['right']}" for row in rules() if row["relation"] in WORDS)
    words = " ".join(row["each"] for row in rules())
    names = re.findall(r"[a-z_@][a-z_0-9.@~]*", f"{texts} {words}")
    alone = [row.path for row in FIGURES if row.alone]
    return "|".join(re.sub(r"\\?[~@]|\\\*", "[^.]+", re.escape(name)) for name in [*names, *alone])


def test_every_figure_has_a_rule_or_a_reason(planted: Path) -> None:
    """That of a result and that which the gate judges; and each has a range."""
    result = read(folders(planted / "base")[0] / "result.json")
    bound = re.compile(bound_by_rules())
    figures = [
        name
        for name, value in values_of(result).items()
        if isinstance(value, int | float | list) and not name.startswith("config.") and name not in DERIVED
        and not (isinstance(value, list) and any(isinstance(each, str) for each in value))
        and name not in ("trace_warnings", "traces")
    ]  # fmt: skip
    assert len(figures) > 60
    assert [name for name in figures if not bound.fullmatch(name)] == []
    assert [m.name for m in METRICS.values() if not bound.fullmatch(m.path)] == []
    limits = "|".join(re.escape(path).replace(r"\*", "[^.]+") for path in ranges())
    unlimited = [name for name in figures if not re.fullmatch(limits, name) and name not in FLAGS]
    assert set(unlimited) == {"schema", *DERIVED_FIGURES}


def test_the_table_is_sound() -> None:
    tolerances = {row["left"]: row["because"] for row in rules() if row["relation"] == "within"}
    for row in rules():
        assert row["relation"] in {*WORDS, "within"}
        assert row["tolerance"] in tolerances or row["relation"] not in WORDS
        assert row["device"] in ("", "sim", "real")
    assert all(tolerances.values())


def test_the_documentation_has_the_table() -> None:
    """Each relation is a row of the table that the site appends to docs/gate.md, in the table's order."""
    path = Path(__file__).parents[3] / "ci" / "docs" / "rules_page.py"
    spec = importlib.util.spec_from_file_location("rules_page", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    shown = [line for line in module.rules_table().splitlines() if line.startswith("| `")]
    wanted = [f"| `{row['left']}` |" for row in rules() if row["relation"] in {*WORDS, "alone"}]
    assert [line[: len(start)] for line, start in zip(shown, wanted, strict=True)] == wanted


def test_an_old_result_with_few_keys_contradicts_nothing() -> None:
    assert found_in({"status": "ok", "device": "sim", "step_time_s": 0.5}) == []
    assert found_in({}) == []
    assert dict(leaves({"a": {"b": {}}, "c": None})) == {"a.b": {}, "c": None}
    assert "mfu" not in values_of({"mfu": None})


def test_the_committed_baseline_contradicts_nothing() -> None:
    committed = Baseline.read(Path(__file__).parents[3] / "ci" / "baseline.json")
    for figures in committed.sets.values():
        assert {name: entry.flaws() for name, entry in figures.entries().items() if entry.flaws()} == {}


def test_any_content_is_answered() -> None:
    """Values of every type in every place: a list of findings, never an exception."""
    for value in (None, True, "x", -1, 1e400, 2**80, [], {}, [[1]], {"a": 1}, [None], "1.5"):
        result: dict[str, Any] = dict.fromkeys(
            ("step_time_s", "repeats", "measured", "config", "time_s", "communication", "interval", "device"),
            value,
        )
        assert isinstance(found_in(json.loads(json.dumps(result))), list)
