"""Presets, conditions and samples: which combinations become points."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from fsdpbench.base.errors import UsageError
from fsdpbench.base.files.documents import to_toml
from fsdpbench.cli.requests.options import read_space_file
from fsdpbench.cli.requests.request import SweepRequest, make_request, request_of_space
from fsdpbench.sweep.spaces.presets import DEFAULT_SYSTEMS, PRESETS
from fsdpbench.sweep.spaces.space import MOST_COMBINATIONS
from fsdpbench.sweep.spaces.space_file import read_space

SIM = {"model": "gpt-tiny", "gpus": 8, "device": "sim"}


def request(given: dict[str, Any] | None = None, **lists: list[Any]) -> SweepRequest:
    return make_request({**SIM, **(given or {})}, lists, whole_space=bool(lists))


def settings_of(made: SweepRequest, *names: str) -> set[tuple[Any, ...]]:
    return {tuple(getattr(config.settings, name) for name in names) for config in made.plan().points}


def test_accumulation_puts_reductions_off_only_where_there_are_several_microbatches() -> None:
    made = request({"preset": "accumulation"})
    both = {(count, sync) for count in (2, 4, 8) for sync in ("every", "last")}
    assert settings_of(made, "grad_accum", "grad_sync") == both | {(1, "every")}


def test_scaling_grows_the_world_and_tries_hybrid_sharding_beyond_one_node() -> None:
    points = request({"preset": "scaling"}).plan().points
    assert {config.gpus for config in points} == {8, 16, 32, 64, 128}
    hybrid = {config.gpus for config in points if config.settings.strategy == "HYBRID_SHARD"}
    assert hybrid == {16, 32, 64, 128}
    assert len({config.name for config in points}) == len(points)


def test_scaling_on_real_devices_ends_at_what_there_is() -> None:
    points = request({"preset": "scaling", "device": "cpu", "gpus": 6}).plan().points
    assert {config.gpus for config in points} == {1, 2, 4, 6}


def test_hybrid_sweeps_every_shard_size_between_one_and_all() -> None:
    found = settings_of(request({"preset": "hybrid", "gpus": 16}), "strategy", "shard_size")
    hybrids = ("HYBRID_SHARD", "_HYBRID_SHARD_ZERO2")
    assert found == {("FULL_SHARD", None), ("SHARD_GRAD_OP", None), *itertools.product(hybrids, (2, 4, 8))}


@pytest.mark.parametrize("name", [name for name in PRESETS if name != "wide"])
@pytest.mark.parametrize("device", ["sim", "cpu"])
def test_every_preset_has_points_for_both_front_ends_and_can_be_written_down(name: str, device: str) -> None:
    made = request({"preset": name, "device": device, "gpus": 4})
    points = made.plan().points
    references = set(made.space.references)
    assert {config.system for config in points} - references == set(DEFAULT_SYSTEMS)
    again = request_of_space(made.to_space())
    assert [config.to_dict() for config in again.plan().points] == [config.to_dict() for config in points]


def test_own_lists_stand_over_those_of_a_preset() -> None:
    made = make_request({**SIM, "preset": "memory"}, {"batch": [3]}, whole_space=False)
    assert settings_of(made, "batch") == {(3,)}


@pytest.mark.parametrize(
    ("given", "count"), [({"gpus": "8,16,32"}, 3), ({"system": "torch-fsdp1,torch-fsdp2"}, 2)]
)
def test_with_a_setting_named_a_list_of_worlds_or_systems_is_all_that_varies(
    given: dict[str, Any], count: int
) -> None:
    made = make_request({**SIM, **given}, {"batch": [4]}, whole_space=False)
    assert len(made.plan().points) == count


def test_a_condition_adds_lists_to_the_points_that_match() -> None:
    rules = ["strategy=HYBRID_SHARD => shard_size=2,4", "shard_size=2 gpus=8 => batch=1,5"]
    made = request({"when": rules}, strategy=["FULL_SHARD", "HYBRID_SHARD"], batch=[3])
    expected = {("FULL_SHARD", None, 3), ("HYBRID_SHARD", 4, 3)}
    expected |= {("HYBRID_SHARD", 2, batch) for batch in (1, 5)}
    assert settings_of(made, "strategy", "shard_size", "batch") == expected


def test_an_excluded_combination_is_no_point() -> None:
    exclude = ["batch=2,4 wrap=root", "system=torch-fsdp2 batch=1"]
    points = request({"exclude": exclude}, batch=[1, 2, 4], wrap=["block", "root"]).plan().points
    found = {(config.system, config.settings.batch, config.settings.wrap) for config in points}
    blocks = {(system, batch, "block") for system in DEFAULT_SYSTEMS for batch in (1, 2, 4)}
    assert found == (blocks | {("impl-fsdp2", 1, "root")}) - {("torch-fsdp2", 1, "block")}


def test_conditions_in_toml_are_those_of_the_command_line(tmp_path: Path) -> None:
    words = {"when": ["strategy=HYBRID_SHARD => shard_size=2,4"], "exclude": ["batch=2 shard_size=4"]}
    lists: dict[str, list[Any]] = {"strategy": ["FULL_SHARD", "HYBRID_SHARD"], "batch": [1, 2]}
    made = request(words, **lists)
    path = tmp_path / "space.toml"
    path.write_text(to_toml(made.to_space()))
    again = make_request(*read_space_file(str(path)), whole_space=True)
    assert [c.to_dict() for c in again.plan().points] == [c.to_dict() for c in made.plan().points]


def test_a_sample_depends_on_its_seed_alone_and_grows_by_adding() -> None:
    lists: dict[str, list[Any]] = {"batch": list(range(1, 11)), "wrap": ["block", "root"]}

    def drawn(count: int, seed: int = 0, **more: Any) -> set[str]:
        made = request({"max_points": count, "sample_seed": seed, "system": "impl-fsdp2", **more}, **lists)
        plan = made.plan()
        assert len(plan.points) == min(count, 20)
        assert bool(plan.notes) == (count < 20)
        return {config.name for config in plan.points}

    assert drawn(5) == drawn(5)
    assert drawn(5) < drawn(9) < drawn(25)
    assert drawn(5) != drawn(5, seed=1)
    assert drawn(5) == drawn(5, timeout=77.0)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"preset": "memroy"}, "memory"),
        ({"when": ["strategy=HYBRID_SHARD"]}, "=>"),
        ({"when": ["strategy => batch=2"]}, "name=value"),
        ({"exclude": ["stratgy=FULL_SHARD"]}, "strategy"),
        ({"exclude": [{"batch": 2}]}, "match"),
        ({"max_points": 0}, "at least 1"),
        ({"max_points": "x"}, "whole number"),
        ({"gpus": "8,x"}, "whole number"),
    ],
)
def test_bad_spaces_name_the_way_out(given: dict[str, Any], told: str) -> None:
    with pytest.raises(UsageError, match=told):
        request(given).plan()


def test_a_space_too_large_to_list_is_refused_before_it_is_listed() -> None:
    side = int(MOST_COMBINATIONS**0.5) + 1
    with pytest.raises(UsageError, match="tune"):
        request(batch=list(range(1, side)), seed=list(range(side))).plan()


@pytest.mark.parametrize(
    "key", ["model", "hardware", "device", "system", "software", "data", "preset", "shape"]
)
def test_an_empty_value_in_a_space_is_not_the_default(key: str) -> None:
    with pytest.raises(UsageError, match=f"s.toml: {key} is empty; leave it out for its default"):
        read_space({**SIM, key: ""}, "s.toml")
