"""Software profiles: those that come along, a user's own, and mistakes in them."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdpbench.sim.model.profile import ProfileError, load_profile
from fsdpbench.sim.model.software import (
    CURRENT,
    SoftwareProfile,
    load_software,
    parse_software,
    software_names,
)

HEAD = """name = "mine"
title = "mine"
source = "measured here"
[sources]
"attention" = "measured"
"trainer" = "measured"
"""
H100 = load_profile("h100-80gb")
OWN = HEAD + "[attention]\nbackward_rate = 0.5\n"


def test_profiles_that_come_along() -> None:
    assert software_names() == [
        "composer-2023-autumn",
        "composer-2023-spring",
        CURRENT,
        "fms-acceleration-2024",
        "fms-fsdp-2024",
        "fsdp1-2022",
        "thunder-2024",
        "torch-2.10",
        "torch-2.8",
        "torchtitan-2024-summer",
        "torchtitan-2024-winter",
        "torchtitan-2025-autumn",
    ]


@pytest.mark.parametrize("name", software_names())
def test_every_constant_has_a_source_of_its_own(name: str) -> None:
    profile = load_software(name)
    assert profile.name == name
    assert set(profile.sources) == set(profile.changes)
    assert bool(profile.changes) == (name != CURRENT)


def test_a_profile_may_stand_on_a_packaged_one() -> None:
    base, derived = load_software("fsdp1-2022"), load_software("composer-2023-spring")
    assert derived.fsdp1 == base.fsdp1
    assert derived.sources["attention.backward_rate"] == base.sources["attention.backward_rate"]
    assert set(derived.changes) - set(base.changes) == {
        "trainer.fused_loss",
        "trainer.keeps_outputs",
        "trainer.metrics",
    }


def test_a_users_own_file_is_read_by_its_path(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(OWN)
    for given_path in (path, str(path)):
        assert load_software(given_path).changes == {"attention.backward_rate": 0.5}


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("backward_rate = 0.5", "backward_rate = 0", "attention.backward_rate = 0.0: must be from 0.001"),
        ("backward_rate = 0.5", "backward_rate = inf", "attention.backward_rate = inf: must be a finite"),
        ("backward_rate = 0.5", "backward_rate = true", "attention.backward_rate = True: must be a number"),
        ("backward_rate = 0.5", "unpads = 1", "attention.unpads = 1: must be true or false"),
        ("backward_rate", "backward_rat", "unknown key attention.backward_rat; did you mean attention.b"),
        ("[attention]", "[atention]", "unknown key atention; did you mean attention"),
        ('"attention" =', '"atention" =', "sources names 'atention', which is not a key of a software "
            "profile"),
        ('"attention" = "measured"', '"attention" = ""', "sources.'attention' must not be empty"),
        ('"attention" = "measured"', "", "attention.backward_rate = 0.5: name its source"),
        ('name = "mine"', 'name = ""', "name must not be empty"),
        ('name = "mine"\n', "", "lacks the key name"),
        ('name = "mine"', 'name = "current"', "name = 'current' names the profile that changes nothing"),
        ('name = "mine"', 'name = "mine"\nbase = "a900"', "base = 'a900' is not a packaged profile; known "
            "are"),
        ('name = "mine"', 'name = = "mine"', "is not usable TOML"),
        ("[attention]\nbackward_rate = 0.5", "[trainer]\nmetrics = 2", "set trainer.keeps_outputs = true"),
        ("[attention]\nbackward_rate = 0.5", "[trainer]\nmetrics = -1", "trainer.metrics = -1: must be"),
        ("[attention]\nbackward_rate = 0.5", "[trainer]\nhost_us = -1", "trainer.host_us = -1.0: must be"),
    ],
)  # fmt: skip
def test_mistakes_name_file_key_and_value(old: str, new: str, message: str) -> None:
    assert old in OWN
    with pytest.raises(ProfileError) as caught:
        parse_software(OWN.replace(old, new, 1), "mine.toml")
    assert str(caught.value).startswith("software profile mine.toml: ")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_unknown_name_offers_the_nearest() -> None:
    with pytest.raises(ProfileError, match="unknown software 'fsdp1-2023': did you mean fsdp1-2022"):
        load_software("fsdp1-2023")


@settings(deadline=None)
@given(forward=st.floats(), backward=st.floats(), host=st.floats(), metrics=st.integers(-5, 1005))
def test_values_are_read_as_they_are_or_refused_by_their_key(
    forward: float, backward: float, host: float, metrics: int
) -> None:
    text = (
        f"{HEAD}[attention]\nforward_rate = {forward!r}\nbackward_rate = {backward!r}\n"
        f"[trainer]\nkeeps_outputs = true\nhost_us = {host!r}\nmetrics = {metrics}\n"
    )
    wrong = {
        "attention.forward_rate": not 0.001 <= forward <= 10,
        "attention.backward_rate": not 0.001 <= backward <= 10,
        "trainer.host_us": not 0 <= host <= 1e8,
        "trainer.metrics": not 0 <= metrics <= 1000,
    }
    if any(wrong.values()):
        with pytest.raises(ProfileError) as caught:
            parse_software(text, "mine.toml")
        assert any(f": {key} = " in str(caught.value) for key, is_wrong in wrong.items() if is_wrong)
        return
    profile = parse_software(text, "mine.toml")
    assert (profile.attention.forward_rate, profile.attention.backward_rate) == (forward, backward)
    assert (profile.trainer.host_us, profile.trainer.metrics) == (host, metrics)


@settings(deadline=None)
@given(rate=st.floats(1e-3, 10))
def test_rates_are_shares_of_the_hardwares(rate: float) -> None:
    software = parse_software(f"{HEAD}[attention]\nbackward_rate = {rate!r}\n", "mine.toml")
    slower = software.applied_to(H100)
    assert slower.attention.backward_tflops == pytest.approx(H100.attention.backward_tflops * rate)
    assert dataclasses.replace(slower, attention=H100.attention) == H100


def test_profiles_cannot_be_changed() -> None:
    profile = load_software("fsdp1-2022")
    with pytest.raises(AttributeError):
        profile.attention.backward_rate = 1.0  # type: ignore[misc]
    assert isinstance(profile, SoftwareProfile)
