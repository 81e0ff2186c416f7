"""`fsdpbench run` beside another one in the same directory: each has its own result, and none waits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fsdpbench.base.settings import Settings
from fsdpbench.cli.commands.run import own_name
from fsdpbench.cli.requests.request import target_of
from fsdpbench.engine.results.store import Store
from fsdpbench.sweep.planning import make_config

RUN = ("run", "--model", "gpt-125m", "--shape", "layers=1", "--gpus", "8", "--device", "sim", "--json")


def test_a_run_beside_another_takes_the_next_folder(
    fsdpbench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    again = json.loads(fsdpbench(*RUN).stdout)
    own = Path(again["folder"]).parent
    assert own.parent == Path("runs")
    with Store.open_or_create(own).locked():
        beside = json.loads(fsdpbench(*RUN).stdout)
    assert Path(beside["folder"]).parent == own.with_name(f"{own.name}-2")
    assert again["step_time_s"] == beside["step_time_s"]


def test_another_configuration_has_another_folder_and_the_same_its_own() -> None:
    target = target_of({"model": "gpt-tiny", "gpus": "8", "device": "sim"})[0]
    first, again, other = (
        make_config(target, "impl-fsdp2", Settings.of(batch=batch), target.workload()) for batch in (1, 1, 2)
    )
    assert own_name(first) == own_name(again) != own_name(other)
