"""What is made of results: errors, bands, claims, and runs without an answer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fsdpbench.lab.reproduce.figure import Drawing, PaperFigure, Point, Variant
from fsdpbench.lab.reproduce.outcome import Outcome, Verdict, as_dict, counted, outcome_of
from fsdpbench.lab.reproduce.page import chart_of
from fsdpbench.lab.reproduce.run import Runs
from fsdpbench.lab.validation.paper_network import Prediction
from fsdpbench.lab.validation.runs.case import Case, Figure, PublishedFigure
from fsdpbench.reports.result import Result

from .claiming import ran_out, ratio

PUBLISHED = PublishedFigure(
    "6a", "somebody", "B", "TFLOPS/GPU", (8, 16), {"a": (100.0, 50.0), "b": (80.0, None)}
)


def a_case(name: str) -> Case:
    return Case(name, "", "", "gpt-tiny", "a100-80gb", 8, {}, {})


def predicted(name: str, value: float | None, status: str = "ok") -> Prediction:
    return Prediction(a_case(name), Result.of({"status": status, "hardware_tflops_per_gpu": value}))


def outcome(
    values: dict[str, float | None],
    drawing: Drawing = Drawing.BARS,
    others: tuple[float | None, float | None] = (101.0, 60.0),
    contradicts: str = "",
    taken: str = "",
    **statuses: str,
) -> Outcome:
    """A figure of two series on two places; `values` by series and place, as in `a8`."""
    ready = {name: predicted(name, value, statuses.get(name, "ok")) for name, value in values.items()}
    points = tuple(
        Point(series, x, PUBLISHED.at(series, x), a_case(f"{series}{x}"), Figure.HARDWARE_TFLOPS)
        for series in PUBLISHED.series
        for x in PUBLISHED.x
    )
    other = {"a8": predicted("a8", others[0]), "a16": predicted("a16", others[1])}
    figure = PaperFigure(
        PUBLISHED,
        drawing,
        points,
        variants=(Variant("other", ready=other, contradicts=contradicts),),
        claims=(
            ratio("twice as fast", ("a", 8), ("a", 16)),
            ratio("faster than b", ("a", 8), ("b", 8), taken=taken),
            ran_out("out of memory", ("b", 16)),
        ),
        ready=ready,
    )
    return outcome_of(figure, Runs(Path(), {}, {}, ready))


GOOD: dict[str, float | None] = {"a8": 110.0, "a16": 55.0, "b8": 80.0, "b16": None}


def test_errors_are_simulated_over_published_less_one() -> None:
    found = outcome(GOOD, b16="oom")
    assert [each.error for each in found.points] == [pytest.approx(0.1), pytest.approx(0.1), 0.0, None]
    assert found.mean_error == pytest.approx(0.2 / 3)
    assert found.worst_error == pytest.approx(0.1)


def test_the_band_spans_what_was_assumed_and_what_may_have_been() -> None:
    found = outcome(GOOD, b16="oom")
    assert [each.band for each in found.points] == [(101.0, 110.0), (55.0, 60.0), None, None]
    assert found.tried[0].mean_error == pytest.approx((0.01 + 0.2) / 2)
    assert found.mean_errors == pytest.approx([0.2 / 3, 0.21 / 3])


def test_settings_that_contradict_the_publication_are_no_part_of_the_band() -> None:
    found = outcome(GOOD, others=(400.0, 60.0), contradicts="it says so", b16="oom")
    assert [each.band for each in found.points] == [None] * 4
    assert len(found.mean_errors) == 1
    assert verdicts(found)[0] is Verdict.HOLDS
    assert not found.figure.is_open


def verdicts(found: Outcome) -> list[Verdict]:
    return [each.verdict for each in found.claims]


def test_claims_hold_or_do_not() -> None:
    holds, fails, depends = Verdict.HOLDS, Verdict.FAILS, Verdict.DEPENDS
    assert verdicts(outcome(GOOD, b16="oom")) == [holds, holds, holds]
    assert verdicts(outcome({**GOOD, "a16": 100.0}, b16="oom"))[0] is depends
    assert verdicts(outcome({**GOOD, "a16": 100.0}, others=(101.0, 90.0), b16="oom"))[0] is fails
    assert verdicts(outcome({**GOOD, "b16": 70.0}))[2] is fails


def test_settings_that_run_out_of_memory_decide_nothing() -> None:
    found = outcome(GOOD, others=(None, None), b16="oom")
    assert verdicts(found)[:2] == [Verdict.HOLDS, Verdict.HOLDS]
    assert found.claims[0].others == ()
    alone = outcome({**GOOD, "a8": None}, others=(None, None), a8="oom", b16="oom")
    assert verdicts(alone)[0] is Verdict.FAILS  # the published run had a value


def test_claims_of_values_that_the_simulation_was_set_from_are_not_counted() -> None:
    found = outcome(GOOD, taken="set from it", b16="oom")
    assert counted([found])[Verdict.TAKEN] == 1
    assert counted([found])[Verdict.HOLDS] == 2


def test_bounds_do_not_depend_on_what_was_simulated() -> None:
    near, far = outcome(GOOD, b16="oom"), outcome({**GOOD, "a8": 900.0, "b8": 1.0}, others=(5.0, 7.0))
    assert [each.bounds for each in near.claims] == [each.bounds for each in far.claims]


def test_a_run_that_failed_is_no_run_out_of_memory() -> None:
    found = outcome(GOOD, b16="crash")
    assert verdicts(found) == [Verdict.UNKNOWN] * 3


@pytest.mark.parametrize("drawing", list(Drawing))
def test_the_chart_has_both_sides_of_every_value(drawing: Drawing) -> None:
    chart = chart_of(outcome(GOOD, drawing, b16="oom"))
    assert chart is not None
    drawn = {trace["name"]: trace for trace in chart.data if "plausible" not in trace["name"]}
    assert list(drawn) == ["a, published", "a, simulated", "b, published", "b, simulated"]
    assert list(drawn["a, published"]["y"]) == [100.0, 50.0]
    assert list(drawn["a, simulated"]["y"]) == [110.0, 55.0]
    assert [row[-2:] for row in chart.table.rows][:2] == [("", "101.0 to 110.0"), ("", "55.0 to 60.0")]
    assert "range" not in chart.layout["yaxis"]
    if drawing is Drawing.BARS:
        assert (drawn["b, published"]["y"][1], drawn["b, published"]["text"][1]) == (0.0, "out of memory")
        assert drawn["b, simulated"]["text"] == ["", "out of memory"]
        assert drawn["a, simulated"]["error_y"]["arrayminus"] == pytest.approx([9.0, 0.0])


def test_json_says_what_is_not_known_with_null() -> None:
    (figure,) = as_dict("p", [outcome(GOOD, b16="crash")], [[]])["figures"]
    last = figure["points"][-1]
    assert (last["published"], last["simulated"], last["status"], last["error"]) == (
        None,
        None,
        "crash",
        None,
    )
    assert [claim["verdict"] for claim in figure["claims"]] == ["unknown"] * 3


def test_published_values_read_by_the_wrong_name_are_errors() -> None:
    reads: list[Callable[[], Any]] = [lambda: PUBLISHED.at("c", 8), lambda: PUBLISHED.at("a", 9)]
    for read in reads:
        with pytest.raises((KeyError, ValueError)):
            read()


def test_a_wide_band_does_not_press_the_values_down() -> None:
    chart = chart_of(outcome(GOOD, others=(1000.0, 60.0), b16="oom"))
    assert chart is not None
    assert chart.note
    assert chart.layout["yaxis"]["range"] == [0, pytest.approx(1.5 * 110.0)]
