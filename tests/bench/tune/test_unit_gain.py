"""A choice by unit: which of it and the uniform one is recommended; and its picture, with what each block and
each unit does, as wide as its blocks."""

from __future__ import annotations

from collections.abc import Mapping
from xml.etree import ElementTree

import pytest

from fsdpbench.answers.tune.front import Candidate
from fsdpbench.answers.tune.per_unit import Chosen
from fsdpbench.answers.tune.unit_gain import Curve, UnitGain, draw
from fsdpbench.engine.results.records import Status
from fsdpbench.reports.pages.ranking import Paired
from fsdpbench.sweep.planning import configured, make_target

SIZED: Mapping[str, object] = {
    "wrap": "every-1:2+every-2:2",
    "reshard_after_forward": "true:3+false:1",
    "forward_prefetch": "2:3+0:1",
}
OFFLOADED: Mapping[str, object] = {"activation_offload": "true:2+false:4"}


@pytest.mark.parametrize(
    ("settings", "rows", "boxes"),
    [
        (SIZED, ["recomputed", "after forward", "blocks of a unit", "ahead, forward"], 6 + 4 + 4 + 4),
        (OFFLOADED, ["recomputed", "after forward", "activations"], 6 + 6 + 6),
    ],
)
def test_it_has_sizes_and_prefetch_where_units_differ(
    settings: Mapping[str, object], rows: list[str], boxes: int
) -> None:
    target = make_target(model="gpt-tiny", gpus=8, hardware="a100-80gb", shape={"layers": 6})
    mixed = "full:2+none:4"
    config = configured(target, "torch-fsdp2", activation_checkpointing=mixed, **settings)
    best = Candidate(config, Status.OK, 1.0, 1 << 30, True)
    curve = Curve("by unit", "#000", [(0, 1 << 29), (10**9, 1 << 30)], 1, 1 << 30)
    root = ElementTree.fromstring(draw(Chosen(None, best, 1, 2 << 30), [curve]))
    words = [each.text or "" for each in root.iter() if each.tag.endswith("text")]
    assert [word for word in words if word in {*rows, "activations"}] == rows
    units = [each for each in root.iter() if each.tag.endswith("rect") and len(each)]
    assert len(units) == boxes
    places: dict[float, float] = {}
    for each in units:
        places[float(each.attrib["y"])] = float(each.attrib["x"]) + float(each.attrib["width"])
    assert len(places) == len(rows)
    widths = [*places.values()]
    assert widths == pytest.approx([1010] * len(rows), abs=0.2), "each row is as wide as the model"
    written = [word for word in words if word.isdigit() and word != "0"]
    assert written == (["1", "1", "2", "2", "2", "2", "2"] if settings is SIZED else [])


def candidate(speed: float, **settings: object) -> Candidate:
    target = make_target(model="gpt-tiny", gpus=8, hardware="a100-80gb", shape={"layers": 6})
    return Candidate(configured(target, "torch-fsdp2", **settings), Status.OK, speed, 1 << 30, True)


@pytest.mark.parametrize(
    ("gain", "is_uniform"),
    [
        (Paired(0.05, 0.01, 0.09), False),
        (Paired(0.05, 0.0, 0.1), True),
        (Paired(0.05, -0.1, 0.1), True),
        (Paired(0.0, 0.0, 0.0), True),
        (None, False),
    ],
)
def test_only_what_is_clearly_faster_replaces_the_uniform_one(gain: Paired | None, is_uniform: bool) -> None:
    best = candidate(1.05, activation_checkpointing="full:2+none:4")
    uniform = candidate(1.0, activation_checkpointing="full")
    found = UnitGain(Chosen(uniform if gain else None, best, 3, 2 << 30), gain)
    assert found.recommended == (uniform if is_uniform else best).config
    assert found.to_dict()["recommended"] == found.recommended.name
    assert ("stays the recommendation" in found.words()) == is_uniform
    assert "recompute full 2 none 4" in found.words()


def test_that_nothing_is_faster_is_said_without_an_interval() -> None:
    best = candidate(1.0, activation_checkpointing="full")
    words = UnitGain.of(Chosen(best, best, 7, 2 << 30)).words(", 5 tokens/s/GPU")
    assert words == "By unit: none of 7 choices is faster than the best uniform one, 5 tokens/s/GPU"
