"""`--software`: where it is taken, how it is refused, that results, keys and the page depend on it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fsdpbench.answers.tune.run import one_point_space
from fsdpbench.base.configuration.config import Config
from fsdpbench.base.errors import UsageError
from fsdpbench.cli.requests.request import make_request
from fsdpbench.engine.results.provenance import content_key, run_command
from fsdpbench.sweep.spaces.space_file import read_space

SLOW = 'base = "fsdp1-2022"\nname = "slow"\n[attention]\nbackward_rate = 0.5\n'
SCRIPT = """import torch
layer = torch.nn.Linear(64, 64, device="cuda")
optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
for _ in range(7):
    layer(torch.zeros(8, 64, device="cuda")).sum().backward()
    optimizer.step()
"""


def config_of(software: str | None, system: str = "torch-fsdp1") -> Config:
    """The one point of a space with it."""
    given = {"model": "gpt-tiny", "gpus": 2, "device": "sim", "system": system, "software": software}
    (point,) = make_request(given, {}, whole_space=True).plan().points
    return point


def test_the_key_changes_with_the_content(tmp_path: Path) -> None:
    paths = [tmp_path / name / "mine.toml" for name in ("a", "b")]
    for path, rate in zip(paths, ("0.5", "0.4"), strict=True):
        path.parent.mkdir()
        path.write_text(SLOW.replace("0.5", rate))
    one, other = (config_of(str(path)) for path in paths)
    assert one.name == other.name
    assert content_key(one) != content_key(other)
    # Not by the path alone: the same configuration, with another file at its place.
    before = content_key(one)
    paths[0].write_text(SLOW.replace("0.5", "0.3"))
    from fsdpbench.engine.results import provenance

    provenance._content.cache_clear()
    assert content_key(one) != before
    assert content_key(config_of(None)) == content_key(config_of("current"))


def test_the_default_is_not_named_but_in_anothers_place() -> None:
    assert config_of(None).software is None
    assert config_of("CURRENT").software is None
    assert config_of(None, "torch-fsdp1-1.13").software == "fsdp1-2022"
    assert config_of("current", "torch-fsdp1-1.13").software == "current"
    assert "software" not in config_of(None).to_dict()


def test_a_configuration_with_it_is_written_read_and_repeated() -> None:
    config = config_of("fsdp1-2022")
    assert Config.from_dict(config.to_dict()) == config
    assert config.name.endswith("-software-fsdp1-2022")
    assert run_command(config).endswith("--software fsdp1-2022")


def test_a_space_says_it_and_reads_it_again() -> None:
    given = {
        "model": "gpt-tiny",
        "gpus": 2,
        "device": "sim",
        "system": "torch-fsdp1",
        "software": "fsdp1-2022",
    }
    request = make_request(given, {}, whole_space=True)
    target, lists = read_space(request.to_space(), "here")
    again = make_request(target, lists, whole_space=True)
    (point,) = again.plan().points
    assert point.software == "fsdp1-2022"
    found = {name: value for name, value in one_point_space(point).items() if value is not None}
    target, lists = read_space(found, "best.toml")
    (best,) = make_request(target, lists, whole_space=True).plan().points
    assert best == point


def test_a_real_device_refuses_it(fsdpbench: Any) -> None:
    for command in ("run", "sweep", "plan", "tune"):
        done = fsdpbench(
            command, "--model", "gpt-tiny", "--gpus", "2", "--device", "cpu", "--software", "fsdp1-2022"
        )
        assert done.returncode == 2
        assert "--software fsdp1-2022 is for simulated GPUs; leave it out with --device cpu" in done.stderr
    simulated = config_of("fsdp1-2022")
    with pytest.raises(UsageError, match="is for simulated GPUs"):
        replace(simulated, device="cpu", hardware=None)


@pytest.mark.parametrize("way", [("--model", "gpt-tiny"), ("--script", "train.py")])
def test_a_wrong_one_is_one_line(way: tuple[str, str], fsdpbench: Any, tmp_path: Path) -> None:
    script, wrong = tmp_path / "train.py", tmp_path / "wrong.toml"
    script.write_text(SCRIPT)
    wrong.write_text(SLOW.replace("0.5", "-1"))
    flag, value = way
    for software, told in (
        ("fsdp1-2021", "unknown software 'fsdp1-2021': did you mean fsdp1-2022"),
        (str(wrong), "attention.backward_rate = -1.0: must be from 0.001 to 10 (factor)"),
        (str(tmp_path / "none.toml"), "none.toml: cannot be read"),
    ):
        named = str(script) if flag == "--script" else value
        done = fsdpbench("run", flag, named, "--device", "sim", "--gpus", "2", "--software", software)
        assert done.returncode == 2
        assert told in done.stderr
        assert "fsdpbench list software" in done.stderr
        assert len(done.stderr.strip().splitlines()) == 1


def test_a_script_takes_what_is_not_the_benchs(fsdpbench: Any, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    common = ("run", "--script", str(script), "--gpus", "2", "-o", str(tmp_path / "run"), "--json")
    done = fsdpbench(*common, "--software", "fsdp1-2022")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["software"] == "fsdp1-2022"
    assert "checkpointing.reentrant, checkpointing.by_operator, fsdp1.use_orig_params of" in done.stderr
    refused = fsdpbench(*common, "--software", "composer-2023-spring")
    assert refused.returncode == 2
    assert "changes trainer.fused_loss, trainer.keeps_outputs, trainer.metrics" in refused.stderr


def test_the_page_names_a_users_own(fsdpbench: Any, tmp_path: Path) -> None:
    path = tmp_path / "slow.toml"
    path.write_text(SLOW)
    done = fsdpbench(
        "run", "--model", "gpt-tiny", "--gpus", "2", "--device", "sim", "--system", "torch-fsdp1",
        "--software", str(path), "--json", "-o", str(tmp_path / "run"),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["software"] == result["hardware"]["software"] == "slow"
    assert fsdpbench("report", str(tmp_path / "run")).returncode == 0
    page = (tmp_path / "run" / "report.html").read_text()
    assert "software slow (source: source of torch 1.13.1" in page


def test_it_is_listed(fsdpbench: Any) -> None:
    rows = json.loads(fsdpbench("list", "software", "--json").stdout)
    changes = {row["name"]: row["changes"] for row in rows}
    assert changes["current"] == {}
    assert changes["composer-2023-autumn"]["attention.backward_rate"] == 0.578
    assert "fsdp1-2022" in fsdpbench("list", "software").stdout
