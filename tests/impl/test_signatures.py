"""Names and arguments are torch's; ours come after them and are keyword-only."""

from __future__ import annotations

import inspect
from dataclasses import fields
from typing import Any

import pytest
import torch.distributed.fsdp as torch_fsdp
import torch.distributed.fsdp._fully_shard as torch_fsdp_2
import torch.distributed.fsdp.wrap as torch_wrap

from fsdpbench import impl

KEYWORD_ONLY = inspect.Parameter.KEYWORD_ONLY


def assert_extends(ours: Any, theirs: Any) -> None:
    mine = list(inspect.signature(ours).parameters.values())
    for expected, actual in zip(inspect.signature(theirs).parameters.values(), mine, strict=False):
        assert (actual.name, actual.kind) == (expected.name, expected.kind)
    extra = mine[len(inspect.signature(theirs).parameters) :]
    assert all(parameter.kind is KEYWORD_ONLY for parameter in extra), extra


def test_fully_shard() -> None:
    assert_extends(impl.fully_shard, torch_fsdp.fully_shard)


def test_wrapper() -> None:
    ours, theirs = impl.FullyShardedDataParallel, torch_fsdp.FullyShardedDataParallel
    assert_extends(ours.__init__, theirs.__init__)
    for method in (
        "summon_full_params",
        "clip_grad_norm_",
        "no_sync",
        "fsdp_modules",
        "apply",
        "check_is_root",
        "set_state_dict_type",
        "get_state_dict_type",
        "state_dict_type",
        "optim_state_dict",
        "optim_state_dict_to_load",
        "full_optim_state_dict",
        "sharded_optim_state_dict",
        "shard_full_optim_state_dict",
        "flatten_sharded_optim_state_dict",
        "scatter_full_optim_state_dict",
        "rekey_optim_state_dict",
    ):
        assert_extends(getattr(ours, method), getattr(theirs, method))


def public(owner: Any) -> set[str]:
    return {name for name in vars(owner) if not name.startswith("_")}


@pytest.mark.parametrize("method", sorted(public(torch_fsdp.FSDPModule)))
def test_methods_of_a_sharded_module(method: str) -> None:
    assert_extends(getattr(impl.FSDPModule, method), getattr(torch_fsdp.FSDPModule, method))


NEWER_THAN_THE_OLDEST_TORCH = {
    "reset_iter_state",
    "set_reduce_scatter_max_input_buffers",
    "set_reduce_scatter_unused_params",
    "set_separate_reduce_scatter_group",
    "set_symm_mem_for_comm",
}


def test_a_sharded_module_has_no_other_methods() -> None:
    assert public(impl.FSDPModule) - public(torch_fsdp.FSDPModule) <= NEWER_THAN_THE_OLDEST_TORCH


FSDP2 = sorted(set(torch_fsdp_2.__all__) - {"FSDPModule"})


@pytest.mark.parametrize("name", FSDP2)
def test_everything_of_fsdp2(name: str) -> None:
    """Functions, classes with their constructors and public methods, under the names of torch's module."""
    assert name in impl.__all__
    ours, theirs = getattr(impl, name), getattr(torch_fsdp_2, name)
    assert_extends(ours, theirs)
    for method in public(theirs) if isinstance(theirs, type) else ():
        assert hasattr(ours, method)
        if callable(getattr(theirs, method)):
            assert_extends(getattr(ours, method), getattr(theirs, method))


@pytest.mark.parametrize(
    "name", ["ShardingStrategy", "BackwardPrefetch", "StateDictType", "OptimStateKeyType"]
)
def test_enums(name: str) -> None:
    assert list(getattr(impl, name).__members__) == list(getattr(torch_fsdp, name).__members__)


@pytest.mark.parametrize(
    "name",
    [
        "MixedPrecision",
        "MixedPrecisionPolicy",
        "CPUOffload",
        "CPUOffloadPolicy",
        "StateDictConfig",
        "FullStateDictConfig",
        "LocalStateDictConfig",
        "ShardedStateDictConfig",
        "OptimStateDictConfig",
        "FullOptimStateDictConfig",
        "LocalOptimStateDictConfig",
        "ShardedOptimStateDictConfig",
    ],
)
def test_settings(name: str) -> None:
    ours, theirs = getattr(impl, name), getattr(torch_fsdp, name)
    assert [f.name for f in fields(ours)] == [f.name for f in fields(theirs)]
    made = ours()
    assert all(getattr(made, f.name) == getattr(theirs(), f.name) for f in fields(theirs))


@pytest.mark.parametrize(
    "name", ["size_based_auto_wrap_policy", "lambda_auto_wrap_policy", "transformer_auto_wrap_policy", "wrap"]
)
def test_wrap_policies(name: str) -> None:
    assert_extends(getattr(impl, name), getattr(torch_wrap, name))
