"""Which modules the policies choose, against torch's where torch has the same."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from fsdp_cases import Block, Model, wrap_model
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFsdp
from torch.distributed.fsdp import wrap as torch_wrap

from fsdpbench import impl


def names_of(model: nn.Module, chosen: Any) -> list[str]:
    names = {module: name for name, module in model.named_modules()}
    return [names[module] for module in chosen]


def test_classes() -> None:
    model = Model(blocks=3)
    chosen = impl.select_modules(model, impl.ModuleWrapPolicy({Block, nn.Embedding}))
    assert names_of(model, chosen) == ["embed", "blocks.0", "blocks.1", "blocks.2"]


def test_classes_of_transformer_policy_are_the_same() -> None:
    model = Model(blocks=3)
    policy = functools.partial(impl.transformer_auto_wrap_policy, transformer_layer_cls={Block})
    chosen = impl.select_modules(model, policy)
    assert names_of(model, chosen) == ["blocks.0", "blocks.1", "blocks.2"]


def test_every_kth() -> None:
    model = Model(blocks=5)
    chosen = impl.select_modules(model, impl.EveryKthPolicy({Block}, 2))
    assert names_of(model, chosen) == ["blocks.0", "blocks.2", "blocks.4"]


def test_root_only_is_no_policy_or_one_that_wants_nothing() -> None:
    assert impl.select_modules(Model(), impl.CustomPolicy(lambda module: False)) == {}


def test_custom_policy_gives_arguments_of_its_own() -> None:
    model = Model(blocks=2)
    special = model.blocks[1]
    policy = impl.CustomPolicy(lambda m: {"limit_all_gathers": 3} if m is special else isinstance(m, Block))
    assert list(impl.select_modules(model, policy).values()) == [{}, {"limit_all_gathers": 3}]


def test_ignored_modules_are_not_entered() -> None:
    model = Model(blocks=2)
    ignored = set(model.blocks[0].modules())
    chosen = impl.select_modules(model, impl.ModuleWrapPolicy({Block, nn.Linear}), ignored)
    assert names_of(model, chosen) == ["blocks.1.up", "blocks.1.down", "blocks.1", "head"]


def case_like_torch(rank: int, *, least: int | None) -> None:
    """Function policies through the whole wrapper: the same modules are wrapped."""
    found = []
    for kind, owner in (("torch", torch_wrap), ("impl", impl)):
        if least is None:
            policy: Any = owner.always_wrap_policy
        else:
            policy = functools.partial(owner.size_based_auto_wrap_policy, min_num_params=least)
        model = wrap_model(kind, Model(blocks=2), blocks=False, auto_wrap_policy=policy)
        wrapper: Any = TorchFsdp if kind == "torch" else impl.FullyShardedDataParallel
        found.append(
            sorted(
                name.replace("_fsdp_wrapped_module", "").replace("..", ".").strip(".")
                for name, module in model.named_modules()
                if isinstance(module, wrapper)
            )
        )
    assert found[0] == found[1]


@pytest.mark.parametrize("least", [500, 1000, 1500, None])
def test_function_policies_choose_what_torch_chooses(one_rank, least: int | None) -> None:
    one_rank.run(case_like_torch, least=least)


@pytest.mark.parametrize("k", [0, True, 1.5])
def test_k_must_be_a_count(k: Any) -> None:
    with pytest.raises(ValueError, match="k of 1 or more"):
        impl.EveryKthPolicy({Block}, k)


def test_a_policy_of_classes_needs_classes() -> None:
    with pytest.raises(ValueError, match="at least one module class"):
        impl.ModuleWrapPolicy([])


def test_a_custom_policy_must_answer_plainly() -> None:
    with pytest.raises(ValueError, match="must return True, False"):
        impl.select_modules(Model(), impl.CustomPolicy(lambda module: 1))  # type: ignore[arg-type,return-value]


def case_wrap_by_hand(rank: int) -> None:
    cpu = torch.device("cpu")
    plain = nn.Linear(2, 2)
    assert impl.wrap(plain) is plain
    with impl.enable_wrap(wrapper_cls=impl.FullyShardedDataParallel, device_id=cpu, use_orig_params=True):
        wrapped: Any = impl.wrap(plain, use_orig_params=False)
    assert isinstance(wrapped, impl.FullyShardedDataParallel)
    assert [name for name, _ in wrapped.named_parameters()] == ["_fsdp_wrapped_module._flat_param"]


def test_wrap_by_hand(one_rank) -> None:
    one_rank.run(case_wrap_by_hand)
