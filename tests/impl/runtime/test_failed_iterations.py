"""What an exception in forward or backward does to gradients that were accumulated before it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from failing_cases import BrokenError, Fuse, gradients_of
from fsdp_cases import ACCUMULATION, Model, loss_of, shard_model, tokens_of, wrap_model
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch_version import BEFORE_2_13


def built(front: str, side: str = "impl") -> tuple[Any, Any, Any]:
    """The model, what is inside of its wrapper, and its way of accumulating."""
    torch.manual_seed(0)
    if front == "fully_shard":
        model: Any = shard_model(side, Model(blocks=3), mesh=init_device_mesh("cpu", (2,)))
        return model, model, ACCUMULATION["last_reduces"]
    model = wrap_model(side, Model(blocks=3), use_orig_params=front == "original")
    return model, model.module, ACCUMULATION["no_sync"]


def fail_at(inner: nn.Module, where: str) -> Any:
    def fail(*arguments: Any) -> torch.Tensor:
        if where == "forward":
            raise BrokenError
        return Fuse.apply(arguments[-1])

    return inner.blocks[1].norm.register_forward_hook(fail)


def accumulated(
    front: str, side: str, rank: int, *, fails: bool, by_hand: bool = False
) -> list[torch.Tensor]:
    """Gradients of a pass without communication, perhaps one that fails in forward, and one that reduces."""
    model, inner, accumulate = built(front, side)
    with accumulate(model, False):
        loss_of(model, tokens_of(rank, 1)).backward()
    if fails:
        handle = fail_at(inner, "forward")
        with pytest.raises(BrokenError):
            loss_of(model, tokens_of(rank, 2))
        handle.remove()
        if by_hand:
            model.reset_iter_state()
    with accumulate(model, True):
        return gradients_of(model, rank)[1]


def case_a_failed_forward_keeps_them(rank: int, *, front: str) -> None:
    expected = accumulated(front, "impl", rank, fails=False)
    found = [accumulated(front, "impl", rank, fails=True)]
    if front == "fully_shard":
        found.append(accumulated(front, "impl", rank, fails=True, by_hand=True))
        if not BEFORE_2_13:  # older ones have no reset_iter_state
            found.append(accumulated(front, "torch", rank, fails=True, by_hand=True))
    for gradients in found:
        for ours, theirs in zip(gradients, expected, strict=True):
            torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("front", ["fully_shard", "flat", "original"])
def test_a_failed_forward_keeps_them(two_ranks, front: str) -> None:
    two_ranks.run(case_a_failed_forward_keeps_them, front=front)


def case_a_failed_backward_is_told(rank: int, *, front: str) -> None:
    """It has added to some of them: nobody can tell what they were."""
    model, inner, accumulate = built(front)
    expected = gradients_of(model, rank)
    for by_hand in (False, True) if front == "fully_shard" else (False,):
        with accumulate(model, False):
            loss_of(model, tokens_of(rank, 1)).backward()
            handle = fail_at(inner, "backward")
            with pytest.raises(BrokenError):
                loss_of(model, tokens_of(rank, 2)).backward()
            handle.remove()
        if by_hand:
            model.reset_iter_state()
        else:
            with pytest.raises(RuntimeError, match=r"accumulated without communication .*dropped"):
                loss_of(model, tokens_of(rank, 0))
        model.zero_grad()
        with accumulate(model, True):
            found = gradients_of(model, rank)
        assert found[0] == expected[0]
        assert all(torch.equal(a, b) for a, b in zip(found[1], expected[1], strict=True))


@pytest.mark.parametrize("front", ["fully_shard", "flat", "original"])
def test_a_failed_backward_is_told(two_ranks, front: str) -> None:
    two_ranks.run(case_a_failed_backward_is_told, front=front)
