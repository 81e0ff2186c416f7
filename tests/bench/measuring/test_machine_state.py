"""What in a machine's state makes a figure doubtful."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from fsdpbench.base.configuration.config import Config, Measurement
from fsdpbench.base.settings import Settings
from fsdpbench.engine.results.machine_state import MachineState, doubts, environment_of, observe

QUIET = MachineState(busy_cores=0.1, cores=8, governor="performance", swapped_bytes=0)
GPU = {
    "index": "0",
    "power.limit": "400.00",
    "power.default_limit": "400.00",
    "temperature.gpu": "50",
    "clocks_throttle_reasons.active": "0x0000000000000001",
}


def config(device: str = "cpu", gpus: int = 2) -> Config:
    return Config(
        model="gpt-tiny", shape={}, system="impl-fsdp2", device=device, gpus=gpus, gpus_per_node=gpus,
        hardware="a100-80gb" if device == "sim" else None, settings=Settings.of(),
        measurement=Measurement.default_for(device),
    )  # fmt: skip


def test_a_quiet_machine_leaves_no_doubt() -> None:
    assert doubts(config(), QUIET, QUIET) == []
    with_gpu = replace(QUIET, gpus=(GPU,))
    assert doubts(config("cuda"), with_gpu, with_gpu) == []


@pytest.mark.parametrize(
    ("before", "after", "told"),
    [
        ({"busy_cores": 3.0}, {}, "3.0 of 8 cores"),
        ({"governor": "powersave"}, {}, "powersave"),
        ({}, {"swapped_bytes": 4096}, "swapped"),
        ({"gpu_processes": ({"pid": "77"},)}, {}, "77"),
        ({}, {"gpus": ({**GPU, "power.limit": "300.00"},)}, "300 of 400 W"),
        ({}, {"gpus": ({**GPU, "temperature.gpu": "91"},)}, "91 degrees"),
        ({}, {"gpus": ({**GPU, "clocks_throttle_reasons.active": "0x0000000000000024"},)}, "0x24"),
    ],
)
def test_what_disturbs_is_named(before: dict[str, object], after: dict[str, object], told: str) -> None:
    (found,) = doubts(config("cuda"), replace(QUIET, **before), replace(QUIET, **after))  # type: ignore[arg-type]
    assert told in found


def test_more_ranks_than_cores_is_named() -> None:
    (found,) = doubts(config(gpus=9), QUIET, QUIET)
    assert found == "9 ranks shared 8 cores"


def test_this_machine_can_be_observed() -> None:
    state = observe("cpu")
    assert state.cores == len(os.sched_getaffinity(0))
    assert state.busy_cores is not None
    assert environment_of(config(), state, state)["state"]["before"]["cores"] == state.cores


def test_gpus_are_asked_through_their_own_tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text(
        "#!/bin/sh\n"
        'case "$1" in --query-gpu=*) echo "0, NVIDIA H200, 570.1, 1980, 1980, 40, 700.00, 700.00, 0x0";;\n'
        '*) echo "4242, 1024";; esac\n'
    )
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    state = observe("cuda")
    assert state.gpus[0]["name"] == "NVIDIA H200"
    assert state.gpu_processes == ({"pid": "4242", "used_memory": "1024"},)
