"""Checkpoints of ``fully_shard`` models: in files, at another world size, full, from rank 0 only, on the CPU.

Every one passes between torch's ``fully_shard`` and ours, in both directions.
"""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from fsdp_cases import Model, assert_close, full_dtensors, loss_of, shard_model, tokens_of
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.debug import CommDebugMode

BOTH_WAYS = (("torch", "impl"), ("impl", "torch"))


def by_columns(parameter: nn.Parameter) -> Shard | None:
    """Matrices whose columns divide by four ranks are cut there."""
    return Shard(1) if parameter.ndim == 2 and parameter.shape[1] % 4 == 0 else None


def trained(
    kind: str, seed: int = 0, steps: int = 2, **arguments: Any
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model and its AdamW after some steps; all ranks see the same data: their number does not matter."""
    torch.manual_seed(seed)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = shard_model(kind, Model(blocks=2), mesh=mesh, **arguments)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(steps):
        one_step(model, optimizer, step)
    return model, optimizer


def one_step(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> float:
    loss = loss_of(model, tokens_of(0, step))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


# -- through files, from four ranks to two -------------------------------------------------------------------


def case_save(rank: int, *, kind: str, path: str) -> Any:
    model, optimizer = trained(kind, shard_placement_fn=by_columns)
    state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.save(state, checkpoint_id=path)
    return [one_step(model, optimizer, step) for step in (5, 6)]


def case_load(rank: int, *, kind: str, path: str, columns: bool) -> list[float]:
    arguments = {"shard_placement_fn": by_columns} if columns else {}
    model, optimizer = trained(kind, seed=1, steps=1, **arguments)
    state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.load(state, checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    return [one_step(model, optimizer, step) for step in (5, 6)]


@pytest.mark.plain_cases("impl-impl")
@pytest.mark.parametrize(("first", "second"), [*BOTH_WAYS, ("impl", "impl")])
def test_four_ranks_to_two(four_ranks, two_ranks, tmp_path: Path, first: str, second: str) -> None:
    """Also from columns to rows; the steps after it are those that the saved model went on with."""
    expected = four_ranks.run(case_save, kind=first, path=str(tmp_path))
    found = two_ranks.run(case_load, kind=second, path=str(tmp_path), columns=second == "torch")
    assert found == pytest.approx(expected, rel=1e-5)


# -- full, on the CPU, from rank 0 ---------------------------------------------------------------------------


def case_from_rank_0(rank: int) -> None:
    """Full state on the CPU of rank 0 alone, broadcast into the other side's model and optimizer."""
    saving = StateDictOptions(full_state_dict=True, cpu_offload=True)
    loading = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    for first, second in BOTH_WAYS:
        source, target = trained(first), trained(second, seed=1, steps=1)
        model_state = get_model_state_dict(source[0], options=saving)
        optimizer_state = get_optimizer_state_dict(*source, options=saving)
        assert bool(model_state) == (rank == 0), len(model_state)
        assert not any(isinstance(value, DTensor) for value in model_state.values())
        set_model_state_dict(target[0], model_state, options=loading)
        # A copy: torch lets both optimizers share their counts of steps.
        set_optimizer_state_dict(*target, copy.deepcopy(optimizer_state), options=loading)
        losses = [[one_step(*side, step) for step in (5, 6)] for side in (source, target)]
        assert losses[0] == losses[1], losses


def case_onto_meta_device(rank: int) -> None:
    """A model on the meta device takes what rank 0 has; only that rank ever held all of it."""
    torch.manual_seed(0)
    whole = Model(blocks=2).state_dict() if rank == 0 else {}
    torch.manual_seed(0)
    expected = full_dtensors(shard_model("impl", Model(blocks=2), mesh=init_device_mesh("cpu", (2,))), False)
    losses = []
    for kind in ("impl", "torch"):
        with torch.device("meta"):
            plain = Model(blocks=2)
        model = shard_model(kind, plain, mesh=init_device_mesh("cpu", (2,)))
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        model.to_empty(device="cpu")
        set_model_state_dict(model, dict(whole), options=options)  # torch puts shards into what it is given
        assert_close(full_dtensors(model, False), expected, 0)
        losses.append(loss_of(model, tokens_of(rank, 0)).item())
    assert losses[0] == losses[1]


def case_materialised_like_torch(rank: int) -> None:
    """``to_empty`` and ``reset_parameters`` draw the same random numbers into the same places as torch's."""
    found = []
    for kind in ("impl", "torch"):
        with torch.device("meta"):
            plain = Model(blocks=2)
        model: Any = shard_model(kind, plain, mesh=init_device_mesh("cpu", (2,)))
        assert all(parameter.is_meta for parameter in model.parameters())
        model.to_empty(device="cpu")
        torch.manual_seed(0)
        for module in model.modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()
        with torch.no_grad():
            for block in model.blocks:
                block.scale.fill_(1.0)
        found.append((full_dtensors(model, False), loss_of(model, tokens_of(rank, 0)).item()))
    assert_close(found[0][0], found[1][0], 0)
    assert found[0][1] == found[1][1]


# -- without communication, copies ---------------------------------------------------------------------------


def case_sharded_needs_no_collective(rank: int) -> None:
    model, optimizer = trained("impl")
    with torch.no_grad():
        model(tokens_of(rank, 0))  # leaves the root's parameters unsharded
    with CommDebugMode() as collectives:
        state = model.state_dict()
        wholes = get_model_state_dict(model)
        model.load_state_dict(copy.deepcopy(state))
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        assert collectives.get_total_counts() == 0
        state["head.weight"].full_tensor()
        assert collectives.get_total_counts() == 1
    assert all(isinstance(value, DTensor) for value in (*state.values(), *wholes.values()))


def case_copies(rank: int) -> None:
    """State dicts, parameters and optimizers can be copied and pickled; as with torch a module cannot."""
    model, optimizer = trained("impl")
    state = model.state_dict()
    for again in (copy.deepcopy(state), pickle.loads(pickle.dumps(state))):
        assert_close({k: v.full_tensor() for k, v in again.items()}, full_dtensors(model, False), 0)
        first = next(iter(again.values()))
        first.to_local().add_(1)
        assert not torch.equal(first.to_local(), model.state_dict()["embed.weight"].to_local())
    assert len(pickle.dumps(state["head.weight"].to_local())) < 2 * state["head.weight"].to_local().nbytes
    copy.deepcopy(optimizer.state_dict())
    copy.deepcopy(list(model.parameters()))
    with pytest.raises(AssertionError, match="FSDP does not support deepcopy"):
        copy.deepcopy(model)
    with pytest.raises(pickle.PicklingError):
        pickle.dumps(model)


CASES = [
    case_copies,
    case_from_rank_0,
    case_onto_meta_device,
    case_materialised_like_torch,
    case_sharded_needs_no_collective,
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__.removeprefix("case_"))
def test_checkpoints(two_ranks, case: Any) -> None:
    two_ranks.run(case)
