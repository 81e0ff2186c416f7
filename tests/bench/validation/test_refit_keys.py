"""`ci/refit_keys.py`: finds keys again from errors that they make, and judges them on sources left out."""

from __future__ import annotations

import importlib.util
import math
import random
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from fsdpbench.lab.validation.runs.case import Case, Figure
from fsdpbench.sim.model.profile import load_profile

SCRIPT = Path(__file__).parents[3] / "ci" / "refit_keys.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("refit_keys", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["refit_keys"] = module
    spec.loader.exec_module(module)
    return module


def runs_with(script: ModuleType, wrong: dict[tuple[str, str], float], noise: float = 0.0) -> list[Any]:
    """Forty runs on each chip, of four sources, whose only error is that keys are `wrong` by so much."""
    draw = random.Random(3)
    runs = []
    for index in range(80):
        chip = ("a100-80gb", "h100-80gb")[index % 2]
        slopes = {key.name: draw.uniform(-0.6, 0.0) for key in script.KEYS}
        error = sum(
            slopes[name] * change for (name, of), change in wrong.items() if of in ("", chip.split("-")[0])
        )
        error += draw.gauss(0, noise)
        runs.append(script.Run(f"source {index % 8 // 2}", chip, f"run {index}", False, error, slopes))
    return runs


def test_keys_are_found_again(script: ModuleType) -> None:
    wrong = {("gemm.under_load", "a100"): 0.03, ("contention.kernel_share", ""): 0.4}
    found = script.fit(runs_with(script, wrong))
    changes = dict(zip(found.names, found.change, strict=True))
    assert changes["gemm.under_load", "a100"] == pytest.approx(0.03, abs=0.01)
    assert changes["gemm.under_load", "h100"] == pytest.approx(0.0, abs=0.01)
    assert changes["contention.kernel_share", ""] == pytest.approx(0.4, abs=0.05)
    held = script.fit(runs_with(script, wrong), ["contention.kernel_share"])
    assert ("contention.kernel_share", "") not in held.names


def test_what_is_common_to_a_source_is_no_key(script: ModuleType) -> None:
    """A source that is 5 % slow in all its runs moves keys by less than runs that follow a key."""
    runs = runs_with(script, {})
    one = runs[0].source
    off = [script.dataclasses.replace(run, error=0.05 if run.source == one else 0.0) for run in runs]
    assert max(map(abs, script.fit(off).change)) < 0.06
    errors = script.held_out(off)
    of_one = [error for run, error in zip(off, errors, strict=True) if run.source == one]
    assert min(of_one) > 0.045  # without it, nothing is to be explained


def test_noise_widens_nothing_but_the_errors(script: ModuleType) -> None:
    found = script.fit(runs_with(script, {}, noise=0.02))
    assert all(abs(change) < 3 * error for change, error in zip(found.change, found.error, strict=True))


def test_a_profile_with_a_key_changed(script: ModuleType, tmp_path: Path) -> None:
    case = Case(
        "run",
        "group",
        "source",
        "gpt-2.8b",
        "h100-80gb+nic-50",
        16,
        {},
        {Figure.TOKENS: 1.0},
        chip="h100-80gb",
    )
    keys = {key.name: key for key in script.KEYS}
    for name, key in keys.items():
        changed = script.with_key(case, key, tmp_path)
        if name == "bandwidth.fused_gain":
            assert changed is None  # the run is not compiled
            continue
        profile, before = load_profile(changed.hardware), load_profile(case.hardware)
        assert profile.nic.gb_s_per_node == 50
        for path in key.paths:
            now, then = script.value_of(profile, path), script.value_of(before, path)
            assert now == pytest.approx(then + key.step if key.additive else then * key.step, abs=1e-5)


def test_slopes_of_a_table(script: ModuleType, tmp_path: Path) -> None:
    of_run = {key.name: -0.25 for key in script.KEYS}
    script.write_slopes(tmp_path / "slopes.csv", {("IBM-fms", "h100-80gb", "7B"): of_run})
    assert script.read_slopes(tmp_path / "slopes.csv") == {("IBM-fms", "h100-80gb", "7B"): of_run}
    key = script.KEYS[0]
    case = Case("run", "group", "source", "gpt-2.8b", "h100-80gb", 8, {}, {})
    steps = [1.0, 1.03, *[None] * (len(script.KEYS) - 1)]
    slopes = script.slopes_from(case, steps)
    assert slopes[key.name] == pytest.approx(math.log(1.03) / math.log(key.step), rel=1e-3)
    assert slopes[script.KEYS[1].name] == 0.0
