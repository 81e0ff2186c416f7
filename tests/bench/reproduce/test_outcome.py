"""What is made of results: errors, bands, claims, and runs without an answer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fsdpbench.reproduce.building import at_least, at_most, ran_out, ratio
from fsdpbench.reproduce.charts import chart_of
from fsdpbench.reproduce.document import as_dict
from fsdpbench.reproduce.figure import Drawing, PaperFigure, Point, Variant
from fsdpbench.reproduce.outcome import Outcome, outcome_of
from fsdpbench.reproduce.run import Runs
from fsdpbench.validation.predict import Prediction
from fsdpbench.validation.runs.case import Case, Figure
from fsdpbench.validation.runs.published import PublishedFigure

PUBLISHED = PublishedFigure(
    "6a", "somebody", "B", "TFLOPS/GPU", (8, 16), {"a": (100.0, 50.0), "b": (80.0, None)}
)


def a_case(name: str) -> Case:
    return Case(name, "", "", "gpt-tiny", "a100-80gb", 8, {}, {})


def predicted(name: str, value: float | None, status: str = "ok") -> Prediction:
    return Prediction(a_case(name), {"status": status, "hardware_tflops_per_gpu": value})


def outcome(
    values: dict[str, float | None],
    drawing: Drawing = Drawing.BARS,
    others: tuple[float, float] = (101.0, 60.0),
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
        variants=(Variant("other", ready=other),),
        claims=(
            at_least("twice as fast", ratio(("a", 8), ("a", 16)), 1.5),
            at_most("no more than b", ratio(("a", 8), ("b", 8)), 1.3),
            at_least("out of memory", ran_out(("b", 16)), 1, ""),
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
    assert found.nearest is None  # on the points that it changes, what is assumed is nearer
    worse = outcome({**GOOD, "a8": 150.0}, b16="oom")
    assert worse.nearest is not None


def test_claims_hold_or_do_not() -> None:
    assert [each.same for each in outcome(GOOD, b16="oom").claims] == [True, False, True]
    assert [each.same for each in outcome({**GOOD, "a16": 100.0}, b16="oom").claims] == [False, False, True]
    assert [each.same for each in outcome({**GOOD, "b16": 70.0}).claims] == [True, False, False]


def test_a_run_that_failed_is_no_run_out_of_memory() -> None:
    found = outcome(GOOD, b16="crash")
    assert [each.same for each in found.claims] == [None, None, None]


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
    assert [claim["same"] for claim in figure["claims"]] == [None] * 3


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
