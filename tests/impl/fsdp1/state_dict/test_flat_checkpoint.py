"""``torch.distributed.checkpoint`` saves and loads the sharded state dicts, for other worlds too."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from fsdp_cases import assert_close
from state_cases import Parts, api_of, kept_as, train, wrapped
from torch.distributed.checkpoint.optimizer import load_sharded_optimizer_state_dict
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from fsdpbench import impl

FSDP = impl.FullyShardedDataParallel
SHARDED = "SHARDED_STATE_DICT"


def made(rank: int, steps: int, kind: str = "impl", **arguments: Any) -> tuple[Any, torch.optim.Optimizer]:
    model = wrapped(kind, seed=1 - bool(steps), **arguments)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    train(model, optimizer, 0, range(steps))  # the same data on all ranks, so that any number trains equally
    return model, optimizer


def case_save(rank: int, path: str, kind: str = "impl", **arguments: Any) -> dict[str, Any]:
    model, optimizer = made(rank, 2, kind, **arguments)
    saved_of = api_of(kind).FullyShardedDataParallel.optim_state_dict
    with kept_as(kind, model, SHARDED):
        state = {"model": model.state_dict(), "optim": saved_of(model, optimizer)}
        dcp.save(state, checkpoint_id=path)
    parameters = {name: value.clone() for name, value in model.state_dict().items()}
    whole = {"model": parameters, "optim": saved_of(model, optimizer)}
    return {**whole, "losses": train(model, optimizer, 0, range(2, 4))}


def case_load(rank: int, path: str, expected: dict[str, Any], older: bool, **arguments: Any) -> None:
    model, optimizer = made(rank, 0, **arguments)
    with kept_as("impl", model, SHARDED):
        state = {"model": model.state_dict()}
        dcp.load(state, checkpoint_id=path)
        model.load_state_dict(state["model"])
        if older:
            reader = dcp.FileSystemReader(path)
            loaded = load_sharded_optimizer_state_dict(state["model"], "optim", reader)["optim"]
        else:
            for parameter in (p for group in optimizer.param_groups for p in group["params"]):
                parameter.grad = torch.zeros_like(parameter) if parameter.numel() else None
            optimizer.step()
            loaded = FSDP.optim_state_dict(model, optimizer)
            dcp.load({"optim": loaded}, checkpoint_id=path)
            model.load_state_dict(state["model"])
        FSDP.optim_state_dict_to_load(model, optimizer, loaded, load_directly=True)
    assert_close(model.state_dict(), expected["model"], 0)
    whole = FSDP.optim_state_dict(model, optimizer)["state"]
    assert whole.keys() == expected["optim"]["state"].keys()
    for name, own in whole.items():
        assert_close(own, expected["optim"]["state"][name], 0)
    assert train(model, optimizer, 0, range(2, 4)) == pytest.approx(expected["losses"], rel=1e-5)


@pytest.mark.campaign
@pytest.mark.parametrize("mesh", [False, True], ids=["group", "mesh"])
def test_other_numbers_of_ranks(one_rank, two_ranks, four_ranks, tmp_path, mesh: bool) -> None:
    pools = {1: one_rank, 2: two_ranks, 4: four_ranks}
    for saving, loading in ((2, 4), (4, 2), (2, 1)):
        path = str(tmp_path / f"{saving}-{loading}")
        ours = {"mesh": (saving,) if mesh else (), "use_orig_params": mesh}
        expected = pools[saving].run(case_save, path=path, **ours)
        theirs = {"mesh": (loading,) if mesh and loading > 1 else (), "use_orig_params": not mesh}
        pools[loading].run(case_load, path=path, expected=expected, older=not mesh and loading > 1, **theirs)


@pytest.mark.plain_cases("mesh")
@pytest.mark.parametrize("mesh", [(), (2,)], ids=["group", "mesh"])
def test_from_torch(two_ranks, tmp_path, mesh: tuple[int, ...]) -> None:
    path = str(tmp_path)
    expected = two_ranks.run(case_save, path=path, kind="torch", mesh=mesh)
    two_ranks.run(case_load, path=path, expected=expected, older=False, mesh=mesh, use_orig_params=True)


def case_functions(rank: int, path: str, **arguments: Any) -> None:
    """Save and load with the functions that serve every kind of wrapping, and go on."""
    model, optimizer = made(rank, 2, model=Parts(checkpointing=False), **arguments)
    dcp.save(dict(zip(("model", "optim"), get_state_dict(model, optimizer), strict=True)), checkpoint_id=path)
    other, other_optimizer = made(rank, 0, model=Parts(checkpointing=False), **arguments)
    states = dict(zip(("model", "optim"), get_state_dict(other, other_optimizer), strict=True))
    dcp.load(states, checkpoint_id=path)
    set_state_dict(other, other_optimizer, model_state_dict=states["model"], optim_state_dict=states["optim"])
    expected = train(model, optimizer, 0, range(2, 4))
    assert train(other, other_optimizer, 0, range(2, 4)) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(("mesh", "originals"), [((2,), True), ((), False)], ids=["mesh", "group"])
def test_functions(two_ranks, tmp_path, mesh: tuple[int, ...], originals: bool) -> None:
    two_ranks.run(case_functions, path=str(tmp_path), mesh=mesh, use_orig_params=originals)
