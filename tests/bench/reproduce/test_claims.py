"""Bounds of the page's claims: a function of the published values, by one rule."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest

from fsdpbench.base.files.documents import rows_beside
from fsdpbench.lab.reproduce import catalogue
from fsdpbench.lab.reproduce.catalogue import figures
from fsdpbench.lab.reproduce.figure import Bounds, Claim, Kind
from fsdpbench.lab.validation.runs.case import PublishedFigure, published

from .claiming import level, ran_out, ratio, retries

PUBLISHED = PublishedFigure(
    "6a", "somebody", "D (0.4 GB)", "GB", (8, 16), {"a": (100.0, 50.0), "b": (99.0, None), "c": (0.0, 46.0)}
)


def by_rule(claim: Claim, figure: PublishedFigure) -> tuple[float, float]:
    """The rule of docs/reproduce.md, written a second time."""
    found = [figure.series[series][figure.x.index(x)] for series, x in claim.places]
    if claim.kind is Kind.RAN_OUT:
        return (found.count(None),) * 2
    values = [value for value in found if value is not None]
    if claim.kind is Kind.RETRIES:
        return (1, math.inf) if values[0] > 0 else (0, 0)
    within = float(figure.read.split("(")[1].split()[0]) if "(" in figure.read else 0
    read = sum(within / value for value in values)
    if claim.kind is Kind.LEVEL:
        return values[0] * (1 - max(0.05, read)), values[0] * (1 + max(0.05, read))
    effect = math.log(values[0] / values[1])
    off = max(abs(effect) / 2, 0.02, read)
    return math.exp(effect - off), math.exp(effect + off)


def test_every_claim_has_the_bounds_that_follow_from_what_was_published(tmp_path: Path) -> None:
    claims = [(claim, figure.about) for figure in figures(tmp_path) for claim in figure.claims]
    assert len(claims) > 40
    for claim, about in claims:
        bounds = claim.bounds(about)
        assert (bounds.low, bounds.high) == pytest.approx(by_rule(claim, about)), claim.words
        value = claim.measure(about.at)
        assert value is not None
        assert bounds.hold(value)


def test_bounds_follow_the_published_values() -> None:
    figure = published("7b")
    claim = ratio("twice", ("batch 2", 128), ("batch 2", 192))
    halved = {
        "batch 2": tuple(
            value and value / (2 if x == 192 else 1) for x, value in figure.along("batch 2").items()
        )
    }
    other = dataclasses.replace(figure, series={**figure.series, **halved})
    assert claim.bounds(other) != claim.bounds(figure)


@pytest.mark.parametrize(
    ("claim", "low", "high"),
    [
        (ratio("an effect", ("a", 8), ("a", 16)), 2**0.5, 2**1.5),
        (ratio("none to speak of", ("a", 8), ("b", 8)), math.exp(-0.02) / 0.99, math.exp(0.02) / 0.99),
        (level("a value", ("a", 8)), 95, 105),
        (ran_out("memory", ("b", 8), ("b", 16)), 1, 1),
        (retries("none", ("c", 8)), 0, 0),
        (retries("some", ("c", 16)), 1, math.inf),
    ],
)
def test_the_rule(claim: Claim, low: float, high: float) -> None:
    bounds = claim.bounds(PUBLISHED)
    assert (bounds.low, bounds.high) == pytest.approx((low, high))


def test_a_reading_that_is_coarser_than_the_effect_widens_the_bounds() -> None:
    coarse = dataclasses.replace(PUBLISHED, read="D (5 GB)")
    assert ratio("", ("a", 8), ("b", 8)).bounds(coarse).high > 1.1
    assert Bounds(1, 2).hold(2)
    assert not Bounds(1, 2).hold(2.1)


def test_a_claim_about_nothing_is_an_error() -> None:
    with pytest.raises(ValueError, match="no value"):
        level("out of memory", ("b", 16)).bounds(PUBLISHED)


def test_no_bound_is_written_where_claims_are_made() -> None:
    """Claims name places and nothing else: no row has room for a bound."""
    rows = rows_beside(catalogue.__file__, "claims.csv")
    places = ["series", "x", "other_series", "other_x"]
    assert list(rows[0]) == ["figure", "kind", "words", *places, "taken"]
    for row in rows:
        about = published(row["figure"])
        for series, x in ((row["series"], row["x"]), (row["other_series"], row["other_x"])):
            assert not series or (series in about.series and x in map(str, about.x))
