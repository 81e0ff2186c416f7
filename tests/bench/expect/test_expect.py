"""`expect`: a normal speed is called normal; what was planted in a machine or a setting is found again."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from fsdpbench.base.configuration.config import Config
from fsdpbench.base.errors import UsageError
from fsdpbench.base.settings import Settings
from fsdpbench.cli.commands.explain import expect_command
from fsdpbench.lab.calibrate.from_results.fit import Factor, ScaledProfile
from fsdpbench.lab.expect import Measured, SpeedUnit, expect, lines, parse_measured, record
from fsdpbench.sweep.prediction import PROBE
from fsdpbench.sweep.trials import simulate
from tests.reports.trace_writing import TraceBuilder


def config(gpus: int = 16, **settings: object) -> Config:
    """Return two blocks of a small GPT on A100s, in bf16."""
    return Config(
        model="gpt-125m",
        shape={},
        shape_given={"layers": 2},
        system="torch-fsdp2",
        device="sim",
        hardware="a100-80gb",
        gpus=gpus,
        gpus_per_node=8,
        settings=Settings.of(batch=8, seq=1024, **settings),
        measurement=PROBE,
    )


def step_s(asked: Config) -> float:
    (trial,) = simulate([asked], 1)
    assert trial.step_time_s
    return trial.step_time_s


@pytest.mark.parametrize(
    ("text", "value", "unit"),
    [
        ("21.3s", 21.3, SpeedUnit.SECONDS),
        ("850 ms", 0.85, SpeedUnit.SECONDS),
        ("3212tokens/s/gpu", 3212, SpeedUnit.TOKENS),
        ("3,212 tok/s/GPU", 3212, SpeedUnit.TOKENS),
        ("350TFLOPS", 350, SpeedUnit.TFLOPS),
        ("41%MFU", 41, SpeedUnit.MFU),
        ("0.41 MFU", 41, SpeedUnit.MFU),
        ("12.5samples/s", 12.5, SpeedUnit.SAMPLES),
    ],
)
def test_speeds_are_read_as_people_write_them(text: str, value: float, unit: SpeedUnit) -> None:
    found = parse_measured(text)
    assert found.unit is unit
    assert found.value == pytest.approx(value)


@pytest.mark.parametrize(
    "text", ["", "fast", "21.3", "-1s", "0s", "nans", "infs", "1e400s", "3 parsecs", "s"]
)
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--measured"):
        parse_measured(text)


def test_the_expected_speed_is_normal_in_every_unit() -> None:
    asked = config(8)
    found = expect(asked, Measured(step_s(asked), SpeedUnit.SECONDS), 1)
    assert found.normal
    assert abs(found.slower) < 1e-6
    assert lines(found)[0].startswith("normal: ")
    result = found.trial.result
    for measured in (
        Measured(result.tokens_per_s_per_gpu or 0.0, SpeedUnit.TOKENS),
        Measured(result.tflops_per_gpu or 0.0, SpeedUnit.TFLOPS),
        Measured(100 * (result.mfu or 0.0), SpeedUnit.MFU),
    ):
        assert measured.step_s(found.trial) == pytest.approx(found.expected_s, rel=1e-6)


@pytest.mark.parametrize(
    ("factor", "scale"),
    [
        (Factor.COMPUTE, 0.68),
        pytest.param(Factor.NETWORK, 0.15, marks=pytest.mark.campaign),
        pytest.param(Factor.HOST, 0.4, marks=pytest.mark.campaign),
        pytest.param(Factor.MEMORY, 0.6, marks=pytest.mark.campaign),
    ],
)
def test_a_slow_part_of_the_machine_is_found_with_its_speed(
    factor: Factor, scale: float, tmp_path: Path
) -> None:
    batch = {Factor.NETWORK: 2, Factor.HOST: 1}.get(factor, 8)
    gpus = 16 if factor is Factor.NETWORK else 8
    path, own = tmp_path / "slow.toml", tmp_path / "mine+own.toml"
    own.write_text(f'name = "own"\nbase = "{config(gpus).hardware}"\n[nic]\ngb_s_per_node = 123.0\n')
    asked = replace(config(gpus), settings=Settings.of(batch=batch, seq=1024), hardware=str(own))
    slow = ScaledProfile(str(own), {factor: scale}).write(path, {}, "test")
    assert slow.nic.gb_s_per_node == pytest.approx(123 * (scale if factor is Factor.NETWORK else 1))
    measured = step_s(replace(asked, hardware=str(path)))
    found = expect(asked, Measured(measured, SpeedUnit.SECONDS), 2)
    assert not found.normal
    by_name = {cause.name: cause for cause in found.causes}
    assert factor.value in by_name
    assert by_name[factor.value].scale == pytest.approx(scale, rel=0.2)
    assert by_name[factor.value].step_time_s == pytest.approx(measured, rel=0.06)


@pytest.mark.campaign
def test_a_setting_that_is_not_what_was_assumed_is_found() -> None:
    found = expect(config(8), Measured(step_s(config(8, param_dtype="fp32")), SpeedUnit.SECONDS), 2)
    assert "param_dtype" in [cause.name for cause in found.causes]
    shown = record(found)
    assert json.loads(json.dumps(shown))["causes"][0]["look_at"]


@pytest.mark.campaign
def test_no_cause_is_invented_where_none_explains_it() -> None:
    found = expect(config(8), Measured(1e4, SpeedUnit.SECONDS), 2)
    assert found.causes == ()
    assert "compare traces" in lines(found)[-1]
    assert "times as long as expected: 10,000 s a step" in lines(found)[0]


def test_a_speed_above_the_peak_of_the_chip_is_doubted_with_the_figures() -> None:
    asked = config(8)
    fair = expect(asked, Measured(step_s(asked), SpeedUnit.SECONDS), 1)
    assert (fair.above_peak, record(fair)["above_peak"]) == ("", None)
    assert fair.trial.result.mfu
    least_s = fair.expected_s * fair.trial.result.mfu
    fast = Measured(400.0, SpeedUnit.MFU)
    assert expect(asked, fast, 1, report=pytest.fail).causes == (), "no cause is simulated"
    for measured, tflops in (
        (fast, "1,248"),
        (Measured(624.0, SpeedUnit.TFLOPS), "624"),
        (Measured(0.99 * least_s, SpeedUnit.SECONDS), "315"),
    ):
        found = replace(fair, measured_s=measured.step_s(fair.trial))
        sentence = f"{tflops} TFLOPS of each GPU, above its peak of 312 in bf16: check the measured number"
        assert str(record(found)["above_peak"]).startswith(sentence)
        assert lines(found)[-1].startswith(f"the measured step means {sentence}")
    assert replace(fair, measured_s=1.01 * least_s).above_peak == ""


def test_a_configuration_that_does_not_fit_has_no_expected_speed() -> None:
    huge = replace(config(8), settings=Settings.of(batch=20000, seq=1024))
    with pytest.raises(UsageError, match="has no simulated step time"):
        expect(huge, Measured(1.0, SpeedUnit.SECONDS), 1)


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ([], "which speed was measured"),
        (["--measured", "1s"], "of which configuration"),
        (["--measured", "1s", "--from", "x"], "both name a speed"),
        (["--from", "/nowhere"], "no such file"),
        (["--measured", "1s", "--model", "gpt-125m", "--device", "cpu"], "--hardware says"),
    ],
)
def test_bad_requests_say_what_is_missing(words: list[str], why: str) -> None:
    done = CliRunner().invoke(expect_command, words)
    assert isinstance(done.exception, UsageError | SystemExit)
    assert why in str(done.exception) + done.output


def test_the_speed_of_a_trace_is_that_of_its_median_step(tmp_path: Path) -> None:
    built = TraceBuilder()
    for number, end in enumerate((1_010_000, 2_030_000, 3_020_000)):
        built.step(number, number * 1_000_000 + 100_000, end)
        built.kernel("gemm", number * 1_000_000 + 200_000, number * 1_000_000 + 900_000)
    path = built.write(tmp_path / "rank0_trace.json")
    # Faster than the chip can be, so that no cause is simulated.
    words = "--model gpt-125m --shape layers=1 --batch 32 --seq 1024 --gpus 8 --hardware a100-80gb --json"
    done = CliRunner().invoke(expect_command, ["--from", str(path), *words.split()])
    assert done.exit_code == 0, done.output
    measured = json.loads(done.stdout)["measured_s"]
    assert math.isclose(measured, 1e-3, rel_tol=1e-6)


@pytest.mark.parametrize(
    ("head", "why"), [({}, "of a CPU"), ({"fsdpbench": {"hardware": "a100-80gb"}}, "simulated")]
)
def test_a_trace_that_measured_no_gpu_is_refused(tmp_path: Path, head: dict[str, Any], why: str) -> None:
    built = TraceBuilder(**head)
    built.step(0, 100_000, 1_010_000)
    built.op("aten::mm", 200_000, 900_000)
    if head:
        built.kernel("gemm", 200_000, 900_000)
    path = built.write(tmp_path / "rank0_trace.json")
    done = CliRunner().invoke(expect_command, ["--from", str(path), "--model", "gpt-tiny", "--gpus", "2"])
    assert f"the trace is {why}; no GPU was measured" in str(done.exception)
