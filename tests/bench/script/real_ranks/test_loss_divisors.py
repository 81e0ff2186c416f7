"""Numbers that losses are divided by, read from the graph, against the gradient of one element."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from fsdpbench.script.real_ranks.loss_divisors import divided

ROWS, CLASSES = 6, 7
TARGET = torch.tensor([0, 1, -100, 2, -100, 4])
MASK = (TARGET >= 0).float()
Loss = Callable[[torch.Tensor], torch.Tensor]
LOSSES: dict[str, tuple[Loss, list[float]]] = {
    "ignored tokens": (lambda x: F.cross_entropy(x, TARGET), [4]),
    "a microbatch of four": (lambda x: F.cross_entropy(x, TARGET) / 4, [16]),
    "a sum over a count": (lambda x: F.cross_entropy(x, TARGET, reduction="sum") / 9, [9]),
    "a masked mean": (lambda x: (x.square().sum(1) * MASK).sum() / MASK.sum(), [4]),
    "a mean over all": (lambda x: x.square().mean(), [42]),
    "a mean over rows": (lambda x: x.square().sum(1).mean(0), [6]),
    "a squared error": (lambda x: F.mse_loss(x, x.detach() + 1), [42]),
    "spatial classes": (lambda x: F.cross_entropy(x.view(1, 6, 7).transpose(1, 2), TARGET.view(1, 6)), [4]),
    "a scaled loss of bf16": (lambda x: 8 * F.cross_entropy(x.bfloat16().float(), TARGET), [0.5]),
    "two terms": (lambda x: F.cross_entropy(x, TARGET) + 0.1 * x.square().mean(), [4, 420]),
    "no sum at its end": (lambda x: x.square().max(), []),
}


@pytest.mark.parametrize("name", LOSSES)
def test_divisors_are_read_from_the_graph(name: str) -> None:
    loss, expected = LOSSES[name]
    found = divided(loss(torch.randn(ROWS, CLASSES, requires_grad=True)), "train.py:1")
    assert [*found.terms.values()] == pytest.approx(expected)


@given(st.lists(st.sampled_from(["mul", "div", "neg", "view", "to"]), max_size=5), st.integers(1, 9))
def test_a_divisor_is_the_inverse_of_the_gradient_of_an_element(chain: list[str], rows: int) -> None:
    x = torch.zeros(rows, dtype=torch.float64, requires_grad=True)
    loss = x.mean()
    for each in chain:
        loss = {
            "mul": lambda value: value * 3.0,
            "div": lambda value: value / torch.tensor(5.0),
            "neg": torch.neg,
            "view": lambda value: value.view(()),
            "to": lambda value: value.to(torch.float32),
        }[each](loss)
    (divisor,) = divided(loss, "").terms.values()
    loss.backward()
    assert x.grad is not None
    assert divisor * abs(float(x.grad[0])) == pytest.approx(1.0, rel=1e-5)


def test_a_loss_without_a_graph_has_no_divisor() -> None:
    assert divided(torch.zeros(()), "").terms == {}
    assert divided(torch.zeros(3, requires_grad=True) * 2, "").terms == {}
