"""The picture of a choice by unit: what each block and each unit does, as wide as its blocks."""

from __future__ import annotations

from collections.abc import Mapping
from xml.etree import ElementTree

import pytest

from fsdpbench.answers.tune.front import Candidate
from fsdpbench.answers.tune.per_unit import Chosen
from fsdpbench.answers.tune.unit_gain import Curve, draw
from fsdpbench.engine.results.records import Status
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
