"""The order in which collectives are issued, read from the labels in a profiler's trace."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fsdp_cases import Model, loss_of, shard_model, tokens_of, wrap_model
from torch.distributed.device_mesh import init_device_mesh
from torch.profiler import ProfilerActivity, profile

FORWARD = ["G root", "G 0", "G 1", "G 2", "G 3"]
BACKWARD = {
    "pre": ["G 3", "G 2", "R 3", "G 1", "R 2", "G 0", "R 1", "R 0", "R root"],
    "post": ["G 3", "G 2", "R 3", "G 1", "R 2", "G 0", "R 1", "R 0", "R root"],
    "none": ["G 3", "R 3", "G 2", "R 2", "G 1", "R 1", "G 0", "R 0", "R root"],
    "two ahead": ["G 3", "G 2", "G 1", "R 3", "G 0", "R 2", "R 1", "R 0", "R root"],
}
KINDS = {"all_gather": "G", "reduce_scatter": "R"}


def issued(model: Any, rank: int, steps: int = 2) -> list[str]:
    """Labels of the collectives of the last step, in order of issue, as ``G 0`` or ``R root``."""
    for step in range(steps - 1):
        loss_of(model, tokens_of(rank, step)).backward()
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        loss_of(model, tokens_of(rank, steps)).backward()
    found = []
    for event in sorted(profiler.events(), key=lambda e: e.time_range.start):
        if event.name.startswith("FSDP::"):
            kind, unit = event.name.removeprefix("FSDP::").rstrip(")").split(" (")
            if kind in KINDS:
                found.append(f"{KINDS[kind]} {unit.removeprefix('blocks.')}")
    return found


def build(front: str, **settings: Any) -> Any:
    if front == "fully_shard":
        return shard_model("impl", Model(), mesh=init_device_mesh("cpu", (2,)), **settings)
    prefetch = {"pre": "BACKWARD_PRE", "post": "BACKWARD_POST", None: None}[
        settings.pop("backward_prefetch", "pre")
    ]
    return wrap_model("impl", Model(), prefetch=prefetch, **settings)


def case_order(rank: int, *, front: str, settings: dict[str, Any], expected: list[str]) -> None:
    found = issued(build(front, **settings), rank)
    assert found == expected, found


FRONTS = pytest.mark.parametrize("front", ["fully_shard", "flat"])


@pytest.mark.plain_cases("pre-", "two ahead")
@FRONTS
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("pre", {}),
        ("post", {"backward_prefetch": "post"}),
        ("none", {"backward_prefetch": None}),
        ("none", {"backward_prefetch_depth": 0}),
        ("two ahead", {"backward_prefetch_depth": 2}),
    ],
)
def test_backward(two_ranks, front: str, name: str, settings: dict[str, Any]) -> None:
    two_ranks.run(case_order, front=front, settings=settings, expected=FORWARD + BACKWARD[name])


@pytest.mark.plain_cases("2-")
@FRONTS
@pytest.mark.parametrize("depth", [1, 2, 9])
def test_forward_prefetch_gathers_each_unit_once_and_in_order(two_ranks, front: str, depth: int) -> None:
    settings = {"forward_prefetch_depth": depth}
    two_ranks.run(case_order, front=front, settings=settings, expected=FORWARD + BACKWARD["pre"])


def case_gathered_ahead(rank: int, *, depth: int | None) -> None:
    """When a block's forward starts, its own and the next ``depth`` blocks' gathers were issued; without a
    depth the CPU, which waits for its own, issues one.
    """
    from fsdpbench.impl.runtime.hooks import stage_of
    from fsdpbench.impl.runtime.unit import UnitState

    model = build("fully_shard", forward_prefetch_depth=depth)
    loss_of(model, tokens_of(rank, 0)).backward()
    ahead: list[int] = []

    def look(*_: Any) -> None:
        stages = [stage_of(block) for block in model.blocks]
        ahead.append(sum(stage.units[0].state is not UnitState.SHARDED for stage in stages))

    for block in model.blocks:
        block.norm.register_forward_pre_hook(look)
    model(tokens_of(rank, 1))
    assert ahead == [min(1 + (1 if depth is None else depth), 4 - index) for index in range(4)]


@pytest.mark.parametrize("depth", [0, 1, 2, None])
def test_forward_prefetch_is_as_deep_as_asked(two_ranks, depth: int | None) -> None:
    two_ranks.run(case_gathered_ahead, depth=depth)


def case_skipped(rank: int, *, front: str) -> None:
    """A block that a forward skips: what was gathered ahead for it is given back, and its next is right."""
    from fsdpbench.impl.runtime.hooks import stage_of
    from fsdpbench.impl.runtime.unit import UnitState

    model = build(front)
    inner = model.module if front == "flat" else model
    blocks = inner.blocks
    skipped = stage_of(blocks[2])
    whole = model(tokens_of(rank, 0)).sum()
    whole.backward()
    inner.blocks = blocks[:2] + blocks[3:]
    states: list[UnitState] = []
    blocks[1].norm.register_forward_pre_hook(lambda *_: states.append(skipped.units[0].state))
    shorter = model(tokens_of(rank, 0)).sum()
    states.append(skipped.units[0].state)
    assert states == [UnitState.GATHERING, UnitState.SHARDED]
    shorter.backward()
    inner.blocks = blocks
    assert torch.equal(model(tokens_of(rank, 0)).sum(), whole)


@FRONTS
def test_what_a_forward_skips_is_not_kept(two_ranks, front: str) -> None:
    two_ranks.run(case_skipped, front=front)


def case_explicit_targets(rank: int) -> None:
    """Modules named by the user are gathered ahead instead of those the order would name."""
    model = build("fully_shard")
    blocks = list(model.blocks)
    for index, block in enumerate(blocks):
        block.set_modules_to_forward_prefetch(blocks[index + 1 : index + 3])
        block.set_modules_to_backward_prefetch(blocks[max(0, index - 2) : index][::-1])
    found = issued(model, rank)
    assert found == FORWARD + BACKWARD["two ahead"], found


def test_explicit_targets(two_ranks) -> None:
    two_ranks.run(case_explicit_targets)


def case_skipped_targets(rank: int) -> None:
    """A module named for backward that this forward skips, and that was written to since its last one."""
    model = build("fully_shard")
    blocks = model.blocks
    blocks[2].set_modules_to_backward_prefetch([blocks[1]])
    loss_of(model, tokens_of(rank, 0)).backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)
    model.blocks = torch.nn.ModuleList([blocks[0], *blocks[2:]])
    model(tokens_of(rank, 0)).sum().backward()


def test_a_skipped_target_is_not_gathered(two_ranks) -> None:
    two_ranks.run(case_skipped_targets)


def case_labels(rank: int) -> None:
    model = build("flat")
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        loss_of(model, tokens_of(rank, 0)).backward()
    names = {event.name for event in profiler.events() if event.name.startswith("FSDP::")}
    events = ("all_gather", "wait_all_gather", "reshard", "reduce_scatter")
    hooks = ("pre_forward", "post_forward", "pre_backward", "post_backward")
    assert {f"FSDP::{event} (blocks.0)" for event in (*events, *hooks)} <= names
    assert {f"FSDP::{event} (root)" for event in (*events, *hooks)} <= names


def test_labels_name_event_and_unit(two_ranks) -> None:
    two_ranks.run(case_labels)


def case_labels_are_free(rank: int) -> None:
    """Without a profiler no label is ever handed to torch."""
    import torch

    model = build("fully_shard")
    original = torch.profiler.record_function

    def fail(*_: Any) -> None:
        raise AssertionError("a label without a profiler")

    torch.profiler.record_function = fail  # type: ignore[assignment,misc]
    try:
        loss_of(model, tokens_of(rank, 0)).backward()
    finally:
        torch.profiler.record_function = original  # type: ignore[misc]


def test_labels_are_free_without_a_profiler(two_ranks) -> None:
    two_ranks.run(case_labels_are_free)
