"""No two streams use the same memory unordered: training of all kinds under the sanitizer."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from race_cases import (
    LOW,
    Program,
    accumulate,
    accumulate_without_communication,
    backward_twice,
    checkpointed,
    clip_and_save,
    follow,
    optimizer_in_backward,
    sharded,
    unshard_after_the_optimizer,
    with_hooks,
    wrapped,
    write_between,
)

from fsdpbench import impl

Case = tuple[Program, Callable[..., Any], dict[str, Any]]

CASES: list[Case] = [
    (unshard_after_the_optimizer, sharded, {}),
    (unshard_after_the_optimizer, sharded, {"policy": LOW}),
    (unshard_after_the_optimizer, sharded, {"offload": True}),
    (unshard_after_the_optimizer, sharded, {"layout": "grouped"}),
    (accumulate_without_communication, sharded, {"layout": "grouped", "mesh": (2, 4), "policy": LOW}),
    (write_between, sharded, {"layout": "grouped", "memory_handover": "record_stream"}),
    (optimizer_in_backward, sharded, {"layout": "grouped", "policy": (torch.bfloat16, torch.bfloat16)}),
    (backward_twice, sharded, {"policy": LOW}),
    (write_between, sharded, {}),
    (write_between, sharded, {"offload": True}),
    (write_between, sharded, {"reshard_after_forward": 2}),
    (accumulate, sharded, {"mesh": (2, 4)}),
    (accumulate, sharded, {"mesh": (2, 4), "policy": LOW, "memory_handover": "record_stream"}),
    (optimizer_in_backward, sharded, {"mesh": (2, 4), "policy": LOW}),
    (accumulate, wrapped, {}),
    (accumulate, wrapped, {"memory_handover": "events"}),
    (accumulate_without_communication, sharded, {"mesh": (2, 4), "policy": LOW}),
    (accumulate_without_communication, wrapped, {"sharding_strategy": impl.ShardingStrategy.SHARD_GRAD_OP}),
    (clip_and_save, sharded, {"policy": LOW}),
    (clip_and_save, wrapped, {}),
    (with_hooks, sharded, {}),
    (with_hooks, wrapped, {"use_orig_params": True}),
    (checkpointed, sharded, {"policy": LOW}),
    (checkpointed, wrapped, {}),
]


def case_nothing_races(rank: int) -> None:
    for program, build, arguments in (*CASES, *list(sharded_combinations())[:: 720 // 12]):
        races, seen = follow(program, build, arguments)
        assert not races, f"{program.__name__} {build.__name__} {arguments}: {races}"
        assert seen > 50


def test_nothing_races(lone_process) -> None:
    """Thirty representative trainings; the campaigns try all combinations."""
    lone_process.run(case_nothing_races, timeout=120)


MESHES: list[dict[str, Any]] = [
    {},
    {"mesh": (2, 4)},
    {"reshard_after_forward": 2},
    {"reshard_after_forward": False},
]
MEMORY: list[dict[str, Any]] = [{}, {"memory_handover": "record_stream"}, {"offload": True}]
PREFETCH: list[dict[str, Any]] = [
    {},
    {"forward_prefetch_depth": 2, "backward_prefetch_depth": 2},
    {"backward_prefetch": "post"},
    {"backward_prefetch": None, "limit_all_gathers": 1},
]
POLICIES: list[dict[str, Any]] = [{}, {"policy": LOW}, {"policy": (torch.bfloat16, torch.bfloat16)}]
PROGRAMS = [accumulate, unshard_after_the_optimizer, backward_twice, write_between, optimizer_in_backward]


STRATEGIES: list[dict[str, Any]] = [
    {},
    {"sharding_strategy": impl.ShardingStrategy.SHARD_GRAD_OP},
    {"sharding_strategy": impl.ShardingStrategy.NO_SHARD},
    {"sharding_strategy": impl.ShardingStrategy.HYBRID_SHARD, "mesh": (2, 4)},
    {"sharding_strategy": impl.ShardingStrategy._HYBRID_SHARD_ZERO2, "mesh": (2, 4)},
]
FLAT_MEMORY: list[dict[str, Any]] = [
    {},
    {"memory_handover": "events"},
    {"use_orig_params": True},
    {"offload": True},
]
FLAT_PREFETCH: list[dict[str, Any]] = [
    {},
    {"forward_prefetch": True, "backward_prefetch": impl.BackwardPrefetch.BACKWARD_POST},
    {"backward_prefetch": None, "limit_all_gathers": False},
]
ALL_PROGRAMS = [accumulate, accumulate_without_communication, clip_and_save, with_hooks, checkpointed]


def sharded_combinations() -> Iterator[Case]:
    for parts in itertools.product(PROGRAMS, MESHES, MEMORY, PREFETCH, POLICIES):
        yield parts[0], sharded, {key: value for part in parts[1:] for key, value in part.items()}


def further_combinations() -> Iterator[Case]:
    """The other programs, and the other front end."""
    for parts in itertools.product(ALL_PROGRAMS[1:], MESHES, MEMORY, PREFETCH[:2], POLICIES[:2]):
        yield parts[0], sharded, {key: value for part in parts[1:] for key, value in part.items()}
    for parts in itertools.product(ALL_PROGRAMS, STRATEGIES, FLAT_MEMORY, FLAT_PREFETCH, POLICIES[:2]):
        arguments = {key: value for part in parts[1:] for key, value in part.items()}
        if arguments.get("offload") and parts[0] is accumulate_without_communication:
            continue  # refused: gradients of a shard on the host are not accumulated without communication
        yield parts[0], wrapped, arguments


def case_grouped_combinations(rank: int, *, offset: int) -> tuple[int, list[str]]:
    tried, failed = 0, []
    for program, build, arguments in [*sharded_combinations()][offset::3]:
        races, _ = follow(program, build, {**arguments, "layout": "grouped"})
        tried += 1
        if races:
            failed.append(f"{program.__name__} {arguments}: {races[0]}")
    return tried, failed


@pytest.mark.campaign
@pytest.mark.parametrize("offset", [0, 1, 2])
def test_every_combination_with_grouped_collectives(lone_process, offset: int) -> None:
    tried, failed = lone_process.run(case_grouped_combinations, timeout=3000, offset=offset)
    assert not failed, f"{len(failed)} of {tried}\n" + "\n".join(failed[:20])
    assert tried == 240


def case_combinations(rank: int, *, further: bool) -> tuple[int, int, list[str]]:
    tried, uses, failed = 0, 0, []
    for program, build, arguments in further_combinations() if further else sharded_combinations():
        races, seen = follow(program, build, arguments)
        tried, uses = tried + 1, uses + seen
        if races:
            failed.append(f"{program.__name__} {build.__name__} {arguments}: {races[0]}")
    return tried, uses, failed


@pytest.mark.campaign
@pytest.mark.parametrize("further", [False, True])
def test_every_combination(lone_process, further: bool) -> None:
    tried, uses, failed = lone_process.run(case_combinations, timeout=3000, further=further)
    print(f"{tried} combinations, {uses} uses of memory followed, {len(failed)} with races")
    assert not failed, f"{len(failed)} of {tried}\n" + "\n".join(failed[:20])
    assert tried >= 720 if not further else tried >= 700
