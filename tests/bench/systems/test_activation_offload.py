"""The setting `activation_offload`: memory falls, nothing races, losses stay, the rest is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fsdpbench.base.configuration.config import Config, Measurement
from fsdpbench.base.settings import Settings
from fsdpbench.engine.results.residuals.widths import by_link
from fsdpbench.sweep.planning import not_applicable
from fsdpbench.workloads import get_workload

SYSTEMS = ["torch-fsdp1", "torch-fsdp2", "impl-fsdp1", "impl-fsdp2"]


def result_of(fsdpbench: Any, folder: Path, *words: str) -> dict[str, Any]:
    result: dict[str, Any] = fsdpbench.json("run", "--json", "-o", str(folder), *words)
    return result


@pytest.mark.plain_cases("impl-fsdp2-none")
@pytest.mark.parametrize("checkpointing", ["none", "full", "op"])
@pytest.mark.parametrize("system", SYSTEMS)
def test_memory_falls_and_nothing_races(
    fsdpbench: Any, tmp_path: Path, system: str, checkpointing: str
) -> None:
    words = ["--model", "gpt-tiny", "--device", "sim", "--gpus", "8", "--system", system]
    words += ["--set", f"activation_checkpointing={checkpointing}", "--set", "batch=32", "--sanitize"]
    kept = result_of(fsdpbench, tmp_path / "kept", *words)
    moved = result_of(fsdpbench, tmp_path / "moved", *words, "--set", "activation_offload=true")
    assert moved["status"] == kept["status"] == "ok"  # and not "race"
    allocated = [result["peak_memory_bytes"]["allocated"] for result in (kept, moved)]
    assert allocated[1] < allocated[0] if checkpointing != "none" else allocated[1] < 0.8 * allocated[0]


@pytest.mark.plain_cases("impl-fsdp2")
@pytest.mark.parametrize("system", ["impl-fsdp2", "torch-fsdp1"])
def test_some_units_alone_lie_between_all_and_none(fsdpbench: Any, tmp_path: Path, system: str) -> None:
    words = ["--model", "gpt-tiny", "--device", "sim", "--gpus", "8", "--system", system, "--set", "batch=32"]
    allocated = [
        result_of(fsdpbench, tmp_path / place, *words, "--set", f"activation_offload={value}", "--sanitize")
        for place, value in (("a", "true"), ("b", "true:2+false:2"), ("c", "false"))
    ]
    assert [each["status"] for each in allocated] == ["ok"] * 3  # and not "race"
    all_of_them, some, none = (each["peak_memory_bytes"]["allocated"] for each in allocated)
    assert all_of_them < some < none


@pytest.mark.campaign
@pytest.mark.parametrize("checkpointing", ["none", "full:2+none:2"])
def test_steps_on_other_links_are_inside_what_the_slow_one_bounds(
    fsdpbench: Any, tmp_path: Path, checkpointing: str
) -> None:
    """A step is convex in the time of a copy."""

    def step(gb_s: float) -> dict[str, Any]:
        profile = tmp_path / f"link-{gb_s}.toml"
        profile.write_text(
            f'base = "h100-80gb"\nname = "x"\n[host_link]\ngb_s = {gb_s}\nlatency_us = {400 / gb_s}\n'
        )
        words = ["--model", "gpt-125m", "--device", "sim", "--gpus", "8", "--hardware", str(profile)]
        words += [
            "--set",
            "batch=16",
            "--set",
            f"activation_checkpointing={checkpointing}",
            "--shape",
            "layers=4",
        ]
        return result_of(fsdpbench, tmp_path / f"{gb_s}", *words, "--set", "activation_offload=true")

    base, faster, slower, half = (step(50 * factor) for factor in (1, 1.1, 1 / 1.1, 0.5))
    at, more = base["step_time_s"], half["step_time_s"] - base["step_time_s"]
    assert more > 0.05 * at, "the link matters"
    assert at - faster["step_time_s"] <= 1.001 * more / 11
    assert slower["step_time_s"] - at <= 1.001 * more / 10
    shorter, longer = by_link(at, half["step_time_s"], measured=False)
    own = tuple(by_link(at, at + more, measured=True))
    assert base["interval"]["link"] == pytest.approx(own, rel=1e-3), "the user's own link is measured"
    assert longer > own[1]
    assert shorter == own[0]


def test_an_optimizer_on_the_host_widens_the_interval(fsdpbench: Any, tmp_path: Path) -> None:
    """Steps with another rate of the host's memory are inside the interval; a measured rate narrows it."""

    def step(name: str, **figures: float) -> dict[str, Any]:
        hardware = tmp_path / f"{name}.toml"
        lines = "".join(f"{key} = {value}\n" for key, value in figures.items())
        hardware.write_text(f'base = "h100-80gb"\nname = "x"\n[host_link]\n{lines}', encoding="utf-8")
        words = ["--model", "gpt-125m", "--device", "sim", "--gpus", "8", "--hardware", str(hardware)]
        return result_of(fsdpbench, tmp_path / name, *words, "--set", "cpu_offload=true")

    base, measured = step("base"), step("measured", memory_gb_s=57.0)
    assert base["step_time_s"] == measured["step_time_s"]
    assert any("on the host" in why for why in base["interval"]["because"])
    assert not any("on the host" in why for why in measured["interval"]["because"])
    low, high = base["interval"]["step_time_s"]
    for slow in (57.0 / 3, 57.0 * 1.3):
        assert low < step(f"at-{slow:.0f}", memory_gb_s=slow)["step_time_s"] < high
    span = measured["interval"]["step_time_s"]
    assert span[1] - span[0] < 0.6 * (high - low)


@pytest.mark.parametrize(("gigabytes", "status"), [(0.1, "oom"), (8, "ok")])
def test_it_has_to_fit_the_memory_of_the_host(
    fsdpbench: Any, tmp_path: Path, gigabytes: float, status: str
) -> None:
    profile = tmp_path / "small-host.toml"
    profile.write_text(
        f'base = "h100-80gb"\nname = "small-host"\n[host_link]\nmemory_gb = {gigabytes}\n', encoding="utf-8"
    )
    words = ["--model", "gpt-tiny", "--device", "sim", "--gpus", "8", "--hardware", str(profile)]
    words += ["--set", "batch=512", "--set", "activation_offload=true"]
    done = fsdpbench("run", "--json", "-o", str(tmp_path / "run"), *words)
    result = json.loads(done.stdout)
    assert result["status"] == status
    if status == "oom":
        assert "host out of memory: 0.1 GB of pinned memory" in result["cause"]["message"]
        assert "host_link.memory_gb" in result["cause"]["message"]


@pytest.mark.campaign
@pytest.mark.parametrize("extra", ["grad_accum=2", "lora=4", "activation_checkpointing=full"])
@pytest.mark.parametrize("system", SYSTEMS)
def test_losses_on_ranks_stay_bit_by_bit(fsdpbench: Any, tmp_path: Path, system: str, extra: str) -> None:
    words = ["--model", "gpt-tiny", "--device", "cpu", "--gpus", "2", "--system", system]
    words += ["--set", "param_dtype=fp32", "--set", extra]
    found = [
        json.loads(next(folder.rglob("rank0_record.json")).read_text())["losses"]
        for folder, value in ((tmp_path / "kept", "false"), (tmp_path / "moved", "true"))
        if result_of(fsdpbench, folder, *words, "--set", f"activation_offload={value}")
    ]
    same = min(map(len, found))  # how many steps warm up depends on how steady they are
    assert found[0][:same] == found[1][:same]
    assert same > 5


@pytest.mark.parametrize(
    ("system", "settings", "told"),
    [
        ("impl-fsdp2", {"wrap": "root"}, "no units below the root"),
        ("impl-fsdp2", {"compile": True}, "leave compile out"),
        ("torch-fsdp2", {"cpu_offload": True}, "share a link"),
        ("torch-fsdp2", {"tp": 2}, "leave tp at 1"),
        ("impl-fsdp2", {"cp": 2}, "leave cp at 1"),
        ("torch-ddp", {}, "no FSDP units"),
    ],
)
def test_what_it_does_not_go_with_is_refused_by_name(
    system: str, settings: dict[str, Any], told: str
) -> None:
    workload = get_workload("gpt-tiny")
    config = Config(
        model="gpt-tiny",
        shape=dict(workload.shape),
        system=system,
        device="sim",
        hardware="a100-80gb",
        gpus=8,
        gpus_per_node=8,
        settings=Settings.of(activation_offload=True, **settings).changed(seq=workload.resolve_seq(None)),
        measurement=Measurement.default_for("sim"),
    )
    assert told in not_applicable(config, ["activation_offload"])["activation_offload"]
