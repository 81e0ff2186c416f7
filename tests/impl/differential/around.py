"""What comes around training in the wrong place or order: calls inside of forward and backward, writes
between them, communication hooks, optimizers that list parameters in another order on each rank, and damaged
states.
"""

from __future__ import annotations

from dataclasses import dataclass

from differential import operations as ops
from hypothesis import strategies as st

Part = list[ops.Operation]
Parts = st.SearchStrategy[Part]


@dataclass(frozen=True, repr=False)
class OrderedOptimizer(ops.Operation):
    """Makes an optimizer that lists parameters backwards on odd ranks."""

    kind: str = "Adam"


@dataclass(frozen=True, repr=False)
class OptimizerOrder(ops.Operation):
    """The order in which the optimizer's state lists parameters; whole, sharded ones are gathered in it."""

    kind: str = "full"


@dataclass(frozen=True, repr=False)
class DamagedOptimizer(ops.Operation):
    """Saves the optimizer's state and loads it with another structure: ``how`` says which."""

    kind: str = "full"
    how: str = "in_a_list"


@dataclass(frozen=True, repr=False)
class Hook(ops.Operation):
    """Registers a communication hook: for sharded units, or for replicas."""

    sharded: bool = True
    block: int | None = None


@dataclass(frozen=True, repr=False)
class CallInside(ops.Operation):
    """A forward and backward, inside of which something is called of the root or of a block."""

    call: str = "summon"
    backward: bool = False
    block: int | None = None


DAMAGES = ("in_a_list", "value_nested", "one_missing", "one_state_missing", "outer_nested", "swapped")
CALLS = ("summon", "apply", "state_dict", "hook")


def written_between(forward: st.SearchStrategy[ops.Forward], flat: bool) -> Parts:
    """Parameters that change between forward and backward."""
    hows = ["in_place", "data_copy", "data"] if flat else ["in_place", "data_copy"]
    write = st.builds(ops.Write, st.sampled_from(hows), st.integers(0, 7))
    return st.tuples(forward, write).map(lambda pair: [*pair, ops.Backward()])


def ordered(forward: st.SearchStrategy[ops.Forward]) -> Parts:
    """A step of an optimizer of another order on each rank, then its state."""
    kind = st.sampled_from(["sharded", "full"])
    return st.tuples(forward, kind).map(
        lambda pair: [OrderedOptimizer(), pair[0], ops.Backward(), ops.Step(), OptimizerOrder(pair[1])]
    )


def parts(forward: st.SearchStrategy[ops.Forward], blocks: int, flat: bool, originals: bool) -> Parts:
    """One of all kinds, each as often."""
    if not flat:
        return written_between(forward, flat)
    where = st.one_of(st.none(), st.integers(0, blocks - 1))
    inside = st.builds(CallInside, st.sampled_from(CALLS), st.booleans(), where)
    # Of original parameters torch refuses sharded states only on ranks with elements; the others wait.
    saved = st.sampled_from(["full"] if originals else ["full", "sharded"])
    damaged = st.builds(DamagedOptimizer, saved, st.sampled_from(DAMAGES))
    hook = st.builds(Hook, st.booleans(), where)
    kinds: list[Parts] = [
        inside.map(lambda one: [one]),
        ordered(forward),
        st.tuples(forward, damaged).map(
            lambda pair: [ops.MakeOptimizer("Adam"), pair[0], ops.Backward(), ops.Step(), pair[1]]
        ),
        st.tuples(hook, forward).map(lambda pair: [*pair, ops.Backward(), ops.Step()]),
        written_between(forward, flat),
    ]
    return st.integers(0, len(kinds) - 1).flatmap(lambda number: kinds[number])
