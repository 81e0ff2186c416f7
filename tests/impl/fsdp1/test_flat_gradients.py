"""What ``.grad`` shows in ``FullyShardedDataParallel``, and when: as in torch's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from flat_programs import Side, attempt, compare


def accumulating(side: Side, zero: str = "", **arguments: Any) -> Iterator[tuple[str, Any]]:
    """Two passes that reduce, two that do not, one that does; ``zero``: when gradients change and how."""
    side.build(**arguments)
    objects = {id(parameter) for parameter in side.model.parameters()}
    for number, reduces in enumerate((True, True, False, False, True)):
        if zero == "reduced" and number == 2:
            side.model.zero_grad()
        if zero == "in place" and number == 4:
            side.model.zero_grad(set_to_none=False)
        if zero == "scaled" and number == 4:
            for parameter in side.model.parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(0.5)
        with nullcontext() if reduces else side.model.no_sync():
            loss = side.loss(number)
            between = side.gradients()
            if side.strategy.name != "SHARD_GRAD_OP" or not side.originals:
                yield f"between forward and backward {number}", between
                yield f"same objects {number}", {id(p) for p in side.model.parameters()} == objects
            loss.backward()
            yield f"after backward {number}", side.gradients()
    yield "parameters", side.whole()


def case_accumulating(rank: int) -> None:
    for originals in (False, True):
        for strategy in ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"):
            for zero in ("", "reduced", "in place", "scaled"):
                compare(accumulating, rank, originals, strategy, zero=zero)


def case_low_precision(rank: int) -> None:
    for originals in (False, True):
        for reduce in (None, torch.float32):
            compare(accumulating, rank, originals, mixed_precision=MixedPrecisionOf(torch.bfloat16, reduce))


class MixedPrecisionOf:
    """Arguments that both sides understand."""

    def __new__(cls, *dtypes: torch.dtype | None) -> Any:
        from torch.distributed.fsdp import MixedPrecision

        return MixedPrecision(*dtypes)


def case_zeroed_for_good(rank: int) -> None:
    """``zero_grad()`` after ``no_sync()`` drops all: torch keeps what was reduced before it."""
    for originals in (False, True):
        side = Side("impl", rank, originals).build()
        side.loss(0).backward()
        with side.model.no_sync():
            side.loss(1).backward()
        side.model.zero_grad()
        side.loss(2).backward()
        found = side.gradients()
        side.model.zero_grad()
        side.loss(2).backward()
        assert str(found) == str(side.gradients())


@pytest.mark.parametrize("case", [case_accumulating, case_low_precision, case_zeroed_for_good])
def test_accumulation(two_ranks, case: Any) -> None:
    two_ranks.run(case)


def summoning(side: Side) -> Iterator[tuple[str, Any]]:
    summon = side.api.FullyShardedDataParallel.summon_full_params
    side.build()
    with summon(side.model, with_grads=True):
        yield "none", side.gradients()
    side.net.count = 1
    side.loss(0).backward()
    with summon(side.model, with_grads=True):
        yield "one layer has none", side.gradients()
        for parameter in side.model.parameters():
            if parameter.grad is not None:
                parameter.grad.fill_(2.0)
    yield "changed", side.gradients()
    with summon(side.model, with_grads=True, writeback=False):
        for parameter in side.model.parameters():
            if parameter.grad is not None:
                parameter.grad.fill_(3.0)
    with summon(side.model):
        side.model.zero_grad()
    yield "dropped", side.gradients()
    with side.model.no_sync():
        side.loss(1).backward()
    yield "unreduced", attempt(lambda: summon(side.model, with_grads=True).__enter__())


def case_summoning(rank: int) -> None:
    compare(summoning, rank, True)


def test_summoned_gradients(two_ranks) -> None:
    two_ranks.run(case_summoning)
