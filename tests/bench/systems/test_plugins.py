"""Systems of other packages: found by entry point, loaded when chosen, their errors named and kept apart."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from fsdpbench.base import plugins
from fsdpbench.base.configuration.config import Config, Measurement
from fsdpbench.base.errors import UsageError
from fsdpbench.base.plugins import foreign_identity
from fsdpbench.base.settings import Settings
from fsdpbench.cli.commands.list import command as list_command
from fsdpbench.systems import get_system, offers

GOOD = """
from fsdpbench.systems import System
class Good(System):
    name = "good"
    summary = "it is fine"
    devices = frozenset({"cpu"})
    def wrap(self, context):
        return context.build_model()
class Misnamed(Good):
    name = "other"
class Absent(Good):
    name = "absent"
    package = "surely_not_installed"
    installation = "pip install surely"
class Abstract(System):
    name = "abstract"
"""
ENTRIES = {
    "good": "good_systems:Good",
    "misnamed": "good_systems:Misnamed",
    "absent": "good_systems:Absent",
    "abstract": "good_systems:Abstract",
    "gone": "no_such_module:System",
    "number": "good_systems:__name__",
    "bad": "bad_systems:Bad",
    "single": "good_systems:Good",
}


@pytest.fixture
def installed(tmp_path: Path, package: Any, forgotten: None, monkeypatch: pytest.MonkeyPatch) -> Path:
    site: Path = package(
        tmp_path, {"good_systems.py": GOOD, "bad_systems.py": "raise RuntimeError('no\\nluck')"}, ENTRIES
    )
    monkeypatch.syspath_prepend(str(site))
    for name in ("good_systems", "bad_systems"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    plugins.plugins.cache_clear()
    return site


def config(system: str, device: str = "cpu") -> Config:
    return Config(
        model="gpt-tiny", shape={}, system=system, device=device, hardware=None, gpus=2, gpus_per_node=2,
        settings=Settings.of(), measurement=Measurement.default_for("cpu"),
    )  # fmt: skip


@pytest.mark.usefixtures("installed")
def test_it_is_loaded_when_it_is_chosen_and_not_before() -> None:
    assert "good" in plugins.plugins()
    assert "good_systems" not in sys.modules
    system = get_system("good")
    assert system.summary == "it is fine"
    assert get_system("good") is system
    assert system.not_applicable(config("good")) == {}
    assert system.not_applicable(config("good", "cuda")) == {"device": "it runs on cpu, not on cuda"}


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("gone", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("bad", "my-systems 1.0 (bad_systems:Bad) cannot be loaded: RuntimeError: no"),
        ("misnamed", "calls itself 'other'"),
        ("number", "is str, no fsdpbench.systems.System"),
        ("abstract", "cannot be loaded: TypeError"),
        ("goodd", "Did you mean good"),
    ],
)
def test_what_is_wrong_with_one_is_named(name: str, told: str) -> None:
    with pytest.raises(UsageError) as caught:
        get_system(name)
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.usefixtures("installed")
def test_broken_ones_are_listed_beside_those_that_work() -> None:
    by_name = {(offer.name, offer.origin): offer for offer in offers()}
    assert by_name["good", "my-systems 1.0"].problem is None
    assert "cannot be loaded" in str(by_name["gone", "my-systems 1.0"].problem)
    assert by_name["single", "fsdpbench"].problem is None
    assert "one of fsdpbench's own" in str(by_name["single", "my-systems 1.0"].problem)
    assert get_system("single").summary == "one GPU alone, no communication"
    shown = json.loads(CliRunner().invoke(list_command, ["systems", "--json"]).output)
    states = {row["name"]: row["state"] for row in shown if row["from"] != "fsdpbench"}
    assert states["good"] == "ready"
    assert states["absent"] == "surely_not_installed is not installed: pip install surely"
    assert "no_such_module" in states["gone"]


def test_its_sources_are_part_of_a_key(installed: Path) -> None:
    first = foreign_identity("good")
    assert first is not None
    assert first["from"] == "my-systems 1.0"
    (installed / "good_systems.py").write_text(GOOD + "\n# changed\n")
    foreign_identity.cache_clear()
    second = foreign_identity("good")
    assert second is not None
    assert second["source"] != first["source"]
    assert foreign_identity("impl-fsdp2") is None
