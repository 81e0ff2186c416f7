"""`fsdpbench run` beside another one in the same directory: each has its own result, and none waits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fsdpbench.results.store import Store

RUN = ("run", "--model", "gpt-125m", "--shape", "layers=1", "--gpus", "8", "--device", "sim", "--json")


def test_a_run_beside_another_takes_the_next_folder(
    fsdpbench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with Store.open_or_create(Path("runs/single")).locked():
        beside = json.loads(fsdpbench(*RUN).stdout)
    assert Path(beside["folder"]).parts[:2] == ("runs", "single-2")
    again = json.loads(fsdpbench(*RUN).stdout)
    assert Path(again["folder"]).parts[:2] == ("runs", "single")
    assert again["step_time_s"] == beside["step_time_s"]
