"""``torch.distributed.checkpoint.state_dict`` on our FSDPs, beside torch's: every option."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from state_cases import Parts, api_of, describe, local_of, train, wrapped
from torch.distributed.checkpoint import state_dict as functions
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.distributed.device_mesh import init_device_mesh

Options = dict[str, bool]
SAVING = ("full_state_dict", "cpu_offload", "ignore_frozen_params", "flatten_optimizer_state_dict")
LOADING = ("broadcast_from_rank0", "strict", "cpu_offload")


def every_pair() -> Iterator[tuple[Options, Options]]:
    """Options to save with and options to load that with, as far as they go together."""
    for flags in itertools.product((False, True), repeat=len(SAVING)):
        save = dict(zip(SAVING, flags, strict=True))
        for others in itertools.product((False, True), repeat=len(LOADING)):
            load = {key: save[key] for key in SAVING[:3]} | dict(zip(LOADING, others, strict=True))
            rank0_saved = save["full_state_dict"] and save["cpu_offload"]
            if load["full_state_dict"] if load["broadcast_from_rank0"] else not rank0_saved:
                yield save, load


def sharded(kind: str, model: Any, *, mesh: tuple[int, ...] = (), **arguments: Any) -> Any:
    """Wrap with torch's or our ``fully_shard``."""
    if mesh:
        arguments["mesh"] = init_device_mesh("cpu", mesh, mesh_dim_names=("replicate", "shard")[-len(mesh) :])
    arguments["ignored_params"] = set(model.ignored.parameters())
    for block in model.blocks:
        api_of(kind).fully_shard(block, **arguments)
    return api_of(kind).fully_shard(model, **arguments)


def built(kind: str, seed: int, *, tied: bool, **arguments: Any) -> tuple[Any, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    plain = Parts(checkpointing=False)
    if not tied:
        plain.head.weight = torch.nn.Parameter(torch.randn(11, 6))
    if "reshard_after_forward" in arguments:
        model = sharded(kind, plain, **arguments)
    else:
        model = wrapped(kind, plain, **arguments)
    return model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)


def flattened(value: Any, where: str = "") -> Iterator[tuple[str, Any]]:
    """All that a state dict shows: keys in their order, kinds and layouts, elements."""
    if isinstance(value, (dict, list, tuple)):
        entries = value.items() if isinstance(value, dict) else enumerate(value)
        for key, each in entries:
            yield from flattened(each, f"{where}/{key}")
    elif hasattr(value, "dtype"):
        local = local_of(value).detach().cpu()
        yield where, str(describe(value))
        yield f"{where} elements", local.clone()
    else:
        yield where, value


def attempt(call: Callable[[], Any]) -> list[tuple[str, Any]]:
    try:
        return list(flattened(call()))
    except Exception as error:
        return [("raised", type(error).__name__)]


def outcome(kind: str, rank: int, save: Options, load: Options, **arguments: Any) -> list[tuple[str, Any]]:
    """What one side shows of saving after two steps, and of loading into another model."""
    model, optimizer = built(kind, 0, **arguments)
    train(model, optimizer, rank, range(2))
    rank0_only = "use_orig_params" in arguments and save["full_state_dict"] and save["cpu_offload"]
    if rank0_only and kind == "torch":  # its own fails on a CPU: without it all have what rank 0 has with it
        save = {**save, "cpu_offload": False}
    states = functions.get_state_dict(model, optimizer, options=StateDictOptions(**save))
    if rank0_only and kind == "torch" and rank:
        states = ({}, {})
    found = list(flattened(states))
    other, other_optimizer = built(kind, 1, **arguments)
    options = StateDictOptions(**load)
    found += attempt(lambda: functions.set_model_state_dict(other, states[0], options=options))
    found += attempt(
        lambda: functions.set_optimizer_state_dict(other, other_optimizer, states[1], options=options)
    )
    whole = StateDictOptions(full_state_dict=True)
    return found + attempt(lambda: functions.get_state_dict(other, other_optimizer, options=whole))


def case_as_torch(rank: int, *, pairs: list[tuple[Options, Options]], **arguments: Any) -> list[str]:
    differences = []
    for save, load in pairs:
        ours, theirs = (outcome(kind, rank, save, load, **arguments) for kind in ("impl", "torch"))
        if [key for key, _ in ours] != [key for key, _ in theirs]:
            changed = set(dict(ours)) ^ set(dict(theirs)) or "in another order"
            differences.append(f"{save} {load}: {changed}")
            continue
        for (key, own), (_, torchs) in zip(ours, theirs, strict=True):
            if isinstance(own, torch.Tensor):
                same = own.shape == torchs.shape and torch.allclose(own, torchs, rtol=1e-4, atol=1e-6)
            else:
                same = own == torchs
            if not same:
                differences.append(f"{save} {load}: {key} {own} {torchs}")
    return differences


@pytest.mark.plain_cases("few-flat-FULL_SHARD-untied", "few-original-SHARD_GRAD_OP-tied")
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
@pytest.mark.parametrize("originals", [False, True], ids=["flat", "original"])
@pytest.mark.parametrize("every", [3, 1], ids=["few", "many"])
def test_some_options(two_ranks, every: int, strategy: str, originals: bool, tied: bool) -> None:
    arguments = {"sharding_strategy": strategy, "use_orig_params": originals, "tied": tied}
    pairs = list(every_pair())[:: 11 * every]
    if strategy == "NO_SHARD":  # sharded types: torch's optimizer has ShardedTensors, ours whole values
        pairs = [pair for pair in every_pair() if pair[0]["full_state_dict"]][:: 5 * every]
    assert two_ranks.run_everywhere(case_as_torch, pairs=pairs, **arguments) == [[], []]


@pytest.mark.plain_cases("few-original")
@pytest.mark.parametrize("originals", [False, True], ids=["flat", "original"])
@pytest.mark.parametrize("every", [3, 1], ids=["few", "many"])
def test_hybrid(four_ranks, every: int, originals: bool) -> None:
    arguments = {"sharding_strategy": "HYBRID_SHARD", "mesh": (2, 2), "use_orig_params": originals}
    pairs = list(every_pair())[3 :: 13 * every]
    assert four_ranks.run_everywhere(case_as_torch, pairs=pairs, tied=True, **arguments) == [[]] * 4


@pytest.mark.campaign
@pytest.mark.parametrize("mesh", [(), (2,)], ids=["group", "mesh"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("originals", [False, True], ids=["flat", "original"])
def test_all_options(two_ranks, mesh: tuple[int, ...], originals: bool, tied: bool) -> None:
    arguments = {"mesh": mesh, "use_orig_params": originals, "tied": tied}
    pairs = list(every_pair())
    assert two_ranks.run_everywhere(case_as_torch, 600, pairs=pairs, **arguments) == [[], []]


@pytest.mark.plain_cases("few-freed-untied")
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("freed", [True, False], ids=["freed", "kept"])
@pytest.mark.parametrize("every", [3, 1], ids=["few", "many"])
def test_fully_shard(two_ranks, every: int, freed: bool, tied: bool) -> None:
    pairs = list(every_pair())[:: 11 * every]
    found = two_ranks.run_everywhere(case_as_torch, pairs=pairs, tied=tied, reshard_after_forward=freed)
    assert found == [[], []]


@pytest.mark.campaign
def test_hybrid_fully_shard(four_ranks) -> None:
    pairs = list(every_pair())[3::13]
    arguments = {"mesh": (2, 2), "tied": True, "reshard_after_forward": True}
    assert four_ranks.run_everywhere(case_as_torch, 120, pairs=pairs, **arguments) == [[]] * 4
