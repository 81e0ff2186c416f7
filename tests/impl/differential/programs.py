"""Programs drawn by hypothesis: simple ones first, so that failures shrink to them."""

from __future__ import annotations

from typing import Any

from differential import operations as ops
from differential.specs import BlockSpec, Flat, ModelSpec, Program, Sharded
from hypothesis import strategies as st


def rarely(value: st.SearchStrategy[Any], default: Any, odds: int = 5) -> st.SearchStrategy[Any]:
    """The default, or once in ``odds`` another value."""
    return st.integers(0, odds - 1).flatmap(lambda n: value if n == odds - 1 else st.just(default))


def flag(odds: int = 5) -> st.SearchStrategy[bool]:
    return rarely(st.just(True), False, odds)


@st.composite
def blocks(draw: Any, flat: bool) -> BlockSpec:
    return BlockSpec(
        wrapped=not draw(flag(4)),
        norm=draw(rarely(st.sampled_from(["layer", "batch"]), "", 3)),
        inner=draw(rarely(st.sampled_from(["plain", "wrapped"]), "", 4)),
    )


@st.composite
def models(draw: Any, flat: bool) -> ModelSpec:
    chosen = tuple(draw(st.lists(blocks(flat), min_size=1, max_size=3)))
    return ModelSpec(
        blocks=chosen,
        width=draw(st.sampled_from([4, 8, 3, 5])),
        tied=draw(flag(6)),
        output=draw(rarely(st.sampled_from(["dict", "tuple"]), "tensor", 6)),
    )


@st.composite
def flats(draw: Any, model: ModelSpec) -> Flat:
    return Flat(
        strategy=draw(st.sampled_from(["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])),
        originals=draw(st.booleans()),
        backward_prefetch=draw(st.sampled_from(["BACKWARD_PRE", "BACKWARD_POST", ""])),
        forward_prefetch=draw(flag(4)),
        limit=not draw(flag(4)),
    )


@st.composite
def shardeds(draw: Any, model: ModelSpec) -> Sharded:
    return Sharded(reshard=draw(st.sampled_from([None, True, False, 2])))


def iterations(model: ModelSpec) -> st.SearchStrategy[list[ops.Operation]]:
    return st.just([ops.Forward(), ops.Backward(), ops.Step(), ops.ZeroGrad()])


@st.composite
def programs(draw: Any) -> Program:
    flat = draw(st.booleans())
    model = draw(models(flat))
    wrap = draw(flats(model) if flat else shardeds(model))
    parts = draw(st.lists(iterations(model), min_size=1, max_size=4))
    return Program(model, wrap, tuple(operation for part in parts for operation in part))
