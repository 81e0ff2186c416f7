"""Profiles: those that come along, a user's own, and mistakes in them."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

import fsdpbench.sim.model.profile as hardware
from fsdpbench.sim.model.profile import ProfileError, load_profile, parse_profile, profile_names

A100 = Path(hardware.__file__).parents[1] / "profiles" / "a100-80gb.toml"


FOUR_A_NODE = {"a100-64gb", "gb200", "gb300", "gh200-96gb", "h100-64gb"}


def test_profiles_that_come_along():
    assert {"a100-40gb", "a100-80gb", "h100-80gb", "h200"} <= set(profile_names())


@pytest.mark.parametrize("name", profile_names())
def test_every_profile_is_whole_and_says_where_its_figures_come_from(name):
    profile = load_profile(name)
    assert profile.name == name
    assert profile.gpus_per_node == (4 if name in FOUR_A_NODE else 8)
    assert 0 < profile.context_bytes < profile.usable_memory_bytes < profile.memory_bytes
    assert set(profile.peak_flops) == {"bf16", "fp16", "tf32", "fp32"}
    sections = ("memory", "compute", "gemm", "attention", "bandwidth", "cpu", "nvlink", "nic", "contention")
    told = [*profile.sources, *profile.estimated]
    for section in sections:
        assert any(key.split(".")[0] == section for key in told), f"{name}: no source for {section}"


def test_a_users_own_file_is_read_by_its_path(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(A100.read_text().replace('name = "a100-80gb"', 'name = "mine"', 1))
    assert load_profile(path).name == "mine"
    assert load_profile(str(path)).sm_count == 108


def test_profiles_cannot_be_changed():
    profile = load_profile("h200")
    with pytest.raises(AttributeError):
        profile.gpus_per_node = 4  # type: ignore[misc]
    with pytest.raises(TypeError):
        profile.compute.peak_tflops["bf16"] = 1.0  # type: ignore[index]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("sm_count = 108", "sm_count = 0", "compute.sm_count = 0: must be from 1 to 4,096 multiprocessors"),
        ("sm_count = 108", "sm_count = 108.5", "compute.sm_count = 108.5: must be a whole number"),
        ("sm_count = 108", 'sm_count = "108"', "compute.sm_count = '108': must be a whole number"),
        ("sm_count = 108", "", "lacks the key compute.sm_count"),
        ("sm_count = 108", "sm_counts = 108", "unknown key compute.sm_counts; did you mean compute.sm_count"),
        ("[compute]", "[comput]", "unknown key comput; did you mean compute"),
        (
            "bandwidth_gb_s = 2039",
            "bandwidth_gb_s = -1",
            "memory.bandwidth_gb_s = -1.0: must be from 10 to",
        ),
        ("capacity_gib = 79.15", "capacity_gib = 2", "nccl_mib_per_communicator = 2950: must not exceed"),
        ("fp32 = 19.5", "fp8 = 19.5", "lacks fp32"),
        ("under_load = 0.977", "under_load = 1.5", "gemm.under_load = 1.5: must be from 0.001 to 1 (share)"),
        ("compute_slowdown", "compute_slowdwn", "did you mean contention.compute_slowdown"),
        ('"cpu.view_us",', '"cpu.vew_us",', "'cpu.vew_us', which is not a key"),
        ("gpus_per_node = 8", "gpus_per_node = 0", "gpus_per_node = 0: must be from 1 to 1,024 GPUs"),
        ("gpus_per_node = 8", "gpus_per_node = = 8", "is not usable TOML"),
        ("[[256, 128, 1.0], ", "[[256, 128], ", "rows, columns, efficiency"),
        (
            "all_gather = { points = [[64000, 11.9], ",
            "all_gather = { points = [[9e12, 11.9], ",
            "nvlink.all_gather",
        ),
        ("[nic]", "[nic.x]", "nic"),
    ],
)
def test_mistakes_name_file_key_and_value(old, new, message):
    text = A100.read_text()
    assert old in text
    with pytest.raises(ProfileError) as caught:
        parse_profile(text.replace(old, new, 1), "mine.toml")
    assert str(caught.value).startswith("hardware profile mine.toml: ")
    assert message in str(caught.value)


def test_an_unknown_name_offers_the_nearest():
    with pytest.raises(ProfileError, match="did you mean a100-80gb"):
        load_profile("a100-80")
    with pytest.raises(ProfileError, match=r"known are .*h200"):
        load_profile("zzz")


def test_an_unreadable_file_is_named(tmp_path):
    with pytest.raises(ProfileError, match=r"none\.toml: cannot be read"):
        load_profile(tmp_path / "none.toml")
    with pytest.raises(ProfileError, match="is a folder, not a file"):
        load_profile(tmp_path)
    (tmp_path / "bad.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ProfileError, match=r"bad\.toml: is not .*UTF-8"):
        load_profile(tmp_path / "bad.toml")


def test_relatives_differ_where_their_data_sheets_do():
    small, large = (tomllib.loads(A100.with_name(f"a100-{size}gb.toml").read_text()) for size in (40, 80))
    assert small["memory"]["bandwidth_gb_s"] < large["memory"]["bandwidth_gb_s"]
    assert small["compute"] == large["compute"]
    assert small["gemm"] == large["gemm"]
