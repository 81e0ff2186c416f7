"""The advice is in order of what it gains; what is not worth it, at a price, or does not fit is said
apart."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from fsdpbench.answers.advise import advise_script, advisor
from fsdpbench.answers.advise.text import as_dict, describe_advice
from fsdpbench.base.configuration.config import Config
from fsdpbench.cli.requests.script_request import script_config
from fsdpbench.reports.result import Result
from fsdpbench.sweep.trials import Trial

from .test_candidates import SEEN

WAIT = {"file": "/a/train.py", "line": 57, "text": "loss.item()", "per_step": 1.0, "copies": False}


@pytest.fixture
def config(tmp_path: Path) -> Config:
    (tmp_path / "train.py").write_text("")
    found = script_config({"script": tmp_path / "train.py", "gpus": "8"}, ())
    assert found is not None
    return found


def advised(
    monkeypatch: pytest.MonkeyPatch,
    config: Config,
    seen: dict[str, Any],
    steps: dict[str, Trial | float],
    **more: Any,
) -> advisor.Advice:
    """Advice where a variation's step takes `steps[name]` seconds (others 1 s, as the script's own); `more`
    of the result."""

    def simulate(configs: Sequence[Config], jobs: int, tell: Any) -> list[Trial]:
        trials = []
        for each in configs:
            assert each.what_if is not None
            told = steps.get(str(each.what_if.variation).partition("=")[0], 1.0)
            if isinstance(told, float):
                told = trial(each, told, 1.0)
            trials.append(told)
        return trials

    monkeypatch.setattr(advisor, "simulate", simulate)
    result = {
        "status": "ok",
        "config": {"gpus": 8, "gpus_per_node": 8},
        "step_time_s": 1.0,
        "tflops_per_gpu": 1.0,
        "interval": NEAR,
        "peak_memory_bytes": {"allocated": 10, "reserved": 10},
        "script": {"observed": SEEN | seen},
        **more,
    }
    return advise_script(config, Result.of(result), 1, lambda line: None)


NEAR = {"level": 0.9, "step_time_s": [0.9, 1.1], "apart": 0.05, "peak_memory_bytes": {"reserved": [10, 10]}}


def trial(config: Config, step: float, tflops: float | None = None, **more: Any) -> Trial:
    """A trial whose step takes `step` seconds and whose model does `tflops` in it."""
    memory = {"allocated": 10, "reserved": 10}
    result = {"status": "ok", "step_time_s": step, "peak_memory_bytes": memory, "interval": NEAR}
    return Trial(config, Result.of(result | {"tflops_per_gpu": tflops and tflops / step} | more))


def names(group: Sequence[advisor.Tried]) -> list[str]:
    return [each.candidate.variation.partition("=")[0] for each in group]


def test_a_fault_comes_first_and_then_the_largest_gain(
    monkeypatch: pytest.MonkeyPatch, config: Config
) -> None:
    found = advised(monkeypatch, config, {"waits": [WAIT]}, {"keep": 0.8, "prefetch": 0.99})
    assert names(found.advice) == ["no-waits", "keep"]
    assert found.advice[1].gain == pytest.approx(0.25)
    pair = found.advice[1].paired
    assert pair is not None
    assert pair.low < 0.25 < pair.high
    assert "prefetch" in names(found.nothing)
    told = describe_advice(found)
    assert " 2. 25.0 % faster [" in told
    assert "train.py:57" in told
    assert as_dict(found)["advice"][1]["write"] == "reshard_after_forward=False"


def test_what_is_worth_nothing_is_no_advice(monkeypatch: pytest.MonkeyPatch, config: Config) -> None:
    found = advised(monkeypatch, config, {}, {"compile": 0.9, "keep": 0.98})
    assert not found.advice
    assert names(found.possible) == ["compile"]
    text = describe_advice(found)
    assert text.startswith("No advice: nothing is wrong with the script")
    assert "Too little gain to change it: keep (+2.0%)\nNo gain: " in text, "a small gain is named"


def test_twice_the_batch_has_to_be_twice_the_work(monkeypatch: pytest.MonkeyPatch, config: Config) -> None:
    seen = {"batch": {"option": "--batch", "value": 4}}
    assert "double-batch" in names(advised(monkeypatch, config, seen, {"double-batch": 1.5}).nothing)
    doubled = trial(config, 1.5, 2.0)
    (best, *_) = advised(monkeypatch, config, seen, {"double-batch": doubled}).advice
    assert best.gain == pytest.approx(2 / 1.5 - 1)


def test_what_can_only_hide_waiting_is_not_simulated_where_nothing_waits(
    monkeypatch: pytest.MonkeyPatch, config: Config
) -> None:
    for exposed, simulated in ((0.01, False), (0.2, True)):
        parts = {"compute_only": 0.5, "overlapped": 0.0, "exposed_communication": exposed, "idle": 0.01}
        more = {"time_s": parts, "traced_step_time_s": 1.0}
        found = advised(monkeypatch, config, {}, {"prefetch": 0.9, "keep": 0.9}, **more)
        assert ("prefetch" in names(found.advice)) is simulated
        assert "keep" in names(found.advice), "it moves fewer bytes, which is no matter of waiting"
        assert ("2.0% at most:\n    prefetch" in describe_advice(found)) is not simulated


def test_memory_that_may_not_suffice_is_a_price(monkeypatch: pytest.MonkeyPatch, config: Config) -> None:
    risky = trial(config, 0.5, 1.0, interval={"level": 0.9, "step_time_s": [0.4, 0.6], "risky": True})
    unfit = trial(config, 0.5, 1.0, status="oom")
    found = advised(monkeypatch, config, {}, {"keep": risky, "wrap-pairs": unfit})
    assert (names(found.advice), names(found.possible)) == ([], ["keep"])
    assert "Do not fit: wrap-pairs" in describe_advice(found)


def test_a_setting_is_without_effect_where_time_and_memory_stay(
    monkeypatch: pytest.MonkeyPatch, config: Config
) -> None:
    seen = {"forward_prefetch": {"file": "/a/train.py", "line": 44, "text": ""}}
    found = advised(monkeypatch, config, seen, {})
    assert names(found.no_effect) == ["no-forward-prefetch"]
    assert "train.py:44" in describe_advice(found)
    assert not advised(monkeypatch, config, seen, {"no-forward-prefetch": 1.1}).no_effect


def test_a_loader_starves_where_a_step_waits_for_it(monkeypatch: pytest.MonkeyPatch, config: Config) -> None:
    loader = {"file": "/a/train.py", "line": 60, "batch_size": 8, "num_workers": 0, "pin_memory": True}
    seen = {"loaders": [loader]}
    steps = iter((1.5, 1.0))

    def simulate(configs: Sequence[Config], jobs: int, tell: Any) -> list[Trial]:
        variations = [str(each.what_if and each.what_if.variation) for each in configs]
        found = [next(steps) if name.startswith("loader-time") else 1.0 for name in variations]
        return [trial(each, time) for each, time in zip(configs, found, strict=True)]

    monkeypatch.setattr(advisor, "simulate", simulate)
    result = {
        "status": "ok",
        "config": {"gpus": 8, "gpus_per_node": 8},
        "step_time_s": 1.0,
        "peak_memory_bytes": {"reserved": 10},
        "script": {"observed": SEEN | seen},
        "bench": {"loader": {"seconds": 0.5, "batches": 1.0}},
    }
    found = advise_script(config, Result.of(result), 1, lambda line: None)
    (first, *_) = found.advice
    assert first.candidate.variation == "loader-time=0.500000/2"
    assert "num_workers=2" in first.candidate.write
    assert "500.0 ms" in first.candidate.what
