"""`--gpus-per-node`, `--nic-gb-s` and `--gpus-used-per-node`: from words to a configuration and back."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest

from fsdpbench.base.configuration.config import Config, Measurement
from fsdpbench.base.errors import UsageError
from fsdpbench.base.settings import Settings
from fsdpbench.cli.requests.request import make_request, request_of_space
from fsdpbench.engine.results.provenance import nodes_of, run_command
from fsdpbench.lab.validation.paper_network import config_of
from fsdpbench.lab.validation.runs.runs_file import cases_of_file
from fsdpbench.sweep.prediction import as_simulated

GIVEN = {"model": "gpt-tiny", "device": "sim", "system": "torch-fsdp2", "hardware": "h100-80gb"}


def one(**given: Any) -> Config:
    (point,) = make_request({**GIVEN, "gpus": 16, **given}, {}, whole_space=True).plan().points
    return point


def placed(config: Config) -> tuple[str | None, int, int | None]:
    return config.hardware, config.gpus_per_node, config.gpus_used_per_node


def test_what_is_stated_of_a_node_is_in_the_configuration() -> None:
    assert placed(one()) == ("h100-80gb", 8, None)
    assert placed(one(gpus_per_node=4, nic_gb_s=50.0)) == ("h100-80gb+node-4+nic-50", 4, None)
    assert placed(one(gpus_per_node=4)) == ("h100-80gb+node-4", 4, None)
    assert placed(one(gpus_used_per_node=4)) == ("h100-80gb", 8, 4)
    assert placed(one(gpus_used_per_node=8)) == ("h100-80gb", 8, None)
    assert placed(one(hardware="gb200", gpus_per_node=4)) == ("gb200", 4, None)
    assert placed(one(gpus=4)) == ("h100-80gb", 4, None)
    assert placed(one(gpus=4, gpus_used_per_node=2)) == ("h100-80gb", 4, 2)
    assert "gpus_used_per_node" not in one().to_dict()
    assert Config.from_dict(one(gpus_used_per_node=4).to_dict()).ranks_per_node == 4


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"gpus_used_per_node": 9}, "--gpus-used-per-node must be from 1 to the 8 of a node, not 9"),
        ({"gpus_used_per_node": 3}, "or another --gpus-used-per-node"),
        ({"gpus_per_node": 3}, "or another --gpus-per-node"),
        ({"gpus_per_node": 4, "gpus_used_per_node": 8}, "the 4 of a node, not 8"),
        (
            {"gpus_used_per_node": 4, "device": "cpu", "hardware": None},
            "is for simulated GPUs; leave it out with cpu",
        ),
        ({"hardware": "h100-80gb+node-4", "gpus_per_node": 8}, "state one of them"),
    ],
)
def test_nodes_that_cannot_be_are_refused_by_name(given: dict[str, Any], why: str) -> None:
    with pytest.raises(UsageError) as caught:
        one(**given)
    assert why in str(caught.value)


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"gpus_per_node": 4, "nic_gb_s": 50.0},
        {"gpus_used_per_node": 4},
        {"gpus_per_node": 4, "gpus_used_per_node": 2},
        {"gpus": 4},
        {"gpus": 4, "gpus_used_per_node": 2},
        {"gpus": [4, 32], "gpus_used_per_node": 2},
    ],
)
def test_a_sweep_that_is_recorded_is_the_same_again(given: dict[str, Any]) -> None:
    request = make_request({**GIVEN, "gpus": 16, **given}, {}, whole_space=True)
    assert request_of_space(request.to_space()).plan().points == request.plan().points


def test_the_command_repeats_the_nodes() -> None:
    words = shlex.split(run_command(one(gpus=4, gpus_used_per_node=2)))
    at = words.index("--gpus-per-node")
    assert words[at : at + 4] == ["--gpus-per-node", "8", "--gpus-used-per-node", "2"]
    assert "--gpus-used-per-node" not in run_command(one(gpus=4))
    # Recorded before a node could be stated: four of eight GPUs were used, and are again.
    before = Config.from_dict({**one().to_dict(), "gpus_per_node": 4})
    assert nodes_of(before) == {"gpus_per_node": 8, "gpus_used_per_node": 4}


def test_real_nodes_are_simulated_as_they_were() -> None:
    real = Config(
        model="gpt-tiny", shape={}, system="torch-fsdp2", device="cuda", hardware=None, gpus=16,
        gpus_per_node=4, settings=Settings.of(), measurement=Measurement.default_for("cuda"),
    )  # fmt: skip
    simulated = as_simulated(real, "h100-80gb")
    assert simulated is not None
    assert simulated.hardware == "h100-80gb+node-4"


def test_published_runs_state_their_nodes(tmp_path: Path) -> None:
    columns = {
        "source": "someone", "run": "7B", "gpu": "h100-80gb", "gpus": "16", "network": "800 Gb/s a node",
        "system": "torch-fsdp1", "model": "llama2-7b", "shape": "", "seq": "4096", "batch": "1",
        "strategy": "FULL_SHARD", "activation_checkpointing": "none", "reduce_dtype": "bf16",
        "compiled": "no", "tokens_per_s_per_gpu": "9600",
        "status": "ok", "allocated_gib": "", "reserved_gib": "",
        "gpus_per_node": "4",
    }  # fmt: skip
    (tmp_path / "runs.csv").write_text(",".join(columns) + "\n" + ",".join(columns.values()) + "\n")
    (case,) = cases_of_file(tmp_path / "runs.csv")
    assert (case.chip, case.hardware) == ("h100-80gb", "h100-80gb+node-4+nic-100")
    assert placed(config_of(case)) == ("h100-80gb+node-4+nic-100", 4, None)
