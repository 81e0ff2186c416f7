"""Programs drawn by hypothesis: simple ones first, so that failures shrink to them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from differential import around
from differential import operations as ops
from differential.outputs import with_outputs
from differential.specs import BlockSpec, Flat, ModelSpec, Program, Sharded
from hypothesis import strategies as st

Draw = Any
Part = list[ops.Operation]


def rarely(value: st.SearchStrategy[Any], default: Any, odds: int = 5) -> st.SearchStrategy[Any]:
    """The default, or once in ``odds`` another value."""
    return st.integers(0, odds - 1).flatmap(lambda n: value if n == odds - 1 else st.just(default))


def one_of(values: list[Any], odds: int = 5) -> st.SearchStrategy[Any]:
    """The first, or once in ``odds`` another one."""
    return rarely(st.sampled_from(values[1:]), values[0], odds)


def flag(odds: int = 5) -> st.SearchStrategy[bool]:
    return rarely(st.just(True), False, odds)


# -- models and wrapping --


@st.composite
def blocks(draw: Draw, flat: bool) -> BlockSpec:
    return BlockSpec(
        wrapped=not draw(flag(5)),
        norm=draw(one_of(["", "layer", "batch"], 3)),
        inner=draw(one_of(["", "plain", "wrapped"], 4)),
        frozen=draw(one_of(["", "bias", "all"], 8)),
        unused=draw(flag(10)),
        branch=draw(flag(6)),
        extra=draw(one_of(["", "float64", "bfloat16"], 24)),
        extension="" if flat else draw(one_of(["", "half", "scaled"], 12)),
        counter=draw(flag(10)),
        checkpoint=draw(one_of(["", "reentrant", "non-reentrant", "wrapper"], 8)),
    )


@st.composite
def models(draw: Draw, flat: bool) -> ModelSpec:
    chosen = tuple(draw(st.lists(blocks(flat), min_size=1, max_size=3)))
    order = st.lists(st.integers(0, len(chosen) - 1), min_size=1, max_size=4).map(tuple)
    return ModelSpec(
        blocks=chosen,
        width=draw(st.sampled_from([4, 8, 3, 5])),
        dtype=draw(one_of(["float32", "float64"], 8)),
        order=draw(rarely(order, (), 8)),
        tied=draw(flag(8)),
        output=draw(one_of(["tensor", "dict", "tuple"], 8)),
    )


def meshes(ranks: int) -> list[tuple[int, ...]]:
    if ranks == 3:
        return [(), (3,), (3,), (1, 3), (3, 1)]
    return [(), (2,), (2,), (1, 2), (1, 2), (2, 1)] if ranks == 2 else [(), (4,), (2, 2)]


LOW = ["bfloat16", "float16"]


@st.composite
def flats(draw: Draw, model: ModelSpec, ranks: int) -> Flat:
    mesh: tuple[int, ...] = draw(one_of(meshes(ranks), 2 if ranks == 4 else 5))
    originals = draw(st.booleans())
    strategies = ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"]
    if len(mesh) == 2:
        strategies = ["HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"]
    precision = st.tuples(st.sampled_from(["bfloat16", ""]), st.sampled_from(["", "float32", "bfloat16"]))
    return Flat(
        strategy=draw(st.sampled_from(strategies)),
        originals=originals,
        precision=draw(
            rarely(st.tuples(precision, st.sampled_from(["", *LOW])).map(lambda p: (*p[0], p[1])), (), 5)
        ),
        keep_low=draw(flag(10)),
        cast_root=not draw(flag(10)),
        backward_prefetch=draw(st.sampled_from(["BACKWARD_PRE", "BACKWARD_POST", ""])),
        forward_prefetch=draw(flag(4)),
        limit=not draw(flag(4)),
        offload=draw(flag(8)),
        mesh=mesh,
        ignored=draw(rarely(st.integers(0, len(model.blocks) - 1), None, 10)),
        sync=draw(flag(40)),
    )


@st.composite
def shardeds(draw: Draw, model: ModelSpec, ranks: int) -> Sharded:
    dtypes = st.tuples(
        st.sampled_from(["bfloat16", ""]),
        st.sampled_from(["", "float32", "bfloat16"]),
        st.sampled_from(["", "float32"]),
    )
    number = st.integers(0, len(model.blocks) - 1)
    return Sharded(
        reshard=draw(st.sampled_from([None, True, False, 2] if ranks == 4 else [None, True, False])),
        precision=draw(rarely(dtypes, (), 5)),
        offload=draw(flag(10)),
        mesh=draw(one_of(meshes(ranks), 2 if ranks == 4 else 5)),
        columns=model.width % 2 == 0 and draw(flag(8)),
        root=not draw(flag(12)),
        grouped=draw(
            rarely(st.lists(number, min_size=2, max_size=3, unique=True).map(sorted).map(tuple), (), 6)
        )
        if len(model.blocks) > 1
        else (),
        ignored=draw(rarely(number, None, 12)),
        forward_prefetch=draw(one_of([0, 1, 2], 6)),
        backward_prefetch=draw(one_of([0, 1, 2], 6)),
    )


# -- operations --


@st.composite
def forwards(draw: Draw, model: ModelSpec, fails: bool = False) -> ops.Forward:
    number = st.integers(0, len(model.blocks) - 1)
    return ops.Forward(
        skip=draw(rarely(st.lists(number, max_size=2, unique=True).map(tuple), (), 6)),
        branch=not draw(flag(6)),
        fail=draw(number) if fails else None,
        input_grad=draw(flag(6)),
    )


@st.composite
def iterations(draw: Draw, model: ModelSpec, flat: bool) -> Part:
    parts: Part = [draw(forwards(model)), ops.Backward()]
    if draw(flag(8)):
        parts.append(ops.Clip(norm=draw(st.sampled_from([2.0, float("inf"), 1.0]))))
    if not draw(flag(8)):
        parts.append(ops.Step())
    if not draw(flag(5)):
        parts.append(ops.ZeroGrad(to_none=not draw(flag(4)), of_model=draw(flag(4))))
    return parts


@st.composite
def accumulations(draw: Draw, model: ModelSpec, flat: bool) -> Part:
    forward = forwards(model)
    inside: Part = [draw(forward), ops.Backward()] * draw(st.integers(1, 2))
    return [
        ops.NoSync(),
        *inside,
        ops.NoSync(on=False),
        draw(forward),
        ops.Backward(),
        ops.Step(),
        ops.ZeroGrad(),
    ]


@st.composite
def evaluations(draw: Draw, model: ModelSpec, flat: bool) -> Part:
    mode = draw(st.sampled_from(["no_grad", "inference", "grad"]))
    return [ops.SetTraining(), ops.Forward(mode=mode), ops.SetTraining(training=True)]


def two_graphs(model: ModelSpec, flat: bool) -> st.SearchStrategy[Part]:
    forward = forwards(model)
    return st.builds(
        lambda a, b, oldest: [a, b, ops.Backward(oldest=oldest), ops.Backward(), ops.Step(), ops.ZeroGrad()],
        forward, forward, st.booleans(),
    )  # fmt: skip


def retained(model: ModelSpec, flat: bool) -> st.SearchStrategy[Part]:
    return forwards(model).map(
        lambda a: [a, ops.Backward(retain=True), ops.Backward(), ops.Step(), ops.ZeroGrad()]
    )


@st.composite
def failures(draw: Draw, model: ModelSpec, flat: bool) -> Part:
    number = st.integers(0, len(model.blocks) - 1)
    if draw(st.booleans()):
        failing: Part = [draw(forwards(model, fails=True))]
    else:
        failing = [draw(forwards(model)), ops.Backward(fail=draw(number))]
    return failing if flat else [*failing, ops.ResetIterState()]


def state_dicts(model: ModelSpec, flat: bool) -> st.SearchStrategy[Part]:
    kinds = ["full", "sharded", "local"] if flat else ["full", "sharded", "plain"]
    saves = st.builds(
        ops.SaveState,
        kind=st.sampled_from(kinds),
        offload=flag(6),
        rank0_only=flag(10) if flat else st.just(False),
    )
    loads = st.builds(ops.LoadState, other=st.booleans(), assign=flag(6), missing=flag(8))
    # torch's loader hands whole states of a subclass to gloo, which reads what is not there.
    whole = not any(block.extension for block in model.blocks)
    save = saves.map(lambda a: [a])
    both = st.tuples(saves, loads).map(list)
    later = st.tuples(saves, forwards(model), st.just(ops.Backward()), st.just(ops.Step()), loads).map(list)
    optimizer = st.builds(
        lambda kind, other: [ops.SaveOptimizer(kind), ops.LoadOptimizer(other)],
        st.sampled_from(["full", "sharded"] if whole else ["sharded"]), st.booleans(),
    )  # fmt: skip
    return st.one_of(save, both, later, optimizer)


SETTINGS: dict[str, list[Any]] = {
    "set_requires_gradient_sync": [False, True],
    "set_requires_all_reduce": [False, True],
    "set_reshard_after_backward": [False, True],
    "set_reshard_after_forward": [False, True],
    "set_is_last_backward": [False, True],
    "set_gradient_divide_factor": [3.0, 1.0],
    "set_unshard_in_backward": [True],
    "set_reduce_scatter_unused_params": [True, False],
    "set_force_sum_reduction_for_comms": [True, False],
}


@st.composite
def settings(draw: Draw, model: ModelSpec) -> ops.Setting:
    name = draw(st.sampled_from(sorted(SETTINGS)))
    block = draw(rarely(st.integers(0, len(model.blocks) - 1), None, 3))
    return ops.Setting(name, draw(st.sampled_from(SETTINGS[name])), block)


def singles(model: ModelSpec, flat: bool, originals: bool) -> st.SearchStrategy[Part]:
    block = st.integers(0, len(model.blocks) - 1)
    where = rarely(block, None, 2)
    # A shape that is wrong on one rank alone, as parts of original parameters are, leaves torch's others
    # waiting.
    hows = ["data", "data_copy", "in_place", "replace", *([] if originals else ["wrong"])]
    choices: list[st.SearchStrategy[Any]] = [
        st.builds(ops.RequireGrad, block, st.sampled_from(["", "bias", "weight"]), st.booleans()),
        st.builds(ops.Write, st.sampled_from(hows), st.integers(0, 7)),
        st.just(ops.MakeOptimizer("Adam")),
        st.builds(ops.OptimizerInBackward, st.booleans()),
        st.builds(ops.Patch, st.booleans()),
        st.builds(ops.Clip, st.sampled_from([2.0, float("inf"), 1.0])),
        st.just(ops.Attributes()),
        st.just(ops.ZeroGrad()),
        st.just(ops.Step()),
    ]
    if flat:
        summon = st.builds(
            ops.Summon, writeback=st.booleans(), rank0_only=flag(4), offload=flag(4), with_grads=flag(3),
            recurse=st.sampled_from([True, True, False]), change=st.booleans(),
        )  # fmt: skip
        choices += [
            summon,
            summon,
            st.just(ops.Apply()),
            st.builds(ops.Misuse, st.sampled_from(FLAT_MISUSES)),
        ]
    else:
        choices += [
            st.builds(ops.Unshard, where, st.booleans()),
            st.builds(ops.Reshard, where),
            settings(model),
            settings(model),
            st.builds(ops.Misuse, st.sampled_from(SHARDED_MISUSES)),
            st.just(ops.Convert()),
            st.just(ops.Copy()),
        ]
    rare = [st.just(ops.RemakeGroups())]  # it costs as much as the rest of a program
    if flat:
        rare.append(st.just(ops.Copy()))
    choices.append(st.one_of(choices[0], *rare))
    return st.one_of(choices).map(lambda operation: [operation])


FLAT_MISUSES = [
    "wrap_again", "wrap_inner_by_policy", "ignored_wrapped", "mixed_originals", "mixed_limit",
    "mesh_without_names", "hybrid_without_groups", "hook_on_inner", "no_sync_on_inner", "clip_on_inner",
    "rank0_with_writeback",
    "ignored_both", "ignored_no_module", "policy_no_callable", "mixed_dtypes", "mixed_requires_grad",
    "scalar",
]  # fmt: skip
SHARDED_MISUSES = [
    "wrap_again", "wrap_container", "wrap_dict", "invalid_dim", "uneven_dim", "scalar", "not_a_module",
    "empty_list", "reshard_number", "mesh_three_dims", "mesh_without_names", "prefetch_plain", "max_buffers",
    "reshard_text", "factor_text", "inner_reset", "custom_without_group", "hook_text",
]  # fmt: skip


@st.composite
def programs(draw: Draw, flat: bool | None = None, ranks: int = 2) -> Program:
    """A program of three to seven parts."""
    if flat is None:
        flat = draw(st.booleans())
    model = draw(models(flat).flatmap(with_outputs))
    if (
        2 * model.width % ranks
    ):  # ranks of torch gather different sizes of an extension's rows, and gloo aborts
        model = replace(model, blocks=tuple(replace(block, extension="") for block in model.blocks))
    wrap = draw(flats(model, ranks) if flat else shardeds(model, ranks))
    iteration = iterations(model, flat)
    single = singles(model, flat, isinstance(wrap, Flat) and wrap.originals)
    # A failure ends a program of FSDP1, so there it comes last.
    rest = [accumulations, evaluations, retained, state_dicts, *([] if flat else [failures, two_graphs])]
    kinds = [iteration, iteration, single, single, *(kind(model, flat) for kind in rest)]
    if flat:  # where torch's second backward fails
        kinds.append(rarely(two_graphs(model, flat), [ops.Attributes()], 5))
    parts = draw(st.lists(st.one_of(kinds), min_size=3, max_size=7))
    if flat or draw(st.booleans()):
        placed = draw(st.integers(0, len(parts)))
        parts.insert(
            placed, draw(around.parts(forwards(model), len(model.blocks), flat, flat and wrap.originals))
        )
    if flat and draw(flag(10)):
        parts.append(draw(failures(model, flat)))
    return Program(model, wrap, tuple(operation for part in parts for operation in part), ranks)
