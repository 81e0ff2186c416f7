"""State dicts, meta-device initialisation, and moves of a sharded model."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from fsdp_cases import (
    Model,
    assert_close,
    full_dtensors,
    loss_of,
    our_full,
    recorded,
    shard_model,
    tokens_of,
    wrap_model,
)
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor


def trained(kind: str, rank: int, seed: int = 0, steps: int = 2) -> tuple[Any, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model: Any = shard_model(kind, Model(blocks=2), mesh=init_device_mesh("cpu", (2,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(steps):
        loss_of(model, tokens_of(rank, step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def case_state_dict_needs_no_collective(rank: int) -> None:
    model, _ = trained("impl", rank)
    with torch.no_grad():
        model(tokens_of(rank, 0))  # leaves the root's parameters unsharded
    with recorded("impl") as record:
        state = model.state_dict()
    assert record == []
    assert all(isinstance(value, DTensor) for value in state.values())


def case_load_state_dict(rank: int) -> None:
    """Into a model that ran already: the loaded values are those it computes with."""
    source, _ = trained("impl", rank)
    state = {name: value.clone() for name, value in source.state_dict().items()}
    for assign in (False, True):
        target, _ = trained("impl", rank, seed=1, steps=0)
        if not assign:
            loss_of(target, tokens_of(rank, 5)).backward()
            target.zero_grad()
        target.load_state_dict(state, assign=assign)
        assert_close(full_dtensors(target, False), full_dtensors(source, False), 0)
        losses = []
        for model in (target, source):
            loss = loss_of(model, tokens_of(rank, 3))
            loss.backward()
            losses.append(loss.item())
        assert losses[0] == losses[1]


def case_checkpoints_interchange_with_torch(rank: int) -> None:
    """Model and optimizer state, sharded and full, from torch's ``fully_shard`` to ours and back."""
    for full in (False, True):
        options = StateDictOptions(full_state_dict=full)
        for first, second in (("torch", "impl"), ("impl", "torch")):
            source, source_optimizer = trained(first, rank)
            target, target_optimizer = trained(second, rank, seed=1, steps=1)
            set_model_state_dict(target, get_model_state_dict(source, options=options), options=options)
            # A copy: the sharded state is that of the source's optimizer itself.
            state = copy.deepcopy(get_optimizer_state_dict(source, source_optimizer, options=options))
            set_optimizer_state_dict(target, target_optimizer, state, options=options)
            losses = []
            for model, optimizer in ((source, source_optimizer), (target, target_optimizer)):
                loss_of(model, tokens_of(rank, 7)).backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss_of(model, tokens_of(rank, 8)).item())
            assert losses[0] == losses[1], (first, second, full)


def case_clip_grad_norm(rank: int) -> None:
    norms = []
    for kind in ("impl", "torch"):
        torch.manual_seed(0)
        model = shard_model(kind, Model(blocks=2), mesh=init_device_mesh("cpu", (2,)))
        loss_of(model, tokens_of(rank, 0)).backward()
        norm: Any = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        norms.append((norm.full_tensor().item(), full_dtensors(model, True)))
    assert norms[0][0] == pytest.approx(norms[1][0], rel=1e-6)
    assert_close(norms[0][1], norms[1][1])


def initialise(model: Any) -> None:
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()


def case_meta_device(rank: int) -> None:
    with torch.device("meta"):
        model: Any = Model(blocks=2, tied=True)
    shard_model("impl", model, mesh=init_device_mesh("cpu", (2,)))
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    initialise(model)
    with torch.no_grad():
        for block in model.blocks:
            block.scale.fill_(1.0)
    loss_of(model, tokens_of(rank, 0)).backward()
    assert model.head.weight is model.embed.weight
    assert all(torch.isfinite(p.full_tensor()).all() for p in model.parameters())
    assert all(p.grad is not None for p in model.parameters())


def case_change_of_dtype(rank: int) -> None:
    """``double()`` after wrapping, before and after a first step: that is what is computed with from then
    on.
    """
    for ran in (False, True):
        torch.manual_seed(0)
        model: Any = shard_model("impl", Model(blocks=1), mesh=init_device_mesh("cpu", (2,)))
        if ran:
            loss_of(model, tokens_of(rank, 0)).backward()
            model.zero_grad()
        expected = full_dtensors(model, False)
        model.double()
        seen = []
        model.blocks[0].register_forward_hook(lambda m, a, out, seen=seen: seen.append(out.dtype))
        loss_of(model, tokens_of(rank, 0)).backward()
        assert seen == [torch.float64]
        assert all(p.grad.dtype == torch.float64 for p in model.parameters())
        assert_close(full_dtensors(model, False), expected, 0)


def case_flat_on_meta_device(rank: int) -> None:
    def materialise(module: torch.nn.Module) -> None:
        module.to_empty(device="cpu", recurse=False)
        with torch.no_grad():
            for parameter in module.parameters(recurse=False):
                parameter.fill_(0.5)

    for function in (materialise, None):
        with torch.device("meta"):
            plain = Model(blocks=0, tied=True)
        model: Any = wrap_model("impl", plain, use_orig_params=True, param_init_fn=function)
        loss_of(model, tokens_of(rank, 0)).backward()
        whole = our_full(model, False)
        assert set(whole) == {"embed.weight", "norm.weight", "norm.bias"}
        if function is not None:
            assert all((value == 0.5).all() for value in whole.values() if value is not None)


def case_same_start_on_all_ranks(rank: int) -> None:
    torch.manual_seed(rank)
    model = wrap_model("impl", Model(blocks=1), sync_module_states=True)
    torch.manual_seed(0)
    expected = {name: p.detach() for name, p in Model(blocks=1).named_parameters()}
    assert_close(our_full(model, False), expected, 0)


CASES = [
    case_state_dict_needs_no_collective,
    case_load_state_dict,
    case_checkpoints_interchange_with_torch,
    case_clip_grad_norm,
    case_meta_device,
    case_change_of_dtype,
    case_flat_on_meta_device,
    case_same_start_on_all_ranks,
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__.removeprefix("case_"))
def test_saving(two_ranks, case: Any) -> None:
    two_ranks.run(case)
