"""Lm head and loss together: the plain model's loss and gradients, without all logits at once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fsdpbench.workloads import get_workload
from fsdpbench.workloads.layers import ComputesTokenLoss, token_loss
from fsdpbench.workloads.linear_loss import LINEAR_LOSSES

VOCAB, WIDTH = 301, 16


def inputs(dtype: torch.dtype, bias: bool) -> list[Tensor]:
    torch.manual_seed(0)
    shapes = [(2, 23, WIDTH), (VOCAB, WIDTH)] + ([(VOCAB,)] if bias else [])
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]


@pytest.mark.parametrize("kind", LINEAR_LOSSES)
@pytest.mark.parametrize("in_fp32", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_value_and_gradients_are_those_of_all_logits(kind: str, in_fp32: bool, bias: bool) -> None:
    targets = torch.randint(0, VOCAB, (2, 23))
    hidden, weight, *rest = given = inputs(torch.float64, bias)
    expected = torch.nn.functional.cross_entropy(
        torch.nn.functional.linear(hidden, weight, *rest).flatten(0, 1), targets.flatten()
    )
    (3 * expected).backward()
    reference = [each.grad for each in given]
    hidden, weight, *rest = again = inputs(torch.float64, bias)
    loss = LINEAR_LOSSES[kind](hidden, weight, rest[0] if bias else None, targets, in_fp32)
    (3 * loss).backward()
    tolerance = {"rtol": 1e-5, "atol": 1e-6} if in_fp32 else {"rtol": 1e-12, "atol": 1e-12}
    torch.testing.assert_close(loss.double(), expected, **tolerance)
    for each, wanted in zip(again, reference, strict=True):
        assert each.grad is not None
        assert each.grad.dtype is each.dtype
        torch.testing.assert_close(each.grad, wanted, **tolerance)


def test_what_is_frozen_gets_no_gradient() -> None:
    hidden, weight = inputs(torch.float32, False)
    weight.requires_grad_(False)
    LINEAR_LOSSES["fused"](hidden, weight, None, torch.randint(0, VOCAB, (2, 23)), True).backward()
    assert weight.grad is None
    assert hidden.grad is not None


class Largest(TorchDispatchMode):
    """The most elements that an operator's result has."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            self.elements = max(self.elements, result.numel())
        return result


@pytest.mark.parametrize("kind", LINEAR_LOSSES)
def test_all_logits_are_never_held(kind: str) -> None:
    """A part's logits have about as many elements as all of `hidden`; here the weight is larger than both."""
    rows = 46 * 64
    hidden = torch.randn(1, rows, WIDTH, requires_grad=True)
    weight = torch.randn(VOCAB, WIDTH, requires_grad=True)
    with Largest() as largest:
        LINEAR_LOSSES[kind](hidden, weight, None, torch.randint(0, VOCAB, (1, rows)), True).backward()
    assert largest.elements < 1.2 * hidden.numel() < rows * VOCAB / 10


@pytest.mark.parametrize(
    ("kind", "name", "shape"),
    [(kind, name, {}) for kind in LINEAR_LOSSES for name in ("gpt-tiny", "llama-tiny", "t5-tiny")]
    + [("chunked", "decoder-tiny", {"logit_cap": 3.0}), ("fused", "decoder-tiny", {"head_bias": True})],
)
def test_models_train_with_it_as_without(kind: str, name: str, shape: dict[str, Any]) -> None:
    workload = get_workload(name, shape=shape)
    batch = next(workload.batches(2, None, 0, 0, "cpu"))
    torch.manual_seed(0)
    model = workload.build()
    assert isinstance(model, ComputesTokenLoss)
    gradients = []
    for linear_loss in (None, LINEAR_LOSSES[kind]):
        model.linear_loss = linear_loss
        model.zero_grad()
        loss = model(*batch)
        loss.backward()
        gradients.append({name: parameter.grad.clone() for name, parameter in model.named_parameters()})
    for key, wanted in gradients[0].items():
        torch.testing.assert_close(gradients[1][key], wanted, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(token_loss(model(*batch[:-1]), batch[-1], True), loss.detach())
