"""Parameters keep the names that they had first, whatever list they are in later."""

from __future__ import annotations

import random

from torch import nn

from fsdpbench.script.real_ranks.pieces import Names


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
