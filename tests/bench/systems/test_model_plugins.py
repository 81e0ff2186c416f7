"""Families of models of other packages: found by entry point, loaded when chosen, part of a result's key."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from fsdpbench.base import plugins
from fsdpbench.base.settings import Settings
from fsdpbench.cli.commands.list import command as list_command
from fsdpbench.engine.results.store import config_record
from fsdpbench.sweep.doctor import Verdict, _plugins
from fsdpbench.sweep.planning import make_config, make_target
from fsdpbench.workloads import PLUGINS, UnknownModelError, families, get_workload

GOOD = """
from dataclasses import dataclass
import torch
from torch import nn
from fsdpbench.workloads import Family
from fsdpbench.workloads.families.gpt_workload import GPTWorkload

FAMILY = Family(lambda name, values: GPTWorkload.from_values(name, values), {
    "wide-tiny": {"layers": 2, "d_model": 64, "heads": 2, "vocab": 64, "max_seq": 32},
})
MISNAMED = Family(FAMILY.make, {"other-tiny": FAMILY.sizes["wide-tiny"]})
"""
ENTRIES = {
    "family:wide": "good_models:FAMILY",
    "family:misnamed": "good_models:MISNAMED",
    "family:number": "good_models:__name__",
    "family:bad": "bad_models:FAMILY",
    "family:gpt": "good_models:FAMILY",
}


@pytest.fixture
def installed(tmp_path: Path, package: Any, forgotten: None, monkeypatch: pytest.MonkeyPatch) -> Path:
    modules = {"good_models.py": GOOD, "bad_models.py": "raise RuntimeError('no\\nluck')"}
    site: Path = package(tmp_path, modules, ENTRIES)
    monkeypatch.syspath_prepend(str(site))
    for name in ("good_models", "bad_models"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    plugins.forget()
    return site


def test_the_names_of_our_own_families_are_known() -> None:
    assert families() == plugins.OWN_FAMILIES


@pytest.mark.usefixtures("installed")
def test_it_is_loaded_when_one_of_its_models_is_chosen_and_not_before() -> None:
    assert get_workload("gpt-tiny").family == "gpt"
    assert "good_models" not in sys.modules
    assert get_workload("wide-tiny").shape["d_model"] == 64
    assert get_workload("wide-tiny", {"layers": 3}).name == "wide-tiny+layers=3"
    assert get_workload("wide", {**get_workload("wide-tiny").shape, "layers": 4}).shape["layers"] == 4


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("model", "told"),
    [
        ("bad-7b", "my-systems 1.0 (bad_models:FAMILY) cannot be loaded: RuntimeError: no"),
        ("number-7b", "is str, no fsdpbench.workloads.Family"),
        ("misnamed-7b", "has a size 'other-tiny': its name must begin with 'misnamed-'"),
    ],
)
def test_what_is_wrong_with_one_is_named(model: str, told: str) -> None:
    with pytest.raises(plugins.PluginError) as caught:
        get_workload(model)
    assert told in str(caught.value)


@pytest.mark.usefixtures("installed")
def test_an_unknown_name_is_compared_with_theirs_too() -> None:
    with pytest.raises(UnknownModelError, match="wide-tiny"):
        get_workload("wide-tinyy")


@pytest.mark.usefixtures("installed")
def test_broken_ones_are_listed_beside_those_that_work() -> None:
    listed = json.loads(CliRunner().invoke(list_command, ["models", "--json"]).output)
    rows = {row["name"]: row for row in listed}
    assert rows["wide-tiny"]["from"] == "my-systems 1.0"
    assert rows["gpt-tiny"]["from"] == "fsdpbench"
    assert rows["gpt"]["state"] == "its name is one of fsdpbench's own"
    assert "no" in rows["bad"]["state"]
    table = CliRunner().invoke(list_command, ["models"])
    assert table.exit_code == 0
    assert "wide-tiny" in table.output
    verdicts = {finding.what: finding.verdict for finding in _plugins()}
    assert verdicts["family wide"] is Verdict.OK
    assert verdicts["family bad"] is Verdict.MISSING
    assert len(PLUGINS.offers()) == len(ENTRIES)


def test_its_sources_are_part_of_a_key(installed: Path) -> None:
    def record() -> dict[str, Any]:
        target = make_target(
            model="wide-tiny", shape={}, device="sim", hardware=None, gpus=2, gpus_per_node=None, data=None,
            measurement=None,
        )  # fmt: skip
        return config_record(make_config(target, "impl-fsdp2", Settings.of(), target.workload()))

    first = record()
    (installed / "good_models.py").write_text(GOOD + "\nCHANGED = True\n")
    plugins.forget()
    second = record()
    assert first["model_from"]["from"] == second["model_from"]["from"] == "my-systems 1.0"
    assert first["key"] != second["key"]
    assert plugins.foreign_model("gpt-2.8b") is None


def test_a_model_of_a_plugin_runs(installed: Path, tmp_path: Path) -> None:
    words = ["run", "--model", "wide-tiny", "--gpus", "2", "--device", "sim", "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "fsdpbench", *words, "-o", str(tmp_path / "run")],
        env={**os.environ, "PYTHONPATH": str(installed)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["status"] == "ok"
    assert result["config"]["model"] == "wide-tiny"
