"""Configurations of one sweep take each other's plans: nothing of result or trace may tell."""

from __future__ import annotations

import json
import pickle
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest

from fsdpbench.base.files.shared_log import SharedLog, records
from fsdpbench.base.settings import Settings
from fsdpbench.launch import fork_server
from fsdpbench.launch.point import run_point
from fsdpbench.sim.torch_device.accelerator import SharedPlans
from fsdpbench.sweep.planning import make_config, make_target, without_absent

SYSTEMS = ("impl-fsdp2", "impl-fsdp1", "torch-fsdp2", "torch-fsdp1")


def configuration(system: str) -> dict[str, Any]:
    target = make_target(
        model="gpt",
        shape={"layers": 2, "d_model": 64, "heads": 2, "vocab": 256, "max_seq": 32},
        device="sim",
        hardware=None,
        gpus=8,
        gpus_per_node=None,
        data=None,
    )
    config = make_config(target, system, Settings.of(batch=2), target.workload())
    return without_absent(config).to_dict()


def run(config: dict[str, Any], folder: Path, shared: str | None) -> tuple[dict[str, Any], bytes]:
    """The result but `bench`, and the trace."""
    folder.mkdir()
    fork_server.ensure()
    with fork_server.plain_main():
        process = get_context("forkserver").Process(
            target=run_point, args=(config, str(folder), None, None, shared)
        )
        process.start()
    process.join()
    result = json.loads((folder / "result.json").read_text())
    del result["bench"]
    return result, next(folder.rglob("*_trace.json.gz")).read_bytes()


@pytest.mark.parametrize("system", SYSTEMS)
def test_results_and_traces_are_the_same_with_plans_of_others(system: str, tmp_path: Path) -> None:
    config = configuration(system)
    alone = run(config, tmp_path / "alone", None)
    with SharedLog() as log:
        first = run(config, tmp_path / "first", log.path)
        assert log.path is not None
        left = records(log.path)
        second = run(config, tmp_path / "second", log.path)
        assert records(log.path) == left, "the second one had to find nothing out"
    assert len(left) == 1
    assert len(pickle.loads(left[0])[1]) > 50
    assert alone == first == second


def test_plans_of_other_surroundings_are_not_taken() -> None:
    call = ((2, 3), "float32", float, 1.0)
    with SharedLog() as log:
        assert log.path is not None
        made = SharedPlans(log.path)
        made.begin("a100")
        made.add("aten.add.Tensor", call, "a plan")
        made.leave()
        for surroundings, operator, key, found in (
            ("a100", "aten.add.Tensor", call, "a plan"),
            ("h100", "aten.add.Tensor", call, None),
            (None, "aten.add.Tensor", call, None),
            ("a100", "aten.sub.Tensor", call, None),
            ("a100", "aten.add.Tensor", ((2, 3), "float32", int, 1), None),
        ):
            taken = SharedPlans(log.path)
            taken.begin(surroundings)
            assert taken.find(operator, key) == found


def test_what_cannot_be_written_down_is_not_shared() -> None:
    with SharedLog() as log:
        assert log.path is not None
        plans = SharedPlans(log.path)
        plans.begin("a100")
        plans.add("aten.add.Tensor", (), lambda: None)
        plans.leave()
        assert records(log.path) == []
