"""Parameters keep the names that they had first, whatever list they are in later."""

from __future__ import annotations

import random

import pytest
from torch import nn

from fsdpbench.answers.prove.real_runs import merged
from fsdpbench.script.real_ranks.pieces import Names
from fsdpbench.script.real_ranks.watching import StepRecord


def names_of(model: nn.Module, names: Names) -> dict[int, str]:
    """Return the name of each parameter of a model, by identity, and let `names` learn them."""
    paths = [(path, id(each)) for path, each in model.named_parameters(remove_duplicate=False)]
    found = names.of(paths)
    pairs = [(name, identity) for name, (_, identity) in zip(found, paths, strict=True)]
    names.learn(pairs, {id(each): each for each in model.parameters()})
    return {identity: name for name, identity in reversed(pairs)}


def test_blocks_that_leave_and_return_keep_their_names() -> None:
    names, generator = Names(), random.Random(0)
    model = nn.ModuleDict({"blocks": nn.ModuleList(nn.Linear(2, 2) for _ in range(5))})
    blocks, first = list(model["blocks"]), names_of(model, names)
    for _ in range(20):
        model["blocks"] = nn.ModuleList(generator.sample(blocks, generator.randint(1, 5)))
        now = names_of(model, names)
        assert now == {identity: first[identity] for identity in now}


def test_a_block_that_is_added_before_the_others_has_a_name_of_its_own() -> None:
    names, model = Names(), nn.ModuleList([nn.Linear(2, 2)])
    first = names_of(model, names)
    model.insert(0, nn.Linear(2, 2))
    now = names_of(model, names)
    assert len(set(now.values())) == 4
    assert first.items() <= now.items()


def test_tied_weights_keep_both_names_and_replaced_ones_take_the_old() -> None:
    names, model = Names(), nn.ModuleDict({"one": nn.Linear(2, 2), "two": nn.Linear(2, 2)})
    model["two"].weight = model["one"].weight
    paths = [(path, id(each)) for path, each in model.named_parameters(remove_duplicate=False)]
    names_of(model, names)
    assert names.of(paths) == [path for path, _ in paths]
    other = nn.ModuleDict({"one": nn.Linear(2, 2), "two": nn.Linear(2, 2)})
    assert sorted(names_of(other, names).values()) == ["one.bias", "one.weight", "two.bias", "two.weight"]


def test_models_of_equal_names_keep_theirs_in_the_order_of_their_optimizers() -> None:
    models = [nn.Linear(2, 2) for _ in range(3)]
    every = [[(path, id(each)) for path, each in model.named_parameters()] for model in models]
    names, trained = Names(), {id(p): p for model in (models[2], models[0]) for p in model.parameters()}
    for order in ([0, 1, 2], [2, 1, 0], [1, 0, 2]):  # as modules are found in memory
        found = dict(names.of_all([every[index] for index in order], trained))
        of_model = {index: found[order.index(index)] for index in order}
        assert of_model[2] == ["weight", "bias"]
        assert of_model[0] == ["weight (2)", "bias (2)"]
        assert of_model[1] == ["weight (3)", "bias (3)"]


def test_several_models_that_are_not_trained_share_names_as_nothing_orders_them() -> None:
    models = [nn.Linear(2, 2) for _ in range(3)]
    every = [[(path, id(each)) for path, each in model.named_parameters()] for model in models]
    found = dict(Names().of_all(every, {id(p): p for p in models[1].parameters()}))
    assert found[1] == ["weight", "bias"]
    assert found[0] == found[2] == ["weight", "bias"]


def test_a_model_that_holds_another_shares_its_names() -> None:
    inner = nn.Linear(2, 2)
    outer = nn.ModuleDict({"inner": inner, "head": nn.Linear(2, 2)})
    paths = [[(path, id(each)) for path, each in model.named_parameters()] for model in (inner, outer)]
    names, trained = Names(), {id(p): p for p in outer.parameters()}
    for index, found in names.of_all(paths, trained):
        names.learn(
            [(name, identity) for name, (_, identity) in zip(found, paths[index], strict=True)], trained
        )
        assert found[:2] == ["inner.weight", "inner.bias"]


@pytest.mark.parametrize(
    ("sharded", "plain", "found"),
    [
        ("aabb", "ccdd", []),  # the values of settings may differ: their groups count
        ("aaaa", "ccdd", ["0", "1"]),
        ("aaaa", "cddd", ["0"]),
        ("aabb", "cdee", ["0"]),
        ("aabb", "cccc", None),  # names as the wrapper gives them
        ("abab", "ccdd", None),
    ],
)
def test_groups_that_a_wrapper_merges(sharded: str, plain: str, found: list[str] | None) -> None:
    one, other = (
        StepRecord({}, settings={str(place): each for place, each in enumerate(groups)})
        for groups in (sharded, plain)
    )
    assert merged(one, other) == found
