"""Broken, changed and missing figures of a real sweep and its baseline: the gate is never wrongly content.

What each mutation must come to is written in `gate_mutations.py`, from the contract and not from the gate.
"""

from __future__ import annotations

import json
import math
import random
import shutil
import subprocess
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from .gate_contradictions import FACTORS, changed_together, coordinated, cross_file, in_the_baseline
from .gate_edits import FIGURES, SLOWER, Files, at, baseline_run, in_result, name_of, read
from .gate_files import MEASURED, SIMULATED, committed, repeated, swept
from .gate_mutations import UNKNOWN, WORSE, Case, every_case, is_possible

CommandLine = Callable[..., subprocess.CompletedProcess[str]]
CONTRACT = range(5)
SAMPLE = 40
SYSTEMATIC_PARTS = 10
PLACED = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from([0, 1, -1, 1e-12, 1e18, 1e308, 5e-324, -0.0]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=2),
    max_leaves=4,
)


def judged(fsdpbench: CommandLine, files: Files, *words: str) -> subprocess.CompletedProcess[str]:
    given_words = ("--baseline", str(files.baseline), "--thresholds", str(files.thresholds), *words)
    return fsdpbench("check", str(files.folder), *given_words)


def wrong(
    fsdpbench: CommandLine, case: Case, files: Files, place: Path, as_older: bool = False
) -> str | None:
    """What the gate did that its contract forbids, if anything. `as_older`: the mutated sweep is the older
    side of `compare`, and the whole one the newer."""
    copy = files.copied(place)
    case.mutate(copy)
    compared = ("compare", str(copy.folder), str(files.folder))
    done = fsdpbench(*compared) if as_older else judged(fsdpbench, copy)
    shutil.rmtree(place)
    problem = (
        f"{case.label}: exit {done.returncode}, not {sorted(case.expected)}: {done.stderr.strip()[:400]}"
    )
    if done.returncode not in case.expected or done.returncode not in CONTRACT:
        return problem
    if "Traceback" in done.stderr or ("Keep the gain" in done.stdout and done.returncode):
        return problem
    if done.returncode >= 2 and len(done.stderr.strip().splitlines()) != 1:
        return f"{problem} (not one line)"
    if any(word not in done.stderr for word in case.words):
        return f"{problem} (does not name {case.words})"
    return None


def failures(
    fsdpbench: CommandLine, cases: Iterable[Case], files: Files, place: Path, as_older: bool = False
) -> list[str]:
    found = (wrong(fsdpbench, case, files, place / str(k), as_older) for k, case in enumerate(cases))
    return [problem for problem in found if problem is not None]


def contradictory(files: Files, kind: str) -> list[Case]:
    """Files of other configurations, figures changed together, and edits of the baseline."""
    return [*cross_file(files, kind), *coordinated(files, kind), *in_the_baseline(files, kind)]


def of_any_value(files: Files, run: int, figure: str, value: Any) -> Case:
    """`value` in the place of a figure: the codes that the contract allows for it."""
    path, direction, _ = FIGURES[figure]
    old = at(read(files.runs[run] / "result.json"), path)
    expected = {UNKNOWN}
    if is_possible(figure, value):
        grown = math.copysign(
            1,
            (min(value) if isinstance(value, list) else value) - (min(old) if isinstance(old, list) else old),
        )
        # One run of many is noise, or too few to tell; other figures of the run may contradict it.
        expected |= {0, WORSE} if len(files.runs) > 1 else {WORSE if grown == direction else 0}
        if value == old or (figure.endswith("_bytes") and abs(value - old) < 0.001 * old):
            expected |= {0}
    return Case(f"{figure} = {value!r}", in_result(run, path, value), frozenset(expected))


@pytest.fixture(scope="module")
def simulated(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return committed(tmp_path_factory.mktemp("simulated"))


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory, fsdpbench: CommandLine) -> Files:
    return repeated(tmp_path_factory.mktemp("measured"), fsdpbench)


@pytest.mark.parametrize("kind", ["simulated", "measured"])
def test_a_sample_of_mutations(
    kind: str, request: pytest.FixtureRequest, fsdpbench: CommandLine, tmp_path: Path
) -> None:
    files: Files = request.getfixturevalue(kind)
    first, *others = [*every_case(files, kind), *contradictory(files, kind)]
    sample = [first, *random.Random(13).sample(others, SAMPLE // (1 if kind == "simulated" else 4))]
    assert failures(fsdpbench, sample, files, tmp_path) == []


def test_one_line_says_what_and_where(simulated: Files, fsdpbench: CommandLine, tmp_path: Path) -> None:
    copy = simulated.copied(tmp_path)
    in_result(-1, ("peak_memory_bytes", "reserved"), math.nan)(copy)
    done = judged(fsdpbench, copy)
    assert done.returncode == UNKNOWN
    name = name_of(copy.first_runs[0])
    assert f"cannot judge {name}: peak_reserved_bytes is nan (not finite) on the newer side" in done.stderr
    answer = json.loads(judged(fsdpbench, copy, "--json").stdout)
    assert [change["verdict"] for change in answer["changes"]] == ["unknown"]
    assert "peak_reserved_bytes" in judged(fsdpbench, copy, "--format", "md").stdout


def test_the_planted_slowness_is_beyond_the_noise_of_the_runs(measured: Files) -> None:
    results = [read(run / "result.json") for run in measured.runs]
    medians = [result["step_time_s"] for result in results]
    fastest = [min(result["measured"]["step_times_s"]) for result in results]
    for samples in (medians, fastest):
        assert SLOWER * min(samples) > max(samples)


@pytest.fixture(scope="module")
def fresh(
    request: pytest.FixtureRequest, fsdpbench: CommandLine, tmp_path_factory: pytest.TempPathFactory
) -> Files:
    """A sweep that is run here: one simulated run of each configuration, or twelve measured ones."""
    words = {"one simulated run": SIMULATED, "twelve measured runs": MEASURED}[request.param]
    return swept(tmp_path_factory.mktemp("fresh"), fsdpbench, *words)


KINDS = {"one simulated run": 400, "twelve measured runs": 150}
"""How many mutations of a sweep are drawn at random, by its kind."""
CONTRADICTIONS: dict[str, Callable[[Files, str], Iterable[Case]]] = {
    "files of other configurations": cross_file,
    "figures scaled together": coordinated,
    "figures of the baseline scaled": in_the_baseline,
    "pairs of figures, drawn at random": lambda files, kind: pairs(files, KINDS[kind]),
}
of_each_kind = pytest.mark.parametrize(
    ("fresh", "kind"), [(kind, kind) for kind in KINDS], indirect=["fresh"]
)


def check(what: str, tried: int, failures: list[str], least: int = 1) -> None:
    """Print a line of `ci/measured/gate_mutations.txt`, and fail if the gate did."""
    print(f"\n{what}: {tried} tried, {len(failures)} failed", *failures, sep="\n  ")
    assert not failures
    assert tried >= least


@pytest.mark.campaign
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("part", range(SYSTEMATIC_PARTS))
@of_each_kind
def test_every_mutation(kind: str, part: int, fresh: Files, fsdpbench: CommandLine, tmp_path: Path) -> None:
    """Newer sides and older ones; every tenth mutation in a part."""
    cases = list(every_case(fresh, kind))[part::SYSTEMATIC_PARTS]
    check(f"{kind}, systematic", len(cases), failures(fsdpbench, cases, fresh, tmp_path / "cases"), least=17)
    in_older = [case for case in cases if case.expected == {UNKNOWN} and case.label.endswith("newer")]
    wrong_there = failures(fsdpbench, in_older, fresh, tmp_path / "older", as_older=True)
    check(f"{kind}, on the older side of compare", len(in_older), wrong_there)


@pytest.mark.campaign
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("what", CONTRADICTIONS)
@of_each_kind
def test_every_contradiction(
    kind: str, what: str, fresh: Files, fsdpbench: CommandLine, tmp_path: Path
) -> None:
    cases = list(CONTRADICTIONS[what](fresh, kind))
    check(f"{kind}, {what}", len(cases), failures(fsdpbench, cases, fresh, tmp_path / "contradictory"))


@pytest.mark.campaign
@pytest.mark.timeout(3000)
@of_each_kind
def test_any_json_value(kind: str, fresh: Files, fsdpbench: CommandLine, tmp_path: Path) -> None:
    check(f"{kind}, any JSON value", *placed_by_hypothesis(fsdpbench, fresh, tmp_path / "drawn", KINDS[kind]))


def pairs(files: Files, number: int) -> list[Case]:
    """Two figures of all runs of a configuration, each by a factor of its own."""
    draw = random.Random(33)
    known = baseline_run(read(files.baseline), name_of(files.first_runs[0]), -1)
    figures = [figure for figure in FIGURES if known.get(figure)]
    return [
        changed_together(files, {each: draw.choice(FACTORS) for each in draw.sample(figures, 2)})
        for _ in range(number)
    ]


def placed_by_hypothesis(
    fsdpbench: CommandLine, files: Files, place: Path, examples: int
) -> tuple[int, list[str]]:
    """Any JSON value in the place of any known figure of any run."""
    judged_figures = baseline_run(read(files.baseline), name_of(files.first_runs[0]), -1)
    known = [figure for figure in FIGURES if judged_figures.get(figure) is not None]
    tried, found = 0, []

    @settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(figure=st.sampled_from(known), value=PLACED, run=st.integers(0, len(files.runs) - 1))
    def place_it(figure: str, value: Any, run: int) -> None:
        nonlocal tried
        tried += 1
        problem = wrong(fsdpbench, of_any_value(files, run, figure, value), files, place)
        if problem is not None:
            found.append(problem)

    place_it()
    return tried, found
