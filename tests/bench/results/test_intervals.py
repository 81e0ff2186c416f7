"""The interval of a result: what is unknown of a configuration, and what that does to its figures."""

from __future__ import annotations

import dataclasses
import math
import re
from pathlib import Path
from typing import Any

import pytest

from fsdpbench.base.configuration.config import Config
from fsdpbench.base.configuration.script_source import ScriptSource
from fsdpbench.base.settings import Settings
from fsdpbench.cli.terminal.progress import describe_result
from fsdpbench.engine.results.residuals.intervals import interval_of, unknowns
from fsdpbench.engine.results.residuals.widths import LEVEL, MORE_GPUS, Quantity, Unknown, width_of
from fsdpbench.reports.result import Result, Status
from fsdpbench.sweep.planning import make_config, make_target
from fsdpbench.workloads import get_workload, workload_names


def a_config(
    system: str = "torch-fsdp2",
    hardware: str = "h100-80gb",
    gpus: int = 8,
    model: str = "gpt-2.8b",
    software: str | None = None,
    **settings: Any,
) -> Config:
    target = make_target(
        model=model, shape={}, device="sim", hardware=hardware, gpus=gpus, gpus_per_node=None, data=None,
        software=software,
    )  # fmt: skip
    return make_config(target, system, Settings.of(**settings), target.workload())


RESULT = {
    "status": "ok",
    "step_time_s": 2.0,
    "tokens_per_s_per_gpu": 1000.0,
    "mfu": 0.4,
    "alloc_retries_per_step": 0.0,
    "peak_memory_bytes": {"allocated": 30 << 30, "active": 31 << 30, "reserved": 40 << 30},
}


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({}, ()),
        ({"system": "torch-fsdp1", "hardware": "a100-80gb"}, ()),
        ({"hardware": "b200"}, (Unknown.CHIP,)),
        ({"hardware": "h100-64gb", "gpus": 64}, (Unknown.CHIP,)),  # made of another chip, but one of its own
        ({"gpus": 16}, (Unknown.NETWORK,)),
        ({"hardware": "a100-80gb-roce2000", "gpus": 64}, ()),
        ({"system": "impl-fsdp2"}, (Unknown.SYSTEM,)),
        ({"software": "composer-2023-autumn"}, (Unknown.SOFTWARE,)),
        ({"software": "torch-2.8"}, ()),  # today's, with models written otherwise
        ({"param_dtype": "fp32"}, (Unknown.MODEL,)),
        *(
            ({name: value}, (Unknown.SETTING,))
            for name, value in (
                ("linear_dtype", "fp8"),
                ("tp", 2),
                ("optimizer", "muon"),
                ("loss", "chunked"),
                ("lora", 8),
                ("attention", "math"),
            )
        ),
        ({"activation_offload": "true", "param_dtype": "fp32"}, (Unknown.MODEL, Unknown.OFFLOAD)),
        ({"activation_checkpointing": "op", "batch": 3}, ()),
        ({"model": "dhen", "hardware": "l40s", "gpus": 16}, (Unknown.CHIP, Unknown.NETWORK, Unknown.MODEL)),
    ],
)
def test_what_no_published_run_tells(changes: dict[str, Any], wanted: tuple[Unknown, ...]) -> None:
    assert unknowns(a_config(**changes)) == wanted


DENSE_DECODERS = ("decoder-tiny", "qwen3-8b", "qwen3-32b")
"""Without sliding windows, too."""


def test_kinds_of_models_are_told_without_building_them() -> None:
    base = a_config()
    for name in workload_names():
        workload = get_workload(name)
        config = dataclasses.replace(base, model=name, shape=dict(workload.shape))
        known = workload.family in ("gpt", "t5", "llama") or name in DENSE_DECODERS
        assert (Unknown.MODEL not in unknowns(config)) is known, name
    mixture = dataclasses.replace(base, model="other-8x7b", shape={**base.shape, "experts": 8})
    assert Unknown.MODEL in unknowns(mixture)
    dense = dataclasses.replace(mixture, shape=base.shape)
    assert Unknown.MODEL not in unknowns(dense)


def test_of_a_script_no_run_is_published() -> None:
    script = ScriptSource("/nowhere/train.py", (), "0" * 16)
    config = dataclasses.replace(a_config(), model="train.py", system="train.py", script=script)
    assert unknowns(config) == (Unknown.SOFTWARE,)
    assert interval_of(config, Result.of(RESULT)) is not None


def test_a_profile_of_ones_own_states_its_network_and_keeps_its_chip(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('base = "h100-80gb"\nname = "mine"\n[nic]\ngb_s_per_node = 100\n')
    assert unknowns(a_config(hardware=str(path), gpus=16)) == ()
    path.write_text('base = "h100-80gb"\nname = "mine"\n[memory]\ncontext_mib = 600\n')
    assert unknowns(a_config(hardware=str(path), gpus=16)) == (Unknown.NETWORK,)


def test_offload_is_as_uncertain_as_the_link_to_the_host(tmp_path: Path) -> None:
    """2 s a step, 3 with copies that take twice as long; without that step, as much as all copies take."""
    (tmp_path / "mine.toml").write_text('base = "h100-80gb"\nname = "mine"\n[host_link]\ngb_s = 52\n')
    tried = {"kernels": 1.9, "host_copies": 1.5, "slow_link_step": 3.0}
    found, measured, beside, not_tried = (
        interval_of(a_config(activation_offload="true", hardware=hardware), Result.of(RESULT), work)
        for hardware, work in (
            ("h100-80gb", tried),
            (str(tmp_path / "mine.toml"), tried),
            ("h100-80gb", tried | {"slow_link_step": 2.0}),
            ("h100-80gb", {"kernels": 1.9, "host_copies": 1.5}),
        )
    )
    known = width_of(Quantity.TIME, ()).log
    assert None not in (found, measured, beside, not_tried)
    assert found.link == pytest.approx([-math.log1p(-0.5 / 11), math.log(1.5)])
    assert found.step_time_s[1] == pytest.approx(2 * math.exp(math.hypot(known, math.log(1.5))))
    assert found.because == [Unknown.OFFLOAD.value, Unknown.LINK.value]
    assert measured.link == pytest.approx([-math.log1p(-0.5 / 11), math.log(1.05)])
    assert beside.link == (0, 0)
    assert beside.because == measured.because == [Unknown.OFFLOAD.value]
    assert not_tried.link[1] == pytest.approx(math.log(1.75))
    assert found.work == pytest.approx(0.95)
    plain = interval_of(a_config(), Result.of(RESULT))
    assert found.peak_memory_bytes["reserved"][1] > plain.peak_memory_bytes["reserved"][1]


def test_the_interval_is_around_each_figure() -> None:
    found = interval_of(a_config(), Result.of(RESULT))
    assert found is not None
    width = width_of(Quantity.TIME, ()).log
    assert found.level == LEVEL
    assert found.step_time_s == pytest.approx([2 * math.exp(-width), 2 * math.exp(width)])
    low, high = found.tokens_per_s_per_gpu
    assert (low, high) == pytest.approx((1000 * math.exp(-width), 1000 * math.exp(width)))
    for kind, value in RESULT["peak_memory_bytes"].items():  # type: ignore[attr-defined]
        assert found.peak_memory_bytes[kind][0] < value < found.peak_memory_bytes[kind][1]
    assert (found.risky, found.because) == (False, [])
    assert 0 < found.apart < 0.2


@pytest.mark.parametrize("stated", [{"norm": "fused"}, {"norm": "composed"}, {"compile": True}])
def test_an_eager_llama_may_be_slower_unless_its_norms_are_stated(stated: dict[str, Any]) -> None:
    unsaid, said = (
        interval_of(a_config(model="llama3-8b", **changes), Result.of(RESULT)) for changes in ({}, stated)
    )
    assert unsaid is not None
    assert said is not None
    assert (unsaid.because, said.because) == ([Unknown.NORMS.value], [])
    # Norms and rotary embeddings composed of operators cost 14 %.
    assert unsaid.step_time_s[1] > 1.14 * 2.0
    assert unsaid.step_time_s[0] == pytest.approx(2.0 * math.exp(-width_of(Quantity.TIME, ()).log))


@pytest.mark.parametrize(
    "changes", [{"model": "mixtral-8x7b"}, {"tp": 2}, {"lora": 8}, {"param_dtype": "fp32"}]
)
def test_peaks_of_other_models_and_settings_hold_the_published_ones(changes: dict[str, Any]) -> None:
    text = (Path(__file__).parents[3] / "ci/measured/memory_kinds.txt").read_text()
    missed = [float(each) for each in re.findall(r"[+-]0\.\d{3}", text.partition("outside")[0])]
    assert len(missed) >= 15
    found, known = (interval_of(each, Result.of(RESULT)) for each in (a_config(**changes), a_config()))
    assert found is not None
    assert known is not None
    for kind, value in RESULT["peak_memory_bytes"].items():  # type: ignore[attr-defined]
        low, high = found.peak_memory_bytes[kind]
        assert all(low <= value * math.exp(each) <= high for each in missed)
        assert known.peak_memory_bytes[kind][1] < 1.09 * value


def test_more_gpus_than_published_runs_had_widen_the_time_alone() -> None:
    known, more = (
        interval_of(a_config(hardware="h100-80gb+nic-400", gpus=gpus), Result.of(RESULT))
        for gpus in (512, 2048)
    )
    assert known is not None
    assert more is not None
    assert known.because == []
    assert more.because == [MORE_GPUS]
    # A published run of 2,048 GPUs takes 1.52 times as long as would be predicted.
    assert more.step_time_s[1] > 1.5 * 2.0 > known.step_time_s[1]
    assert more.peak_memory_bytes == known.peak_memory_bytes


def test_links_over_pcie_widen_a_step_on_both_sides_unless_they_were_measured(tmp_path: Path) -> None:
    curves = "".join(
        f"{kind} = {{ points = [[6e4, 5.0], [4e8, 20.0]] }}\n"
        for kind in ("all_gather", "reduce_scatter", "all_reduce")
    )
    text = f'base = "l40s"\nname = "mine"\nruns_use = ["trtllm"]\n[nvlink]\npeak_gb_s = 20\n{curves}'
    (tmp_path / "mine.toml").write_text(text)
    small = RESULT | {"peak_memory_bytes": dict.fromkeys(("allocated", "active", "reserved"), 8 << 30)}
    waits = Result.of(small | {"network_share": 0.9})
    packaged, hidden, measured = (
        interval_of(a_config(hardware=hardware, system="torch-fsdp2"), result, {"kernels": 0.4})
        for hardware, result in (
            ("l40s", waits),
            ("l40s", Result.of(small | {"network_share": 0.01})),
            (str(tmp_path / "mine.toml"), waits),
        )
    )
    assert packaged is not None
    assert measured is not None
    assert packaged.because == [Unknown.CHIP.value, Unknown.PCIE.value]
    assert packaged.step_time_s[0] < 0.42
    assert packaged.step_time_s[1] > 2 * 2.0
    assert hidden is not None
    assert hidden.step_time_s[0] > 0.8 * 2.0
    assert measured.because == [Unknown.CHIP.value]
    assert measured.step_time_s[0] > 0.8 * 2.0
    line = describe_result(waits.replaced(interval=packaged))
    assert "fsdpbench calibrate narrows it" in line
    assert "−8" in line.partition(" (")[0], "both ends, as they are far from symmetric"


def test_a_network_that_was_not_measured_widens_a_step_that_waits_for_it(tmp_path: Path) -> None:
    sheet = 'base = "h100-80gb"\nname = "mine"\n[nic]\ngb_s_per_node = 400\n'
    (tmp_path / "sheet.toml").write_text(sheet)
    (tmp_path / "mine.toml").write_text(f"{sheet}base_us = 20\n")
    waits = Result.of(RESULT | {"network_share": 0.9})
    stated, in_a_file, hidden, measured = (
        interval_of(a_config(hardware=hardware, gpus=64), result)
        for hardware, result in (
            ("h100-80gb+nic-400", waits),
            (str(tmp_path / "sheet.toml"), waits),
            ("h100-80gb+nic-400", Result.of(RESULT | {"network_share": 0.1})),
            (str(tmp_path / "mine.toml"), waits),
        )
    )
    assert stated is not None
    assert stated.because == [Unknown.UNMEASURED.value]
    assert "calibrate --nccl-tests" in stated.because[0]
    assert in_a_file == stated, "the data sheet's figure is no measurement, wherever it stands"
    assert hidden == measured
    line, other = (describe_result(waits.replaced(interval=each)) for each in (stated, measured))
    assert "calibrate --nccl-tests narrows it" in line.partition(", 1,000 tokens")[0]
    assert "calibrate" not in other
    assert stated.step_time_s[0] == hidden.step_time_s[0]  # type: ignore[index]
    assert stated.step_time_s[1] > 2 * 2.0  # a factor of two is possible
    assert stated.tokens_per_s_per_gpu[0] == pytest.approx(1000 * 2.0 / stated.step_time_s[1])


def test_memory_that_fits_only_inside_its_error_is_risky() -> None:
    peaks = {"allocated": 60 << 30, "active": 65 << 30, "reserved": 75 << 30}
    found = interval_of(a_config(), Result.of(RESULT | {"peak_memory_bytes": peaks}))
    assert found is not None
    assert found.risky
    assert found.because == [Unknown.NEARLY_FULL.value]
    assert found.peak_memory_bytes["reserved"][1] <= 79.11 * 2**30  # no more than there is


def test_retries_make_a_time_uncertain() -> None:
    ordinary, full = (
        interval_of(a_config(), Result.of(RESULT | {"alloc_retries_per_step": retries}))
        for retries in (0.0, 2.0)
    )
    assert ordinary is not None
    assert full is not None
    assert full.risky
    assert full.step_time_s[1] > 1.2 * ordinary.step_time_s[1]


def test_what_was_not_simulated_has_none() -> None:
    assert interval_of(a_config(), Result(status=Status.OOM)) is None
    config = Config.from_dict({**a_config().to_dict(), "device": "cpu", "hardware": None})
    assert interval_of(config, Result.of(RESULT)) is None
