"""Published runs predicted as if something of them were not known."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

from fsdpbench.engine.results.residuals.widths import Condition
from fsdpbench.lab.validation.runs.case import Case, Figure, Network
from fsdpbench.sim.model.software import load_software

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "ci"))
from residual_rows import under

FSDP1 = Case(
    name="7B",
    group="IBM-fms, a100-80gb",
    source="IBM-fms",
    model="llama2-7b",
    hardware="a100-80gb+nic-50",
    chip="a100-80gb",
    gpus=128,
    settings={"compile": False},
    published={Figure.TOKENS: 3700},
    software="fms-fsdp-2024",
    network=Network.STATED,
)
COMPILED = dataclasses.replace(FSDP1, settings={"compile": True})


def test_compiled_runs_are_predicted_as_they_were_alone(tmp_path: Path) -> None:
    assert under(Condition.KNOWN, [FSDP1, COMPILED], [], tmp_path) == [FSDP1, COMPILED]
    for condition in set(Condition) - {Condition.KNOWN}:
        found = under(condition, [COMPILED], [], tmp_path)
        assert not found, condition


def test_another_system_keeps_the_models_of_the_software_and_todays_streams(tmp_path: Path) -> None:
    (case,) = under(Condition.SYSTEM, [FSDP1], [], tmp_path)
    assert case.system == "torch-fsdp2"
    software = load_software(case.software or "")
    assert not software.collectives.own_streams
    assert software.of_llamas == load_software("fms-fsdp-2024").of_llamas


def test_without_the_software_of_its_time_a_run_keeps_its_system(tmp_path: Path) -> None:
    (case,) = under(Condition.SOFTWARE, [FSDP1], [], tmp_path)
    assert (case.system, case.software) == ("torch-fsdp1", None)
    old = dataclasses.replace(FSDP1, system="llm-foundry-0.1", software=None)
    (case,) = under(Condition.SOFTWARE, [old], [], tmp_path)
    assert case.system == "torch-fsdp1"


def test_without_its_network_a_run_has_its_chips(tmp_path: Path) -> None:
    (case,) = under(Condition.NETWORK, [FSDP1], [], tmp_path)
    assert case.hardware == "a100-80gb"
