"""`fsdpbench tune` from end to end: front, TOML that runs again, code; a second start knows it all."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner

from fsdpbench.answers.tune.run import one_point_space
from fsdpbench.base.errors import UsageError
from fsdpbench.base.files.documents import to_toml
from fsdpbench.base.settings.values import is_mixed
from fsdpbench.cli.commands.sweep import request_from
from fsdpbench.cli.commands.tune import command
from fsdpbench.cli.terminal.units import words_of

TUNE = [
    "tune",
    "--model",
    "gpt-125m",
    "--shape",
    "layers=2",
    "--gpus",
    "8",
    "--device",
    "sim",
    "--memory",
    "40GB",
]
SMALL = [
    "--batch",
    "1,4,4000",
    "--backward-prefetch",
    "pre,none",
    "--strategy",
    "FULL_SHARD",
    "--wrap",
    "block",
]
REST = ["--activation-checkpointing", "none", "--forward-prefetch", "0", "--limit-all-gathers", "2,off"]


def test_it_leaves_the_front_and_the_best_and_knows_what_it_tried(fsdpbench: Any, tmp_path: Path) -> None:
    folder = tmp_path / "tuned"
    words = [*TUNE, *SMALL, *REST, "--backward-prefetch-depth", "1", "--trials", "8", "--finalists", "3"]
    done = fsdpbench(*words, "--system", "impl-fsdp1", "--json", "-o", str(folder))
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["points"] == 12
    assert found["tried"] == 8
    speeds = [each["speed"] for each in found["front"]]
    assert speeds == sorted(speeds, reverse=True)
    assert all(each["peak_reserved_bytes"] <= 40 * 10**9 for each in found["front"])
    assert found["front"][0]["rank"] == 1
    for each in found["front"]:
        reserved = each["interval"]["peak_memory_bytes"]["reserved"]
        assert reserved[0] < each["peak_reserved_bytes"] < reserved[1]
        assert each["risky"] == (each["interval"]["risky"] or reserved[1] > 40 * 10**9)
    assert (folder / "report.html").is_file()
    best = tomllib.loads((folder / "best.toml").read_text())
    assert best["settings"]["batch"] in (1, 4)
    assert [path.name for path in folder.glob("best_*.py")] == ["best_impl_fsdp1.py"], "what ran"
    again = fsdpbench(*words, "--system", "impl-fsdp1", "--json", "-o", str(folder))
    assert again.returncode == 0, again.stderr
    assert json.loads(again.stdout) == found
    assert "done already" in again.stderr
    planned = fsdpbench("plan", str(folder / "best.toml"), "--no-predict", "--json")
    assert [point["name"] for point in json.loads(planned.stdout)["points"]] == [found["best"]]


@pytest.mark.campaign
def test_the_choice_by_unit_is_the_best_and_is_drawn(
    fsdpbench: Any, matches_schema: Any, tmp_path: Path
) -> None:
    folder = tmp_path / "tuned"
    words = ["tune", "--model", "gpt-125m", "--shape", "layers=6", "--gpus", "8", "--device", "sim"]
    words += ["--batch", "8", "--seq", "512", "--activation-checkpointing", "full,op", "--memory", "4.05GB"]
    words += ["--system", "torch-fsdp2", "--per-unit", "--json", "-o", str(folder)]
    found = fsdpbench.json(*words)
    matches_schema("tune", found)
    by_unit = found["per_unit"]
    assert by_unit["gain"]["interval"][0] <= by_unit["gain"]["change"] <= by_unit["gain"]["interval"][1]
    assert by_unit["gain"]["interval"][0] > 0
    assert found["best"] == by_unit["recommended"] == by_unit["best"] == found["front"][0]["name"]
    assert not found["front"][0]["risky"]
    assert "+none:" in (folder / "best.toml").read_text()
    assert "RECOMPUTED = " in (folder / "best_torch_fsdp2.py").read_text()
    picture = ElementTree.parse(folder / "per_unit.svg").getroot()
    assert [word for word in picture.itertext() if "GiB allocated" in word]


@pytest.mark.campaign
def test_a_gain_within_its_interval_leaves_the_uniform_one_the_best(
    fsdpbench: Any, matches_schema: Any, tmp_path: Path
) -> None:
    folder = tmp_path / "tuned"
    words = ["tune", "--model", "gpt-125m", "--shape", "layers=6", "--gpus", "8", "--device", "sim"]
    words += ["--batch", "8", "--seq", "512", "--activation-checkpointing", "none"]
    words += ["--system", "torch-fsdp2", "--per-unit", "-o", str(folder)]
    done = fsdpbench(*words)
    assert done.returncode == 0, done.stderr
    found = json.loads((folder / "tune.json").read_text())
    by_unit = found["per_unit"]
    assert by_unit["gain"]["interval"][0] <= 0, "nothing has to be recomputed"
    assert found["best"] == by_unit["recommended"] == by_unit["uniform"]
    assert found["best"] in [each["name"] for each in found["front"]]
    (point,) = request_from(str(folder / "best.toml"), (), {}).plan().points
    assert point.name == found["best"]
    assert not [value for value in point.settings.to_dict().values() if is_mixed(value)]
    code = (folder / "best_torch_fsdp2.py").read_text()
    assert "RECOMPUTED = " not in code
    assert "resharded = " not in code
    assert f"best is {words_of(point)}" in done.stdout
    said = "stays the recommendation", "is faster than the best uniform"
    assert any(each in done.stdout for each in said)


@pytest.mark.parametrize(
    ("command", "said"), [(["tune", "--trials", "2"], "no code  "), (["sweep"], "no code to paste: ")]
)
def test_that_no_code_is_written_is_said_with_the_reason(
    fsdpbench: Any, tmp_path: Path, command: list[str], said: str
) -> None:
    words = ["--model", "gpt-tiny", "--gpus", "4", "--device", "sim", "--batch", "2", "--tp", "2"]
    words += ["--system", "torch-fsdp2", "--strategy", "FULL_SHARD", "--backward-prefetch", "pre"]
    words += ["--wrap", "block", *REST, "-o", str(tmp_path / "found")]
    done = fsdpbench(*command, *words)
    assert done.returncode == 0, done.stderr
    assert not list((tmp_path / "found").glob("best_*.py"))
    why = "with tp=2 it would need the model's own plan of its split"
    assert f"{said}{why}" in done.stdout
    assert (tmp_path / "found" / "best.toml").is_file() == (command[0] == "tune")
    assert json.loads(fsdpbench(*command, *words, "--json").stdout)["no_code"] == why


@pytest.mark.parametrize("place", [{}, {"gpus_used_per_node": 2}, {"nic_gb_s": 50.0}])
def test_what_was_simulated_is_measured_by_naming_the_device(place: dict[str, Any], tmp_path: Path) -> None:
    settings = {"batch": 4, "activation_checkpointing": "full:2+none:2"}
    place = {"gpus": 4, "device": "sim", "hardware": "h100-80gb", "software": "fsdp1-2022"} | place
    found = {"model": "gpt-tiny", "system": "torch-fsdp1", **place, "settings": settings}
    (tmp_path / "space.toml").write_text(to_toml(found))
    (point,) = request_from(str(tmp_path / "space.toml"), (), {}).plan().points
    (tmp_path / "best.toml").write_text(to_toml(one_point_space(point)))
    (measured,) = request_from(str(tmp_path / "best.toml"), (), {"device": "cpu"}).plan().points
    assert (measured.device, measured.hardware, measured.software) == ("cpu", None, None)
    assert (measured.settings, measured.gpus) == (point.settings, 4)
    with pytest.raises(UsageError, match="--hardware a100-80gb is for simulated GPUs"):
        request_from(str(tmp_path / "best.toml"), (), {"device": "cpu", "hardware": "a100-80gb"})


def test_by_unit_is_for_simulated_gpus(tmp_path: Path) -> None:
    words = ["--model", "gpt-tiny", "--device", "cpu", "--gpus", "2", "--per-unit", "-o", str(tmp_path / "t")]
    done = CliRunner().invoke(command, words)
    assert "--device sim" in str(done.exception or done.output)


def test_a_model_without_tokens_is_searched_for_samples(fsdpbench: Any, tmp_path: Path) -> None:
    words = ["tune", "--model", "regnet-tiny", "--gpus", "2", "--device", "sim", "--system", "impl-fsdp2"]
    words += ["--batch", "1,2", "-o", str(tmp_path / "tuned")]
    refused = fsdpbench(*words, "--for", "tokens_per_s")
    assert refused.returncode == 2
    assert "regnet-tiny does not work on tokens; --for samples_per_s" in refused.stderr
    assert fsdpbench.json(*words, "--json")["goal"] == "samples_per_s"


def test_nothing_that_fits_is_said(fsdpbench: Any, tmp_path: Path) -> None:
    words = ["--batch", "4", "--trials", "3", "--max-points", "2", "-o", str(tmp_path / "tuned")]
    done = fsdpbench(*TUNE, *words, "--memory", "10MB")
    assert done.returncode == 5
    assert "fits into 0.01 GB; the least needs" in done.stderr.splitlines()[-1]


@pytest.mark.campaign
def test_on_a_real_device_the_search_goes_on_with_real_runs(fsdpbench: Any, tmp_path: Path) -> None:
    folder = tmp_path / "tuned"
    shape = "layers=2,d_model=32,heads=2,vocab=64,max_seq=16"
    words = ["tune", "--model", "gpt", "--shape", shape, "--gpus", "2", "--device", "cpu", *REST]
    words += ["--system", "impl-fsdp2,impl-fsdp1", "--batch", "1,8", "--wrap", "block,root"]
    words += ["--strategy", "FULL_SHARD", "--backward-prefetch", "pre", "--backward-prefetch-depth", "1"]
    words += ["--trials", "12", "--finalists", "1", "--real-runs", "3", "--json", "-o", str(folder)]
    done = fsdpbench(*words)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["tried"], found["measured"], found["simulated"]) == (12, 3, False)
    assert -1.0 <= found["rank_agreement"] <= 1.0
    assert "[3/3]" in done.stderr
    assert "tokens/s/rank" in done.stderr
    results = [json.loads(path.read_text()) for path in folder.glob("impl-*/result.json")]
    assert [result["device"] for result in results] == ["cpu"] * 3
    fastest = max(result["tokens_per_s_per_gpu"] for result in results)
    assert [each["speed"] for each in found["front"]] == [fastest]
    again = fsdpbench(*words)
    assert json.loads(again.stdout) == found, again.stderr
    assert "3 of 3 configurations are done already" in again.stderr


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--device", "sim", "--real-runs", "3"], "--real-runs belongs to real devices"),
        (["--device", "cpu", "--for", "mfu"], "a CPU's peak is not known"),
        (["--device", "cpu", "--real-time", "0"], "--real-time"),
    ],
)
def test_what_makes_no_sense_on_a_device_is_refused(words: list[str], told: str) -> None:
    done = CliRunner().invoke(command, ["--model", "gpt-tiny", "--gpus", "2", *words])
    assert done.exit_code != 0
    assert told in f"{done.output}{done.exception}"
