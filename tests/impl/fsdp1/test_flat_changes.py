"""What is done to parameters after wrapping takes effect in ``FullyShardedDataParallel``, as in torch's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from flat_programs import Net, Side, attempt, compare
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward

MODES = (False, True)


def step(side: Side, number: int, optimizer: Any) -> Iterator[tuple[str, Any]]:
    loss = side.loss(number)
    yield f"loss {number}", loss.detach()
    loss.backward()
    yield f"gradients {number}", side.gradients()
    optimizer.step()
    optimizer.zero_grad()
    yield f"parameters {number}", side.whole()


def chosen(side: Side, which: str) -> list[nn.Parameter]:
    """A layer, or one weight in it; with flat parameters there is no weight."""
    return [p for name, p in side.named().items() if name.startswith("layers.0") and which in name]


def freezing(side: Side, which: str) -> Iterator[tuple[str, Any]]:
    side.build()
    optimizer = torch.optim.SGD(side.model.parameters(), lr=0.1)
    yield from step(side, 0, optimizer)
    for number, flag in ((1, False), (2, False), (3, True)):
        for parameter in chosen(side, which):
            parameter.requires_grad_(flag)
        yield from step(side, number, optimizer)


def thawing(side: Side) -> Iterator[tuple[str, Any]]:
    side.build(lambda net: net.layers[0].requires_grad_(False))
    optimizer = torch.optim.SGD(side.model.parameters(), lr=0.1)
    yield from step(side, 0, optimizer)
    side.model.requires_grad_(True)
    yield from step(side, 1, optimizer)
    yield from step(side, 2, optimizer)


def freezing_between(side: Side) -> Iterator[tuple[str, Any]]:
    side.build()
    for number in range(2):
        loss = side.loss(number)
        for parameter in chosen(side, "a.weight"):
            parameter.requires_grad_(False)
        loss.backward()
        yield f"gradients {number}", side.gradients()


def case_freezing(rank: int) -> None:
    for originals in MODES:
        for strategy in ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"):
            compare(freezing, rank, originals, strategy, which="")
        compare(thawing, rank, originals)
    compare(freezing, rank, True, which="a.weight")
    compare(freezing_between, rank, True)


def test_freezing_and_thawing(two_ranks) -> None:
    two_ranks.run(case_freezing)


def change_data(side: Side) -> None:
    for parameter in chosen(side, "a.weight"):
        parameter.data = torch.full_like(parameter, 0.5)


def replace(side: Side) -> None:
    linear = side.net.layers[0].module.a
    linear.weight = nn.Parameter(torch.full_like(linear.weight, 0.5))


def replace_frozen(side: Side) -> None:
    linear = side.net.layers[0].module.a
    linear.weight = nn.Parameter(torch.full_like(linear.weight, 0.5), requires_grad=False)


def replace_in_another_dtype(side: Side) -> None:
    linear = side.net.layers[0].module.a
    linear.weight = nn.Parameter(torch.full_like(linear.weight, 0.5, dtype=torch.float64))


def remove(side: Side) -> None:
    del side.net.layers[0].module.a.weight


def changing(side: Side, change: Callable[[Side], None], early: bool = False) -> Iterator[tuple[str, Any]]:
    side.build()
    if early:
        change(side)
    yield from step(side, 0, torch.optim.SGD(side.model.parameters(), lr=0.1))
    if not early:
        change(side)
    for number in (1, 2):
        yield from step(side, number, torch.optim.SGD(side.model.parameters(), lr=0.1))


def case_changes(rank: int) -> None:
    for change in (change_data, replace):
        for strategy in ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"):
            compare(changing, rank, True, strategy, change=change)
        compare(changing, rank, True, change=change, early=True)
    for change in (replace_frozen, replace_in_another_dtype, remove):
        compare(changing, rank, True, change=change)


def test_new_data_and_new_parameters(two_ranks) -> None:
    two_ranks.run(case_changes)


def wrong_shape(side: Side) -> Iterator[tuple[str, Any]]:
    """Every rank gets as many elements more as it has, so that also torch raises on each."""
    side.build()
    side.loss(0).backward()
    parameter = side.net.enter.weight
    parameter.grad = None
    parameter.data = torch.zeros(2 * parameter.numel())
    yield "forward", attempt(lambda: side.loss(1))


def case_replaced_before_inference(rank: int) -> None:
    """A first forward in inference mode takes up a new parameter, which is trained later."""
    for strategy in ("NO_SHARD", "FULL_SHARD"):
        side = Side("impl", rank, True, strategy)
        side.model = side.wrap(Net())
        layer = side.model.module.enter
        layer.weight = nn.Parameter(layer.weight.detach() * 0.5)
        with torch.inference_mode():
            side.loss(0)
        side.loss(0).backward()
        assert layer.weight.grad is None or layer.weight.grad.abs().sum() > 0


def test_replaced_before_inference(two_ranks) -> None:
    two_ranks.run(case_replaced_before_inference)


def case_misuse(rank: int) -> None:
    compare(wrong_shape, rank, True)
    flat = Side("impl", rank, False).build()
    flat.loss(0).backward()
    flat.net.exit.weight = nn.Parameter(torch.zeros(4, 8))
    with pytest.raises(ValueError, match=r"'exit.weight' was replaced or removed.*summon_full_params"):
        flat.loss(1)
    flat = Side("impl", rank, False).build()
    flat.model._flat_param.data = torch.zeros(3)
    with pytest.raises(AssertionError, match="replaced by 3 elements"):
        flat.loss(0)
    tied: Any = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    tied[1].weight = tied[0].weight
    wrapped = Side("impl", rank, True).wrap(tied)
    wrapped(torch.ones(2, 8)).sum().backward()
    tied[1].weight = nn.Parameter(tied[1].weight.detach().clone())
    with pytest.raises(NotImplementedError, match=r"'0\.weight' is tied"):
        wrapped(torch.ones(2, 8))


def test_what_does_not_fit_is_refused(two_ranks) -> None:
    two_ranks.run(case_misuse)


def case_flat_data_is_kept(rank: int) -> None:
    """torch computes with new data of a flat parameter once, and drops it."""
    side = Side("impl", rank, False).build()
    side.loss(0).backward()
    for parameter in side.model.parameters():
        parameter.data = torch.full_like(parameter, 0.25)
    side.loss(1).backward()
    assert all((value == 0.25).all() for value in side.whole().values())


def case_gathers_follow_what_was_written(rank: int) -> None:
    """A root that stays gathered after forward is gathered again if its shard was written to since."""
    for originals in MODES:
        for strategy in ("FULL_SHARD", "SHARD_GRAD_OP"):
            side = Side("impl", rank, originals, strategy).build()
            for write in ("step", "data"):
                side.loss(0).backward()
                with torch.no_grad():
                    side.loss(1)
                for parameter in side.model.parameters():
                    target = parameter if write == "step" else parameter.data
                    with torch.no_grad():
                        target.mul_(0.5)
                expected = nn_loss(side)
                with torch.no_grad():
                    assert side.loss(1).item() == pytest.approx(expected, rel=1e-6)
            unused = side.loss(1)  # no backward: the root stays gathered
            with torch.no_grad():
                for parameter in side.model.parameters():
                    parameter.mul_(2.0)
            assert side.loss(1).item() != unused.item()
            assert side.loss(1).item() == pytest.approx(nn_loss(side), rel=1e-6)


def nn_loss(side: Side) -> float:
    """The loss of step 1 of the plain model with these parameters."""
    plain = Side("impl", side.rank, True)
    plain.model = type(side.net)()
    plain.model.load_state_dict(side.whole())
    return plain.loss(1).item()


@pytest.mark.parametrize("case", [case_flat_data_is_kept, case_gathers_follow_what_was_written])
def test_better_than_torch(two_ranks, case: Any) -> None:
    two_ranks.run(case)


def stepping_in_backward(side: Side, early: bool) -> Iterator[tuple[str, Any]]:
    def apply(parameters: Any) -> None:
        _apply_optimizer_in_backward(torch.optim.SGD, parameters, {"lr": 0.1, "momentum": 0.9})

    side.build(lambda net: apply(net.parameters()) if early else None)
    if not early:
        apply(side.model.parameters())
    for number in range(4):
        side.net.count = 1 + number % 2
        if number == 2:
            with side.model.no_sync():
                side.loss(number).backward()
        else:
            side.loss(number).backward()
        yield f"gradients {number}", side.gradients()
        yield f"parameters {number}", side.whole()


def refused_in_backward(side: Side) -> Iterator[tuple[str, Any]]:
    side.build()
    _apply_optimizer_in_backward(torch.optim.SGD, side.model.parameters(), {"lr": 0.1})
    yield "flat", attempt(lambda: side.loss(0).backward())


def case_optimizers_in_backward(rank: int) -> None:
    for early in (False, True):
        compare(stepping_in_backward, rank, True, early=early)
    compare(refused_in_backward, rank, False)
    with pytest.raises(RuntimeError, match="optimizer in backward, which would never step"):
        Side("impl", rank, False).build(
            lambda net: _apply_optimizer_in_backward(torch.optim.SGD, net.parameters(), {"lr": 0.1})
        )


def test_optimizers_in_backward(two_ranks) -> None:
    two_ranks.run(case_optimizers_in_backward)
