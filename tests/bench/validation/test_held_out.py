"""Each chip's runs predicted with the keys that were fitted to the other's."""

from __future__ import annotations

from pathlib import Path

import pytest

from fsdpbench.lab.validation.coverage import compare_held_out, held_out_cases, with_keys_of
from fsdpbench.lab.validation.paper_network import Prediction, config_of
from fsdpbench.lab.validation.runs.case import Case, Figure
from fsdpbench.lab.validation.text import as_dict, as_markdown
from fsdpbench.reports.result import Result
from fsdpbench.sim.model.profile import load_profile
from fsdpbench.sim.model.software import load_software


def a_case(hardware: str, name: str = "run") -> Case:
    shape = {"layers": 2, "d_model": 128, "heads": 2}
    return Case(name, "group", "s", "gpt", hardware, 8, {}, {Figure.TOKENS: 1000.0}, shape=shape)


def predicted(case: Case, tokens: float | None) -> Prediction:
    return Prediction(case, Result.of({"status": "ok", "tokens_per_s_per_gpu": tokens}))


def test_profiles_differ_from_their_base_in_the_fitted_keys_alone(tmp_path: Path) -> None:
    cases = held_out_cases([a_case("a100-80gb"), a_case("h100-80gb"), a_case("l40s")], tmp_path)
    assert len(cases) == 2  # nothing of the L40S was fitted to runs of it
    foreign = load_profile(cases[0].hardware)
    own, other = load_profile("a100-80gb"), load_profile("h100-80gb").with_older_kernels()
    assert foreign.gemm.weight_grad == other.gemm.weight_grad
    assert foreign.contention.compute_slowdown == other.contention.compute_slowdown
    assert foreign.attention.forward_tflops == own.attention.forward_tflops
    # The system lays its own software's share over it.
    of_runs = load_software("composer-2023-spring").attention.backward_rate
    assert foreign.attention.backward_tflops * of_runs == pytest.approx(183 * 270 / 400 * 0.578, abs=0.1)
    assert foreign.attention.under_load == other.attention.under_load
    assert (foreign.compute, foreign.memory, foreign.nvlink) == (own.compute, own.memory, own.nvlink)


def test_held_out_runs_are_configurations_of_their_own(tmp_path: Path) -> None:
    case = a_case("h100-80gb")
    (foreign,) = held_out_cases([case], tmp_path)
    assert config_of(foreign).hardware != config_of(case).hardware
    assert config_of(foreign).settings == config_of(case).settings


def test_own_keys_change_nothing() -> None:
    profile = load_profile("a100-80gb")
    keys = with_keys_of(profile, profile)
    assert keys["attention"]["backward_tflops"] == profile.attention.backward_tflops
    assert keys["gemm"]["weight_grad"] == profile.gemm.weight_grad


def test_errors_are_compared_run_by_run() -> None:
    cases = [a_case("a100-80gb", name) for name in ("one", "two", "unfinished")]
    own = [predicted(case, tokens) for case, tokens in zip(cases, (1000.0, 800.0, 900.0), strict=True)]
    foreign = [predicted(case, tokens) for case, tokens in zip(cases, (500.0, 2000.0, None), strict=True)]
    (share,) = compare_held_out(own, foreign)
    assert (share.hardware, share.keys_from, len(share.own)) == ("a100-80gb", "h100-80gb", 2)
    assert share.own_mean == pytest.approx(0.125)
    assert share.foreign_mean == pytest.approx(0.75)
    assert share.foreign_bias == pytest.approx(0.25)
    assert "| a100-80gb | 2 | 12.5% | h100-80gb | 75.0% | +25.0% |" in as_markdown(own, [], [share])
    assert as_dict(own, [], [share])["held_out"][0]["mean_error_with_them"] == pytest.approx(0.75)
