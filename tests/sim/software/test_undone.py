"""What a software profile puts in place is gone after its simulation, from the next one and from torch."""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = pytest.mark.simulated

PUBLISHED = ("fsdp1-2022", "composer-2023-spring", "composer-2023-autumn", "fms-acceleration-2024")
MEASURED = ("step_times_s", "memory_per_step", "flops_per_step", "warmup_times_s")


def measured(record: dict[str, Any]) -> dict[str, Any]:
    return {name: record[name] for name in MEASURED}


@pytest.mark.parametrize(
    "before", [PUBLISHED[0], *(pytest.param(name, marks=pytest.mark.campaign) for name in PUBLISHED[1:])]
)
def test_the_next_system_in_this_process_runs_as_in_a_fresh_one(before: str) -> None:
    from simulated_runs import run, run_in_fork

    fresh = measured(run_in_fork("torch-fsdp1", activation_checkpointing="full"))
    changed = measured(run("torch-fsdp1", before, activation_checkpointing="full"))
    assert changed != fresh
    assert measured(run("torch-fsdp1", activation_checkpointing="full")) == fresh


def places() -> dict[str, Any]:
    """What mechanisms replace."""
    from torch.nn import functional

    from fsdpbench.base.torch_internals import find
    from fsdpbench.workloads import blocks, rotations
    from fsdpbench.workloads.families import gpt

    return {
        "checkpoint": blocks.checkpoint,
        "token_loss": gpt.token_loss,
        "attend": gpt.GPTAttention.attend,
        "norm": functional.rms_norm,
        "rotations": rotations.ROTATIONS,
        "reduce_scatter": find("reduce_scatter_tensors"),
        "prefetch": find("prefetch_handle"),
        "views": find("use_unsharded_views"),
    }


@pytest.mark.parametrize("ended_by", ["end", "another start"])
def test_everything_is_put_back(ended_by: str) -> None:
    from fsdpbench.sim import Simulation, load_profile
    from fsdpbench.sim.model.software import load_software
    from fsdpbench.sim.torch_device.accelerator import ACCELERATOR
    from fsdpbench.sim.torch_device.software import MECHANISMS
    from fsdpbench.workloads import replacements

    hardware, before = load_profile("a100-80gb"), places()
    of_models = replacements.MECHANISMS
    # The views on the compute stream need the accelerator.
    assert len(before) == len(MECHANISMS) + len(of_models) + 1
    replaced: set[str] = set()
    for name in PUBLISHED:
        simulation = Simulation.start(hardware, 8, 8, software=load_software(name), of_models=of_models)
        assert ACCELERATOR.collectives_on_own_streams
        now = places()
        replaced |= {place for place in before if now[place] is not before[place]}
        if ended_by == "end":
            simulation.end()
            simulation.end()
        else:
            Simulation.start(hardware, 8, 8)
        assert places() == before
        assert not ACCELERATOR.collectives_on_own_streams
    assert replaced == set(before)


def test_what_cannot_be_put_in_place_leaves_nothing_behind() -> None:
    from torch.distributed.fsdp import _runtime_utils

    from fsdpbench.base.torch_internals import TorchInternalError
    from fsdpbench.sim.model.software import load_software
    from fsdpbench.sim.torch_device.accelerator import ACCELERATOR
    from fsdpbench.sim.torch_device.software import install
    from fsdpbench.workloads import replacements

    before = places()
    del _runtime_utils._prefetch_handle
    with pytest.raises(TorchInternalError, match="_prefetch_handle, needed for the software fsdp1-2022"):
        install(load_software("fsdp1-2022"), ACCELERATOR, replacements.MECHANISMS)
    _runtime_utils._prefetch_handle = before["prefetch"]
    assert places() == before


def test_an_inherited_method_is_inherited_again() -> None:
    from fsdpbench.base.torch_internals import replaced

    class Above:
        def answer(self) -> int:
            return 1

    class Below(Above):
        pass

    with replaced(Below, answer=lambda self: 2):
        assert Below().answer() == 2
    assert "answer" not in vars(Below)
    assert Below().answer() == 1
