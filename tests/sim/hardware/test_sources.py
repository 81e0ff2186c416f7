"""No constant without a source: hardware profiles that come along, and fitted figures' intervals."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import fsdpbench.sim.model.profile as hardware
import fsdpbench.sim.model.software as software
from fsdpbench.sim.model.keys import constants

PROFILES = sorted((Path(hardware.__file__).parents[1] / "profiles").glob("*.toml"))
SOFTWARE = sorted((Path(software.__file__).parents[1] / "profiles" / "software").glob("*.toml"))
_FITTED = re.compile(r"calibrated on|fitted to (\w+ )?(the )?(\S+ )?published")
# What was fitted says how well it is known: a standard error, or the range that the runs allow.
_KNOWN_TO = re.compile(r"±|\bto \d")


def read(path: Path) -> dict[str, Any]:
    return tomllib.loads(path.read_text())


@pytest.mark.parametrize("path", PROFILES, ids=lambda path: path.stem)
def test_every_figure_of_a_packaged_profile_has_a_source_or_is_called_an_estimate(path: Path) -> None:
    assert _unsourced(read(path)) == []


@pytest.mark.parametrize("path", PROFILES + SOFTWARE, ids=lambda path: path.stem)
def test_what_was_fitted_to_published_runs_says_how_well_it_is_known(path: Path) -> None:
    table = read(path)
    vague = [
        key
        for key, source in table.get("sources", {}).items()
        if _FITTED.search(source) and not _KNOWN_TO.search(source)
    ]
    assert vague == []


def test_a_figure_without_a_source_is_found() -> None:
    table = read(PROFILES[0])
    table["nic"]["wished_us"] = 3
    del table["sources"]["nic"]
    assert {"nic.wished_us", "nic.gb_s_per_node"} <= set(_unsourced(table))
    table["estimated"].append("nic")
    assert _unsourced(table) == []


def test_the_nearest_source_counts() -> None:
    table = {"sources": {"gemm": "a", "gemm.tiles": "b"}, "gemm": {"tiles": [[1]], "floor_us": 2}}
    assert {found.key: found.source for found in constants(table)} == {
        "gemm.tiles": "b",
        "gemm.floor_us": "a",
    }


def _unsourced(table: Mapping[str, Any]) -> list[str]:
    """Keys of a profile's file that have neither a source nor a place in `estimated`."""
    return [found.key for found in constants(table) if found.source is None and not found.estimated]
