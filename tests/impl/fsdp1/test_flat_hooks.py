"""Hooks that users register on parameters: on a flat one's gradient, and after accumulation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from flat_programs import Side, attempt, compare
from torch import nn

Hook = Callable[[torch.Tensor], torch.Tensor | None]


def clamped_in_place(gradient: torch.Tensor) -> None:
    gradient.clamp_(-0.01, 0.01)


HOOKS: dict[str, Hook] = {
    "scaled": lambda gradient: gradient * 0.5,
    "clamped": lambda gradient: gradient.clamp(-0.01, 0.01),
    "in place": lambda gradient: clamped_in_place(gradient.detach()),
    "by its norm": lambda gradient: gradient / (gradient.norm() + 1),
    "seen": lambda gradient: None,
}
STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD")
WAYS = ("unused", "frozen", "low")


def train_with_hooks(
    side: Side, *, name: str, unused: bool = False, frozen: bool = False, **how: Any
) -> Iterator[tuple[str, Any]]:
    def prepare(net: Any) -> None:
        net.layers[0].requires_grad_(not frozen)
        net.count = 1 if unused else 2

    if how.pop("low", False):
        how["mixed_precision"] = side.api.MixedPrecision(torch.bfloat16, torch.float32)
    side.build(prepare, **how)
    seen: list[str] = []

    def noted(gradient: torch.Tensor) -> torch.Tensor | None:
        seen.append(f"{tuple(gradient.shape)} {gradient.dtype}")
        return HOOKS[name](gradient)

    handles = [p.register_hook(noted) for p in side.model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(side.model.parameters(), lr=0.1)
    for step in range(3):
        if step == 2:
            handles[0].remove()
        side.loss(step).backward()
        yield f"gradients {step}", side.gradients()
        optimizer.step()
        optimizer.zero_grad()
    yield "calls", str(sorted(seen))
    yield "values", side.whole()


def case_like_torch(rank: int, *, name: str, how: str) -> None:
    if how in STRATEGIES:
        compare(train_with_hooks, rank, False, how, name=name)
    else:
        compare(train_with_hooks, rank, False, name=name, **{how: True})


@pytest.mark.plain_cases("FULL_SHARD-scaled", "unused-by its norm")
@pytest.mark.parametrize("name", HOOKS)
@pytest.mark.parametrize("how", STRATEGIES + WAYS)
def test_of_a_flat_gradient(two_ranks, how: str, name: str) -> None:
    two_ranks.run(case_like_torch, name=name, how=how)


def case_refused_without_sync(rank: int) -> None:
    side = Side("impl", rank, originals=False).build()
    for parameter in side.model.parameters():
        parameter.register_hook(HOOKS["scaled"])
    with side.model.no_sync(), pytest.raises(RuntimeError, match=r"hooks of a flat parameter's gradient"):
        side.loss(0).backward()
    assert attempt(lambda: side.loss(1).backward()) == "done"


def test_not_called_for_parts_of_a_sum(two_ranks) -> None:
    two_ranks.run(case_refused_without_sync)


def case_after_accumulation(rank: int) -> None:
    """Only a rank with elements of a parameter has a gradient for its hook."""
    side = Side("impl", rank, originals=True).build()
    seen: dict[str, int] = {}

    def note(name: str, parameter: nn.Parameter) -> None:
        assert parameter.grad is not None
        seen[name] = parameter.grad.numel()

    named = side.named()
    for name, parameter in named.items():
        parameter.register_post_accumulate_grad_hook(lambda p, name=name: note(name, p))
    side.net.layers[1].requires_grad_(False)
    side.loss(0).backward()
    every: list[Any] = [None] * 2
    dist.all_gather_object(every, seen)
    trained = [name for name in named if not name.startswith("layers.1.")]
    counts = [sum(part.get(name, 0) for part in every) for name in trained]
    assert counts == [dict(side.whole())[name].numel() for name in trained]
    assert not set(seen) - set(trained)


def test_after_accumulation_there_is_a_gradient(two_ranks) -> None:
    two_ranks.run(case_after_accumulation)
