"""A weight that two modules share is one parameter, also where it is materialised module by module."""

from __future__ import annotations

import weakref

import torch
from torch import nn

from fsdpbench.systems.wrapping import materialise, materialiser


def test_shared_parameters_stay_one_when_materialised() -> None:
    with torch.device("meta"):
        model = nn.ModuleDict({"embedding": nn.Embedding(6, 4), "head": nn.Linear(4, 6, bias=False)})
        model["other"] = nn.Linear(4, 6, bias=False)
        model["head"].weight = model["embedding"].weight
    materialise_own = materialiser(torch.device("cpu"))
    for module in model.modules():
        materialise_own(module)
    assert model["head"].weight is model["embedding"].weight
    assert model["other"].weight is not model["head"].weight
    assert {parameter.device.type for parameter in model.parameters()} == {"cpu"}


def test_so_they_do_when_materialised_at_once() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Embedding(6, 4), nn.Linear(4, 6, bias=False), nn.Linear(4, 6))
        model[1].weight = model[0].weight
    materialise(model, torch.device("cpu"), with_weights=True)
    assert model[1].weight is model[0].weight
    assert [parameter.device.type for parameter in model.parameters()] == ["cpu"] * 3


def test_what_was_materialised_is_held_by_its_module_alone() -> None:
    module = nn.Linear(4, 6, device="meta")
    materialiser(torch.device("cpu"))(module)
    weight = weakref.ref(module.weight)
    del module
    assert weight() is None
