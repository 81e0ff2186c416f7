"""What a block returns, and what its caller does to it in place: drawn for each model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from differential.specs import BlockSpec, ModelSpec
from hypothesis import strategies as st


@dataclass
class Data:
    hidden: torch.Tensor


class Box:
    """An object that torch's tree of containers does not know."""

    def __init__(self, hidden: torch.Tensor) -> None:
        self.hidden = hidden


RETURNS: dict[str, tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]] = {
    "": (lambda y: y, lambda out: out),
    "view": (lambda y: y.view(2, -1, y.shape[-1]), lambda out: out),
    "two views": (lambda y: (y.view(-1, y.shape[-1]), y[:1]), lambda out: out[0]),
    "split": (lambda y: y.split(2), torch.cat),
    "twice": (lambda y: [y, {"y": y}], lambda out: out[0] * out[1]["y"]),
    "dataclass": (Data, lambda out: out.hidden),
    "object": (Box, lambda out: out.hidden),
}
"""By name: what is returned of the result, and how its caller gets a tensor out of that."""

UNKNOWN = {"object", "dataclass"}
VIEWS = {"view", "two views", "split"}

CALLERS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "": lambda x: x,
    "add_": lambda x: x.add_(1.5),
    "half": lambda x: x[:1].mul_(3.0) is None or x,
    "detach_": lambda x: x if x._base is not None else x.detach_(),
    "no_grad": lambda x: torch.no_grad()(x.mul)(1.0) + x,
}


def returned(block: BlockSpec, y: torch.Tensor) -> Any:
    """What a block returns of its result."""
    return RETURNS[block.returns][0](y)


def received(model: ModelSpec, block: BlockSpec, output: Any, like: torch.Tensor) -> torch.Tensor:
    """What the model goes on with, of the shape of the block's input."""
    return CALLERS[model.caller](RETURNS[block.returns][1](output)).view(like.shape)


def with_outputs(model: ModelSpec) -> st.SearchStrategy[ModelSpec]:
    """The model, every fourth with other outputs; a checkpoint takes none but tensors."""

    def give(drawn: tuple[list[str], str]) -> ModelSpec:
        names, caller = drawn
        blocks = tuple(
            replace(block, returns="" if block.checkpoint else name)
            for block, name in zip(model.blocks, names, strict=True)
        )
        return replace(model, blocks=blocks, caller=caller)

    names = st.lists(st.sampled_from(list(RETURNS)), min_size=len(model.blocks), max_size=len(model.blocks))
    other = st.tuples(names, st.sampled_from(list(CALLERS))).map(give)
    return st.integers(0, 3).flatmap(lambda n: other if n == 3 else st.just(model))
