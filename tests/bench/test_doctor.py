"""`fsdpbench doctor`: what was tried works, and what is missing has a way out."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from fsdpbench.base import torch_internals
from fsdpbench.impl.shared import torch_internals as impl_internals
from fsdpbench.sweep import doctor
from fsdpbench.sweep.doctor import Verdict, examine


def test_it_trains_a_small_model_on_each_device_and_leaves_nothing(
    fsdpbench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = fsdpbench("doctor", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    found = {finding["what"]: finding for finding in json.loads(done.stdout)["findings"]}
    for device in ("sim", "cpu"):
        assert found[f"--device {device}"]["verdict"] == "ok"
        assert "ms a step" in found[f"--device {device}"]["detail"]
    assert list(tmp_path.iterdir()) == []


def test_what_is_missing_has_a_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    gone = {"optuna", "submitit", "hta"}
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name in gone else real(name, *rest)
    )
    monkeypatch.setenv("PATH", "")
    missing = [finding for finding in examine(try_devices=False) if finding.verdict is Verdict.MISSING]
    assert {"extra hta", "extra tune", "extra slurm", "Slurm"} <= {finding.what for finding in missing}
    assert all(finding.way_out for finding in missing)


def test_an_unsupported_torch_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.importlib.metadata, "version", lambda name: "2.9.1+cpu")
    findings: dict[str, Any] = {finding.what: finding for finding in examine(try_devices=False)}
    assert findings["torch"].verdict is Verdict.BROKEN
    assert "2.13" in findings["torch"].way_out


def test_private_names_that_torch_lacks_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch._C, "_current_graph_task_id")  # of both packages
    for door in (torch_internals, impl_internals):
        monkeypatch.delitem(vars(door), "current_graph_task_id", raising=False)
    told = [finding for finding in examine(try_devices=False) if finding.what == "torch's private names"]
    assert len(told) == 2
    for finding in told:
        assert finding.verdict is Verdict.MISSING
        assert f"torch {torch.__version__} has no torch._C._current_graph_task_id" in finding.detail
        assert finding.way_out == "install a version of torch that has it"


def test_a_torch_with_all_private_names_is_told_so() -> None:
    (told,) = [finding for finding in examine(try_devices=False) if finding.what == "torch's private names"]
    assert told.verdict is Verdict.OK


def test_a_torch_that_cannot_be_imported_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    def unloadable() -> list[str]:
        raise ImportError("libtorch_cpu.so: cannot open shared object file")

    monkeypatch.setattr(impl_internals, "missing", unloadable)
    (told,) = [finding for finding in examine(try_devices=False) if finding.what == "torch's private names"]
    assert told.verdict is Verdict.BROKEN
    assert "libtorch_cpu.so" in told.detail
