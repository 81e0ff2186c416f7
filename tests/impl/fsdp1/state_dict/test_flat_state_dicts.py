"""``state_dict`` and ``load_state_dict`` of ``FullyShardedDataParallel``, all types, beside torch's."""

from __future__ import annotations

import random
from contextlib import suppress
from typing import Any

import pytest
import torch
from fsdp_cases import assert_close
from state_cases import Parts, api_of, assert_same_values, kept_as, train, wrapped
from torch import nn
from torch.distributed._shard.sharded_tensor import ShardedTensor

from fsdpbench import impl

FSDP = impl.FullyShardedDataParallel
TYPES = ("FULL_STATE_DICT", "SHARDED_STATE_DICT", "LOCAL_STATE_DICT")
MODES = pytest.mark.parametrize("originals", [False, True], ids=["flat", "original"])


def trained(kind: str, rank: int, **arguments: Any) -> Any:
    model = wrapped(kind, **arguments)
    train(model, torch.optim.SGD(model.parameters(), lr=0.1), rank, range(2))
    return model


def plain_of(state: dict[str, Any]) -> Parts:
    plain = Parts()
    plain.load_state_dict(state)
    return plain


# -- saving --------------------------------------------------------------------------------------------------


def case_equal_to_torch(rank: int, **arguments: Any) -> None:
    """Keys, their order, types, layouts and elements, of the whole model, a wrapper inside, and a list."""
    ours, theirs = trained("impl", rank, **arguments), trained("torch", rank, **arguments)
    plain = Parts().state_dict()
    for name in TYPES[:2]:
        with kept_as("impl", ours, name), kept_as("torch", theirs, name):
            state = ours.state_dict()
            assert list(state) == list(plain)
            assert_same_values(state, theirs.state_dict())
            assert_same_values(ours.module.blocks.state_dict(), theirs.module.blocks.state_dict())
            assert_same_values(ours.module.blocks[1].state_dict(), theirs.module.blocks[1].state_dict())
            prefixed = ours.state_dict(prefix="a.b.")
            assert list(prefixed) == [f"a.b.{key}" for key in plain]
    assert list(ours.state_dict()._metadata) == list(plain._metadata)


@MODES
@pytest.mark.parametrize("mesh", [(), (2,)], ids=["group", "mesh"])
def test_equal_to_torch(two_ranks, originals: bool, mesh: tuple[int, ...]) -> None:
    two_ranks.run(case_equal_to_torch, use_orig_params=originals, mesh=mesh)


@pytest.mark.parametrize("originals", [False, True], ids=["flat", "original"])
def test_equal_to_torch_hybrid(four_ranks, originals: bool) -> None:
    arguments = {"sharding_strategy": "HYBRID_SHARD", "mesh": (2, 2), "use_orig_params": originals}
    four_ranks.run(case_equal_to_torch, **arguments)


def test_equal_to_torch_not_sharded(two_ranks) -> None:
    two_ranks.run(case_equal_to_torch, sharding_strategy="NO_SHARD")


def test_equal_to_torch_on_four(four_ranks) -> None:
    """More ranks than some parameters have rows."""
    four_ranks.run(case_equal_to_torch)


def case_local(rank: int, originals: bool) -> None:
    """As torch's for flat parameters; torch's cannot be loaded with original ones, ours can."""
    model = trained("impl", rank, use_orig_params=originals)
    with kept_as("impl", model, "LOCAL_STATE_DICT"):
        state = model.state_dict()
        if not originals:
            theirs = trained("torch", rank)
            with kept_as("torch", theirs, "LOCAL_STATE_DICT"):
                assert_same_values(state, theirs.state_dict())
    names = ["_flat_param", "blocks.0._flat_param", "blocks.1._flat_param"]
    assert sorted(k for k, v in state.items() if isinstance(v, ShardedTensor)) == names
    other = wrapped("impl", seed=1, use_orig_params=originals)
    with kept_as("impl", other, "LOCAL_STATE_DICT"):
        answer = other.load_state_dict(state)
    assert not answer.missing_keys
    assert_close(other.state_dict(), model.state_dict(), 0)


@MODES
def test_local(two_ranks, originals: bool) -> None:
    two_ranks.run(case_local, originals=originals)


def case_configs(rank: int, originals: bool) -> None:
    """Only rank 0; on the CPU; in memory of its own, but for weights that are tied."""
    ours, theirs = (trained(kind, rank, use_orig_params=originals) for kind in ("impl", "torch"))
    config = ("FullStateDictConfig", {"rank0_only": True})
    with (
        kept_as("impl", ours, "FULL_STATE_DICT", config),
        kept_as("torch", theirs, "FULL_STATE_DICT", config),
    ):
        state = ours.state_dict()
        assert_same_values(state, theirs.state_dict())
    assert ("embed.weight" in state) == (rank == 0)
    # torch's offloading fails where parameters are on the CPU already
    for kind in ("Full", "Sharded"):
        config = (f"{kind}StateDictConfig", {"offload_to_cpu": True})
        with kept_as("impl", ours, f"{kind.upper()}_STATE_DICT"):
            expected = ours.state_dict()
        with kept_as("impl", ours, f"{kind.upper()}_STATE_DICT", config):
            assert_same_values(ours.state_dict(), expected, 0)
    state = ours.state_dict(keep_vars=True)
    pointers = {value.untyped_storage().data_ptr() for value in state.values()}
    assert len(pointers) == len(state) - 1
    assert state["embed.weight"].data_ptr() == state["head.weight"].data_ptr()
    assert not any(isinstance(v, nn.Parameter) for k, v in state.items() if "ignored" not in k)
    before = {name: value.clone() for name, value in state.items()}
    train(ours, torch.optim.SGD(ours.parameters(), lr=0.1), rank, range(2, 3))
    assert_close(
        {k: v for k, v in state.items() if "weight" in k and "ign" not in k},
        {k: v for k, v in before.items() if "weight" in k and "ign" not in k},
        0,
    )


@MODES
def test_configs(two_ranks, originals: bool) -> None:
    two_ranks.run(case_configs, originals=originals)


def case_precision(rank: int) -> None:
    """Values are of full precision, buffers have their own dtype again."""
    precision = (torch.bfloat16, torch.bfloat16, torch.bfloat16, False, False, True, ())
    ours, theirs = (trained(kind, rank, mixed_precision=precision) for kind in ("impl", "torch"))
    assert ours.module.scale.dtype is torch.bfloat16
    for name in TYPES[:2]:
        with kept_as("impl", ours, name), kept_as("torch", theirs, name):
            state = ours.state_dict()
            assert_same_values(state, theirs.state_dict(), 1e-2)
        assert all(v.dtype is torch.float32 for k, v in state.items() if "num_batches" not in k)
    ours.load_state_dict({**ours.state_dict(), "scale": torch.full((1,), 3.0)})
    assert ours.module.scale.dtype is torch.bfloat16
    assert ours.module.scale.item() == 3


def test_precision(two_ranks) -> None:
    two_ranks.run(case_precision)


def case_moves_only_what_must_move(rank: int) -> None:
    """Sharded values need one all-to-all a unit and no gathering; loading whole values neither."""
    from fsdp_cases import recorded

    model = trained("impl", rank)
    with recorded("impl") as calls, kept_as("impl", model, "SHARDED_STATE_DICT"):
        model.load_state_dict(model.state_dict())
    assert calls == []
    whole = model.state_dict()
    with recorded("impl") as calls:
        model.load_state_dict(whole)
    assert calls == []


def test_moves_only_what_must_move(two_ranks) -> None:
    two_ranks.run(case_moves_only_what_must_move)


# -- loading -------------------------------------------------------------------------------------------------


def case_load(rank: int, originals: bool, mesh: tuple[int, ...] = (), strategy: str = "FULL_SHARD") -> None:
    """What was saved comes back, into another model that then computes the same."""
    arguments = {"use_orig_params": originals, "mesh": mesh, "sharding_strategy": strategy}
    source = trained("impl", rank, **arguments)
    expected = source.state_dict()
    for name in TYPES[:2]:
        for assign in (False, True):
            target = wrapped("impl", seed=1, **arguments)
            with kept_as("impl", source, name), kept_as("impl", target, name):
                answer = target.load_state_dict(source.state_dict(), assign=assign)
                assert not answer.missing_keys
                assert not answer.unexpected_keys
            assert_close(target.state_dict(), expected, 0)
            losses = [train(m, torch.optim.SGD(m.parameters(), lr=0), rank, range(3, 4)) for m in (target,)]
            plain = plain_of(expected)
            assert losses[0] == pytest.approx(
                train(plain, torch.optim.SGD(plain.parameters(), lr=0), rank, range(3, 4)), rel=1e-5
            )


@MODES
def test_load(two_ranks, originals: bool) -> None:
    two_ranks.run(case_load, originals=originals)


def test_load_hybrid(four_ranks) -> None:
    four_ranks.run(case_load, originals=True, mesh=(2, 2), strategy="HYBRID_SHARD")


def case_keys(rank: int, originals: bool) -> None:
    """Missing and unexpected keys, and shapes, are named as the plain model would name them."""
    model = trained("impl", rank, use_orig_params=originals)
    for name in TYPES[:2]:
        with kept_as("impl", model, name):
            state = dict(model.state_dict())
            before = model.state_dict()
            for key in ("blocks.1.up.bias", "norm.weight", "scale", "ignored.bias"):
                del state[key]
            state["blocks.0.other"] = torch.zeros(1)
            answer = model.load_state_dict(state, strict=False)
            assert sorted(answer.missing_keys) == ["blocks.1.up.bias", "ignored.bias", "norm.weight", "scale"]
            assert answer.unexpected_keys == ["blocks.0.other"]
            assert_same_values(model.state_dict(), before, 0)
            with pytest.raises(RuntimeError, match=r"Missing key.*blocks\.1\.up\.bias") as error:
                model.load_state_dict(state)
            assert "_wrapped" not in str(error.value)
            wrong = {**before, "blocks.1.up.bias": torch.zeros(3), "ignored.bias": torch.zeros(4)}
            with pytest.raises(RuntimeError, match=r"size mismatch for blocks\.1\.up\.bias") as error:
                model.load_state_dict(wrong)
            assert "(3,)" in str(error.value)
            assert "(24,)" in str(error.value)
            assert "size mismatch for ignored.bias" in str(error.value)
    train(model, torch.optim.SGD(model.parameters(), lr=0.1), rank, range(1))


@MODES
def test_keys(two_ranks, originals: bool) -> None:
    two_ranks.run(case_keys, originals=originals)


def case_mistakes(rank: int) -> None:
    model = trained("impl", rank)
    whole = model.state_dict()
    with kept_as("impl", model, "SHARDED_STATE_DICT"):
        sharded = model.state_dict()
        model.load_state_dict(whole)  # whole values are fine here too: each rank takes its part
    with pytest.raises(RuntimeError, match=r"'embed\.weight' is a ShardedTensor, but .* FULL_STATE_DICT"):
        model.load_state_dict(sharded)
    with kept_as("impl", model, "LOCAL_STATE_DICT"):
        with pytest.raises(RuntimeError, match=r"Missing key.*_flat_param"):
            model.load_state_dict(whole)
    with pytest.raises(RuntimeError, match=r"(?s)do not agree on what to load.*rank 0 of the group: norm\.b"):
        model.load_state_dict(whole if rank == 0 else {k: v for k, v in whole.items() if k != "norm.bias"})
    with impl.FullyShardedDataParallel.summon_full_params(model):
        assert_close(model.state_dict(), whole, 0)
        changed = {k: v + 1 for k, v in whole.items()}
        model.load_state_dict(changed)
        with kept_as("impl", model, "SHARDED_STATE_DICT"):
            with pytest.raises(RuntimeError, match="summon_full_params"):
                model.state_dict()
    assert_close(model.state_dict(), changed, 0)
    handle = model.module.norm.register_forward_hook(lambda *_: model.state_dict() and None)
    with pytest.raises(AssertionError, match=r"state_dict\(\) was called inside the forward of unit 'root'"):
        train(model, torch.optim.SGD(model.parameters(), lr=0.1), rank, range(1))
    handle.remove()
    train(model, torch.optim.SGD(model.parameters(), lr=0.1), rank, range(1))


def test_mistakes(two_ranks) -> None:
    two_ranks.run(case_mistakes)


def case_other_layouts(rank: int) -> None:
    """DTensors cut in any other way are loaded all the same; ShardedTensors are named."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    from fsdpbench.impl.fsdp1.state_dict.sharded_values import sharded_tensor
    from fsdpbench.impl.runtime.hooks import stage_of

    model, other = trained("impl", rank), wrapped("impl", seed=1)
    whole = model.state_dict()
    mesh = init_device_mesh("cpu", (2,))
    ways = [[Shard(1)], [Replicate()], [Shard(0)]]
    with kept_as("impl", other, "SHARDED_STATE_DICT"):
        other.load_state_dict(
            {
                name: distribute_tensor(value, mesh, ways[number % 3])
                if value.dim() == 2 and "ignored" not in name
                else value
                for number, (name, value) in enumerate(whole.items())
            }
        )
        stage = stage_of(other)
        assert stage is not None
        spans = [(0, 1), (1, 6)]
        odd = sharded_tensor(stage.units[0], torch.zeros(spans[rank][1] - spans[rank][0]), [6], spans)
        with pytest.raises(RuntimeError, match=r"'norm\.weight': .* ShardedTensor is .*should be the rows"):
            other.load_state_dict({**whole, "norm.weight": odd})
    assert_close(other.state_dict(), whole, 0)


def test_other_layouts(two_ranks) -> None:
    two_ranks.run(case_other_layouts)


# -- settings ------------------------------------------------------------------------------------------------


def case_settings(rank: int) -> None:
    model, meshed = wrapped("impl"), wrapped("impl", mesh=(2,))
    sharded = impl.StateDictType.SHARDED_STATE_DICT
    before = FSDP.set_state_dict_type(model, sharded, impl.ShardedStateDictConfig(offload_to_cpu=True))
    assert before == impl.StateDictSettings(
        impl.StateDictType.FULL_STATE_DICT, impl.FullStateDictConfig(), impl.FullOptimStateDictConfig()
    )
    now = FSDP.get_state_dict_type(model)
    assert now.state_dict_config == impl.ShardedStateDictConfig(offload_to_cpu=True)
    assert now.optim_state_dict_config == impl.ShardedOptimStateDictConfig()
    inner = model.module.blocks[0]
    with FSDP.state_dict_type(inner, impl.StateDictType.LOCAL_STATE_DICT):
        assert FSDP.get_state_dict_type(inner).state_dict_type is impl.StateDictType.LOCAL_STATE_DICT
        with pytest.raises(AssertionError, match="different settings"):
            FSDP.get_state_dict_type(model)
    with suppress(KeyError), FSDP.state_dict_type(model, impl.StateDictType.FULL_STATE_DICT):
        raise KeyError("inside")
    assert FSDP.get_state_dict_type(model) == now
    theirs = api_of("torch")
    with FSDP.state_dict_type(model, theirs.StateDictType.FULL_STATE_DICT, theirs.FullStateDictConfig(True)):
        assert FSDP.get_state_dict_type(model).state_dict_config == impl.FullStateDictConfig(True)
    with FSDP.state_dict_type(meshed, sharded):
        assert FSDP.get_state_dict_type(meshed).state_dict_config == impl.ShardedStateDictConfig(
            _use_dtensor=True
        )
    with pytest.raises(RuntimeError, match="LOCAL_STATE_DICT does not go with a device_mesh"):
        FSDP.set_state_dict_type(meshed, impl.StateDictType.LOCAL_STATE_DICT)
    with pytest.raises(RuntimeError, match="needs a mesh"):
        FSDP.set_state_dict_type(model, sharded, impl.ShardedStateDictConfig(_use_dtensor=True))
    with pytest.raises(RuntimeError, match="must be a ShardedStateDictConfig, not a FullStateDictConfig"):
        FSDP.set_state_dict_type(model, sharded, impl.FullStateDictConfig())
    with pytest.raises(ValueError, match="is not a StateDictType; one of FULL_STATE_DICT"):
        FSDP.set_state_dict_type(model, "full")
    with pytest.raises(ValueError, match="no FullyShardedDataParallel in Linear"):
        FSDP.set_state_dict_type(nn.Linear(1, 1), sharded)


def test_settings(two_ranks) -> None:
    two_ranks.run(case_settings)


def case_order_of_keys(rank: int, *, kind: str, **arguments: Any) -> None:
    """What is missing and what is unexpected is named in torch's order, also below a plain module."""
    for seed in range(1, 9):
        found = []
        for side in ("impl", "torch"):
            model = wrapped(side, Parts(checkpointing=seed % 2 == 0), **arguments)
            outer = torch.nn.ModuleDict({"model": model}) if seed > 4 else model
            with kept_as(side, outer, kind):
                draw = random.Random(seed)
                state = outer.state_dict()
                for name in draw.sample(list(state), seed):
                    del state[name]
                extra = (f"{name}.more" for name in draw.sample(list(state), 3))
                entries = [*state.items(), *((name, torch.zeros(2)) for name in extra)]
                draw.shuffle(entries)
                found.append(list(map(list, outer.load_state_dict(dict(entries), strict=False))))
        assert found[0] == found[1], seed


@pytest.mark.plain_cases("flat-FULL")
@pytest.mark.parametrize("kind", ["FULL_STATE_DICT", "SHARDED_STATE_DICT"], ids=["FULL", "SHARDED"])
@pytest.mark.parametrize("originals", [False, True], ids=["flat", "original"])
def test_order_of_missing_and_unexpected_keys(two_ranks, kind: str, originals: bool) -> None:
    two_ranks.run(case_order_of_keys, kind=kind, use_orig_params=originals)
