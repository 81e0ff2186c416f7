"""Lm head and loss together: the plain model's loss and gradients, without all logits at once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fsdpbench.workloads import get_workload
from fsdpbench.workloads.losses import LINEAR_LOSSES, ComputesTokenLoss, token_loss, use_linear_loss

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


@pytest.mark.parametrize("kind", LINEAR_LOSSES)
def test_an_evaluation_computes_no_gradient(kind: str) -> None:
    hidden, weight, bias = inputs(torch.float32, True)
    targets = torch.randint(0, VOCAB, (2, 23))
    with torch.no_grad(), Products() as products:
        loss = LINEAR_LOSSES[kind](hidden, weight, bias, targets, True)
        wanted = token_loss(torch.nn.functional.linear(hidden, weight, bias), targets, True)
    torch.testing.assert_close(loss, wanted)
    assert products.count == 16 + 1  # parts of 3 rows: 301 words are 19 times 16 dimensions


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


@pytest.mark.parametrize("kind", LINEAR_LOSSES)
@pytest.mark.parametrize("in_fp32", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_under_autocast_all_products_are_in_its_dtype(kind: str, in_fp32: bool, dtype: torch.dtype) -> None:
    """Also those of gradients, with weights in fp32 and hidden states as a norm or a product leaves them."""
    hidden, weight, bias = (each.detach() for each in inputs(torch.float32, True))
    targets = torch.randint(0, VOCAB, (2, 23))
    found = []
    for linear_loss in (None, LINEAR_LOSSES[kind]):
        given = [each.clone().requires_grad_() for each in (hidden.to(dtype), weight, bias)]
        with torch.autocast("cpu", torch.bfloat16), Products() as products:
            if linear_loss is None:
                loss = token_loss(torch.nn.functional.linear(*given), targets, in_fp32)
            else:
                loss = linear_loss(*given, targets, in_fp32)
            loss.backward()
        assert products.dtypes == {torch.bfloat16}
        found.append([loss.detach(), *(each.grad for each in given)])
    for wanted, each in zip(*found, strict=True):
        assert each.dtype is wanted.dtype
        assert (each - wanted).norm() < 0.02 * wanted.norm()


class Products(TorchDispatchMode):
    """What matrix products read."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: set[torch.dtype] = set()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if "mm" in func._schema.name:
            self.count += 1
            self.dtypes |= {each.dtype for each in args if isinstance(each, Tensor)}
        return func(*args, **(kwargs or {}))


def test_without_it_products_are_calls_of_torch_s_own_layer() -> None:
    """Dynamo compiles no frame of torch's layers: a unit that is one product is never compiled."""
    model = get_workload("gpt-tiny").build()
    assert isinstance(model, ComputesTokenLoss)
    assert type(model.lm_head).forward is torch.nn.Linear.forward
    use_linear_loss(model, "chunked")
    assert {type(each).forward for each in model.modules() if isinstance(each, torch.nn.Linear)} == {
        torch.nn.Linear.forward
    }


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
    for together in (False, True):
        if together:
            use_linear_loss(model, kind)
        model.zero_grad()
        loss = model(*batch)
        loss.backward()
        gradients.append({name: parameter.grad.clone() for name, parameter in model.named_parameters()})
    for key, wanted in gradients[0].items():
        torch.testing.assert_close(gradients[1][key], wanted, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(token_loss(model(*batch[:-1]), batch[-1], True), loss.detach())
