"""Optimizer state dicts of ``FullyShardedDataParallel``: new and older calls, beside torch's."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from fsdp_cases import assert_close
from state_cases import Parts, api_of, assert_same_values, kept_as, train, wrapped
from torch import nn

from fsdpbench import impl

FSDP = impl.FullyShardedDataParallel
MODES = pytest.mark.parametrize("originals", [False, True], ids=["flat", "original"])
FULL, SHARDED = "FULL_STATE_DICT", "SHARDED_STATE_DICT"


def optimizer_for(model: Any, name: str, groups: bool) -> torch.optim.Optimizer:
    parameters: Any = [p for p in model.parameters() if p.requires_grad]
    if groups:
        small = [p for n, p in model.named_parameters() if "blocks.0" in n]
        rest = [p for n, p in model.named_parameters() if "blocks.0" not in n and p.requires_grad]
        parameters = [{"params": rest, "lr": 0.02}, {"params": small, "weight_decay": 0.1}]
    if name == "SGD":
        return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)
    return torch.optim.AdamW(parameters, lr=0.01)


def trained(kind: str, rank: int, name: str = "AdamW", *, groups: bool = False, **arguments: Any) -> Any:
    model = wrapped(kind, **arguments)
    optimizer = optimizer_for(model, name, groups)
    train(model, optimizer, rank, range(2))
    return model, optimizer


def flat_view(state: dict[str, Any]) -> dict[str, Any]:
    return {f"{owner} {name}": own[name] for owner, own in state["state"].items() for name in sorted(own)}


def assert_same_state(ours: dict[str, Any], theirs: dict[str, Any], tolerance: float = 1e-4) -> None:
    mine, other = flat_view(ours), flat_view(theirs)
    assert_same_values(dict(sorted(mine.items())), dict(sorted(other.items())), tolerance)
    assert list(ours["state"]) == list(theirs["state"]) or set(ours["state"]) == set(theirs["state"])
    for own, their in zip(ours["param_groups"], theirs["param_groups"], strict=True):
        assert own == their


def kept_on_device(kind: str) -> Any:
    """Configs without offloading: on CPUs torch's gives every state the memory of the last one with it."""
    name = kind.split("_")[0].capitalize()
    return ((f"{name}StateDictConfig", {}), (f"{name}OptimStateDictConfig", {"offload_to_cpu": False}))


# -- saving --------------------------------------------------------------------------------------------------


def case_equal_to_torch(rank: int, name: str, groups: bool = False, **arguments: Any) -> None:
    ours = trained("impl", rank, name, groups=groups, **arguments)
    theirs = trained("torch", rank, name, groups=groups, **arguments)
    for kind in (FULL, SHARDED):
        configs = kept_on_device(kind)
        with kept_as("impl", ours[0], kind, *configs), kept_as("torch", theirs[0], kind, *configs):
            state = FSDP.optim_state_dict(*ours)
            assert_same_state(state, api_of("torch").FullyShardedDataParallel.optim_state_dict(*theirs))


@pytest.mark.plain_cases("group")
@MODES
@pytest.mark.parametrize("mesh", [(), (2,)], ids=["group", "mesh"])
def test_equal_to_torch(two_ranks, originals: bool, mesh: tuple[int, ...]) -> None:
    two_ranks.run(case_equal_to_torch, name="AdamW", groups=True, use_orig_params=originals, mesh=mesh)


@MODES
def test_momentum_equal_to_torch(two_ranks, originals: bool) -> None:
    two_ranks.run(case_equal_to_torch, name="SGD", use_orig_params=originals)


@pytest.mark.plain_cases("flat")
@MODES
def test_hybrid_equal_to_torch(four_ranks, originals: bool) -> None:
    arguments = {"sharding_strategy": "HYBRID_SHARD", "mesh": (2, 2), "use_orig_params": originals}
    four_ranks.run(case_equal_to_torch, name="AdamW", **arguments)


def case_rank0_only(rank: int, originals: bool) -> None:
    model, optimizer = trained("impl", rank, use_orig_params=originals)
    everywhere = FSDP.optim_state_dict(model, optimizer)
    configs = (("FullStateDictConfig", {}), ("FullOptimStateDictConfig", {"rank0_only": True}))
    with kept_as("impl", model, FULL, *configs):
        state = FSDP.optim_state_dict(model, optimizer)
        if rank > 0:
            assert state == {}
        else:
            assert_same_state(state, everywhere, 0)
        fresh = wrapped("impl", seed=1, use_orig_params=originals)
        fresh_optimizer = optimizer_for(fresh, "AdamW", False)
        FSDP.set_state_dict_type(
            fresh, impl.StateDictType.FULL_STATE_DICT, None, impl.FullOptimStateDictConfig(rank0_only=True)
        )
        FSDP.optim_state_dict_to_load(fresh, fresh_optimizer, state, load_directly=True)
    FSDP.set_state_dict_type(fresh, impl.StateDictType.FULL_STATE_DICT)
    assert_same_state(FSDP.optim_state_dict(fresh, fresh_optimizer), everywhere, 0)


@MODES
def test_rank0_only(two_ranks, originals: bool) -> None:
    two_ranks.run(case_rank0_only, originals=originals)


# -- loading -------------------------------------------------------------------------------------------------


def case_goes_on(rank: int, name: str, kind: str, **arguments: Any) -> None:
    """Saved, loaded into a new model and optimizer, training goes on as if nothing had been."""
    model, optimizer = trained("impl", rank, name, groups=True, **arguments)
    fresh = wrapped("impl", seed=1, **arguments)
    fresh_optimizer = optimizer_for(fresh, name, True)
    with kept_as("impl", model, kind), kept_as("impl", fresh, kind):
        fresh.load_state_dict(model.state_dict())
        fresh.module.ignored.load_state_dict(model.module.ignored.state_dict())
        state = FSDP.optim_state_dict(model, optimizer)
        fresh_optimizer.load_state_dict(FSDP.optim_state_dict_to_load(fresh, fresh_optimizer, state))
        assert_same_state(FSDP.optim_state_dict(fresh, fresh_optimizer), state, 0)
    assert [g["lr"] for g in fresh_optimizer.param_groups] == [g["lr"] for g in optimizer.param_groups]
    expected = train(model, optimizer, rank, range(2, 5))
    assert train(fresh, fresh_optimizer, rank, range(2, 5)) == expected


@pytest.mark.plain_cases("original")
@MODES
@pytest.mark.parametrize("kind", [FULL, SHARDED])
def test_goes_on(two_ranks, originals: bool, kind: str) -> None:
    two_ranks.run(case_goes_on, name="AdamW", kind=kind, use_orig_params=originals)


def test_momentum_goes_on(two_ranks) -> None:
    two_ranks.run(case_goes_on, name="SGD", kind=SHARDED, use_orig_params=True, mesh=(2,))


def test_not_sharded_goes_on(two_ranks) -> None:
    two_ranks.run(case_goes_on, name="AdamW", kind=SHARDED, sharding_strategy="NO_SHARD")


@pytest.mark.plain_cases("original")
@MODES
def test_offloaded_goes_on(two_ranks, originals: bool) -> None:
    arguments = {"use_orig_params": originals, "cpu_offload": impl.CPUOffload(True)}
    two_ranks.run(case_goes_on, name="AdamW", kind=SHARDED, **arguments)


def test_hybrid_goes_on(four_ranks) -> None:
    arguments = {"sharding_strategy": "HYBRID_SHARD", "mesh": (2, 2)}
    four_ranks.run(case_goes_on, name="AdamW", kind=SHARDED, **arguments)


class Frozen(nn.Module):
    """Some parameters without state: frozen, never used, outside of every unit, without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(5, 5)
        self.frozen = nn.Linear(5, 5).requires_grad_(False)
        self.unused = nn.Linear(3, 3)
        self.factor = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.frozen(self.used(x)) * self.factor


def case_without_state(rank: int) -> None:
    """Parameters without state have none in the dict, those without dimensions have theirs."""
    models = []
    for seed in range(2):
        torch.manual_seed(seed)
        outer = nn.Sequential(impl.FullyShardedDataParallel(Frozen(), use_orig_params=True), nn.Linear(5, 5))
        optimizer = torch.optim.AdamW([p for p in outer.parameters() if p.requires_grad], lr=0.1)
        models.append((outer, optimizer))
    model, optimizer = models[0]
    for parameter in model[1].parameters():
        torch.distributed.broadcast(parameter.data, 0)
    model(torch.randn(4, 5)).sum().backward()
    optimizer.step()
    state = FSDP.optim_state_dict(model, optimizer)
    assert set(state["state"]) == {"0.used.weight", "0.used.bias", "0.factor", "1.weight", "1.bias"} | (
        {"0.unused.weight", "0.unused.bias"} & set(state["state"])
    )
    assert not {name for name in state["state"] if "frozen" in name}
    assert state["state"]["0.factor"]["exp_avg"].shape == ()
    assert set(state["param_groups"][0]["params"]) >= {"0.unused.weight", "1.bias", "0.factor"}
    for kind in (FULL, SHARDED):
        with kept_as("impl", model, kind), kept_as("impl", models[1][0], kind):
            saved = FSDP.optim_state_dict(model, optimizer)
            FSDP.optim_state_dict_to_load(*models[1], saved, load_directly=True)
            assert_same_state(FSDP.optim_state_dict(*models[1]), saved, 0)


def test_without_state(two_ranks) -> None:
    two_ranks.run(case_without_state)


# -- older calls, and other keys -----------------------------------------------------------------------------


def case_older_calls(rank: int, originals: bool) -> None:
    """Each gives what torch's gives, and what it gives can be loaded."""
    ours = trained("impl", rank, use_orig_params=originals)
    theirs = trained("torch", rank, use_orig_params=originals)
    torch_api = api_of("torch").FullyShardedDataParallel
    full = FSDP.full_optim_state_dict(*ours, rank0_only=False)
    with kept_as("torch", theirs[0], FULL, *kept_on_device(FULL)):
        assert_same_state(full, torch_api.optim_state_dict(*theirs))
    on_first = FSDP.full_optim_state_dict(*ours)
    assert bool(on_first) == (rank == 0)
    sharded = FSDP.sharded_optim_state_dict(*ours)
    assert_same_state(sharded, torch_api.sharded_optim_state_dict(*theirs))
    own = ours[1].state_dict()
    parameters = [p for p in ours[0].parameters() if p.requires_grad]
    for loaded in (
        FSDP.shard_full_optim_state_dict(full, ours[0], optim=ours[1]),
        FSDP.shard_full_optim_state_dict(full, ours[0], optim_input=parameters),
        FSDP.scatter_full_optim_state_dict(on_first or None, ours[0], optim=ours[1]),
        FSDP.flatten_sharded_optim_state_dict(sharded, *ours),
    ):
        assert loaded["param_groups"] == own["param_groups"]
        assert set(loaded["state"]) == set(own["state"])
        assert_close(tensors_of(loaded), tensors_of(own), 0)
        ours[1].load_state_dict(loaded)


def tensors_of(state: dict[str, Any]) -> dict[str, Any]:
    return {f"{key} {name}": v for key, own in state["state"].items() for name, v in own.items()}


@pytest.mark.plain_cases("original")
@MODES
def test_older_calls(two_ranks, originals: bool) -> None:
    with warnings.catch_warnings():
        two_ranks.run(case_older_calls, originals=originals)


def case_rekey(rank: int) -> None:
    """To a plain model and back, and training goes on there with the same losses."""
    model, optimizer = trained("impl", rank, use_orig_params=True)
    full = FSDP.full_optim_state_dict(model, optimizer, rank0_only=False)
    plain = Parts()
    plain.load_state_dict(model.state_dict())
    plain_optimizer = optimizer_for(plain, "AdamW", False)
    kinds = impl.OptimStateKeyType
    numbered = FSDP.rekey_optim_state_dict(full, kinds.PARAM_ID, plain, optim=plain_optimizer)
    plain_optimizer.load_state_dict(numbered)
    named = FSDP.rekey_optim_state_dict(plain_optimizer.state_dict(), kinds.PARAM_NAME, plain)
    assert_close(tensors_of(named), tensors_of(full), 0)
    assert FSDP.rekey_optim_state_dict(named, kinds.PARAM_NAME, plain) is named
    loaded = FSDP.optim_state_dict_to_load(model, optimizer, named)
    assert_close(tensors_of(loaded), tensors_of(optimizer.state_dict()), 0)
    flat, flat_optimizer = trained("impl", rank)
    with pytest.raises(ValueError, match=r"is a flat one for .*embed\.weight"):
        FSDP.rekey_optim_state_dict(full, kinds.PARAM_ID, flat, optim=flat_optimizer)
    with pytest.raises(ValueError, match="all names or all numbers"):
        FSDP.rekey_optim_state_dict({"state": {0: {}, "a": {}}}, kinds.PARAM_ID, plain)


def test_rekey(two_ranks) -> None:
    two_ranks.run(case_rekey)


def case_named_optimizer(rank: int, originals: bool) -> None:
    from torch.distributed.optim import _NamedOptimizer

    models = []
    for seed in range(2):
        model = wrapped("impl", seed=seed, use_orig_params=originals)
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        optimizer = _NamedOptimizer(named, torch.optim.AdamW, lr=0.01)
        optimizer.init_state()
        models.append((model, optimizer))
    train(*models[0], rank, range(2))
    state = FSDP.optim_state_dict(*models[0])
    plain = Parts(checkpointing=False)
    assert set(state["state"]) == {name for name, p in plain.named_parameters() if p.requires_grad}
    loaded = FSDP.optim_state_dict_to_load(*models[1], state, is_named_optimizer=True)
    models[1][1].load_state_dict(loaded)
    assert_same_state(FSDP.optim_state_dict(*models[1]), state, 0)


# -- mistakes ------------------------------------------------------------------------------------------------


def case_mistakes(rank: int) -> None:
    model, optimizer = trained("impl", rank)
    full = FSDP.optim_state_dict(model, optimizer)
    load = FSDP.optim_state_dict_to_load

    def changed(name: str, value: Any) -> dict[str, Any]:
        return {**full, "state": {**full["state"], name: value}}

    own = full["state"]["norm.weight"]
    with pytest.raises(ValueError, match=r"states of 'other\.weight', which are not parameters of the model"):
        load(model, optimizer, changed("other.weight", own))
    with pytest.raises(ValueError, match="rekey_optim_state_dict"):
        load(model, optimizer, {"state": {0: own}})
    with pytest.raises(ValueError, match=r"size mismatch for 'exp_avg' of norm\.weight.*\(2,\).*\(6,\)"):
        load(model, optimizer, changed("norm.weight", {**own, "exp_avg": torch.zeros(2)}))
    with pytest.raises(ValueError, match=r"(?s)one 'step', .*'norm\.bias'.*use_orig_params|one 'step', but"):
        load(model, optimizer, changed("norm.weight", {**own, "step": torch.tensor(9.0)}))
    with pytest.raises(ValueError, match=r"\['norm\.weight'\] have none"):
        load(model, optimizer, changed("norm.weight", {k: v for k, v in own.items() if k != "step"}))
    with pytest.raises(ValueError, match="'exp_avg_sq' of unit 'root' is not in all parameters"):
        load(model, optimizer, changed("norm.weight", {"exp_avg": own["exp_avg"]}))
    with pytest.raises(ValueError, match="has the key 'state'; this one has \\['model'\\]"):
        load(model, optimizer, {"model": 1})
    with pytest.raises(ValueError, match="no group of the state dict has the parameters"):
        load(model, optimizer, {**full, "param_groups": [{"params": []}]})
    with pytest.raises(RuntimeError, match=r"(?s)do not agree on the optimizer state.*rank 1.*norm\.weight"):
        load(
            model,
            optimizer,
            full
            if rank
            else {**full, "state": {k: v for k, v in full["state"].items() if k != "norm.weight"}},
        )
    with kept_as("impl", model, SHARDED):
        sharded = FSDP.optim_state_dict(model, optimizer)
    with pytest.raises(ValueError, match="is a ShardedTensor: load it inside"):
        load(model, optimizer, sharded)
    stray = torch.optim.AdamW([nn.Parameter(torch.zeros(2))])
    with pytest.raises(ValueError, match=r"parameter 0 of shape \(2,\) is not in the model"):
        FSDP.optim_state_dict(model, stray)
    flat = model.parameters().__next__()
    optimizer.state[flat]["row"] = torch.zeros(3)
    with pytest.raises(RuntimeError, match="'row' of unit 'root' has the shape"):
        FSDP.optim_state_dict(model, optimizer)
    del optimizer.state[flat]["row"]
    optimizer.state[flat]["step"] = torch.tensor(float(rank))
    with pytest.raises(RuntimeError, match=r"'step' of 'embed\.weight' is tensor\(1\.\) on rank 1"):
        FSDP.optim_state_dict(model, optimizer)


def test_mistakes(two_ranks) -> None:
    two_ranks.run(case_mistakes)


@MODES
def test_named_optimizer(two_ranks, originals: bool) -> None:
    two_ranks.run(case_named_optimizer, originals=originals)
