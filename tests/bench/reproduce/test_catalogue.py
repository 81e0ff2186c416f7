"""The figures: every published value has a case, every figure its words, other settings change something."""

from __future__ import annotations

from pathlib import Path

import pytest

from fsdpbench.lab.reproduce.catalogue import NAMES, figures
from fsdpbench.lab.reproduce.figure import PaperFigure, words
from fsdpbench.lab.validation.paper_network import config_of
from fsdpbench.lab.validation.runs.case import published, published_figures
from fsdpbench.sim.model.profile import load_profile
from fsdpbench.sweep.planning import not_applicable


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, PaperFigure]:
    return {each.name: each for each in figures(tmp_path_factory.mktemp("profiles"))}


def test_every_figure_is_there_once_with_its_words(made: dict[str, PaperFigure]) -> None:
    assert tuple(made) == NAMES == tuple(words())
    for figure in made.values():
        assert len(figure.words.why) == len(figure.contrasts)
        assert figure.words.assumed
        assert bool(figure.points) == (figure.name in published_figures())


def test_every_published_value_is_a_point_at_its_place(made: dict[str, PaperFigure]) -> None:
    for name, found in published_figures().items():
        points = {(point.series, point.x): point.published for point in made[name].points}
        wanted = {(series, x): found.at(series, x) for series in found.series for x in found.x}
        assert points == wanted


def test_a_point_s_case_is_that_of_its_series_and_place(made: dict[str, PaperFigure]) -> None:
    for point in made["7a"].points:
        assert point.case.gpus == point.x
        assert ("HYBRID" in str(point.case.settings["strategy"])) == point.series.startswith("hybrid")
    for point in made["6c"].points:
        limit = point.case.settings["limit_all_gathers"]
        assert (limit == "off") == (point.series == "limiter off")
        assert str(point.x) == f"{point.case.model}, {point.case.gpus} GPUs"
    for point in made["8c"].points:
        assert point.series == f"batch {point.case.settings['batch']}, {point.kind.path[-1]}"
        assert point.case.gpus == point.x


def test_bars_that_are_missing_are_runs_out_of_memory(made: dict[str, PaperFigure]) -> None:
    missing = [point for point in made["6a"].points if point.published is None]
    assert [(point.series, point.case.model) for point in missing] == [
        ("full replication", "t5-11b"),
        ("DDP", "t5-11b"),
    ]
    assert all(point.case.ran_out and not point.case.published for point in missing)
    assert published("6a").at("DDP", "t5-11b") is None


@pytest.mark.parametrize("name", ["6a", "6c", "7a", "7b", "7c", "2022", "104509"])
def test_other_settings_change_the_case_and_can_run(made: dict[str, PaperFigure], name: str) -> None:
    for variant in made[name].variants:
        assert variant.change is not None
        changed = [
            (point.case, other)
            for point in made[name].points
            if (other := variant.change(point.case)) is not None
        ]
        assert changed, variant.words
        own, other = changed[0]
        ours, theirs = config_of(own), config_of(other)
        assert ours.to_dict() != theirs.to_dict(), variant.words
        assert not_applicable(theirs) == {}


def test_machines_differ_from_their_base_in_what_is_named(tmp_path: Path) -> None:
    (figure,) = figures(tmp_path, ["7a"])
    tf32 = next(each for each in figure.variants if each.words == "dense part in TF32")
    assert tf32.change is not None
    changed = tf32.change(figure.points[0].case)
    assert changed is not None
    own, other = load_profile(figure.points[0].case.hardware), load_profile(changed.hardware)
    assert other.compute.peak_tflops["fp32"] == own.compute.peak_tflops["tf32"]
    assert (own.memory, own.nic, own.gemm) == (other.memory, other.nic, other.gemm)
    again = tf32.change(figure.points[0].case)
    assert again == changed  # the same path: the same key, so that a run resumes
