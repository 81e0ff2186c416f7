"""Numbers that losses are divided by, read from the graph, against the gradient of one element."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from fsdpbench.script.real_ranks.loss_divisors import divided, of_the_largest, uneven

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
    assert [term.divisor for term in found.terms.values()] == pytest.approx(expected)


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
    (term,) = divided(loss, "").terms.values()
    loss.backward()
    assert x.grad is not None
    assert term.divisor * abs(float(x.grad[0])) == pytest.approx(1.0, rel=1e-5)


def test_a_loss_without_a_graph_has_no_divisor() -> None:
    assert divided(torch.zeros(()), "").terms == {}
    assert divided(torch.zeros(3, requires_grad=True) * 2, "").terms == {}


WEIGHTS = torch.linspace(0.5, 3.0, CLASSES)
ROW_MASKS = torch.arange(CLASSES) < torch.tensor([[2], [5], [7], [3], [6], [4]])


def masked(n: int) -> torch.Tensor:
    """Four valid tokens of six in the first microbatch, two in the second."""
    return (torch.arange(6) < 4 - 2 * n).float()


Of = Callable[[torch.Tensor, int], torch.Tensor]
"""The loss of some rows, in a microbatch of a number."""
RIGHT: dict[str, Of] = {
    "a curriculum": lambda x, n: F.mse_loss(x[:3], x[:3].detach() + 1) * (0.5 + n),
    "an annealed sum": lambda x, n: x[:3].square().mean() + 0.1 * (n + 1) * x[:3].square().sum(),
    "weighed by rows": lambda x, n: x.square().mean() * (len(x) / 4.5),
    "a sum over the mean count": lambda x, n: x.square().sum() / 31.5,
    "an auxiliary mean": lambda x, n: x.square().sum() / 31.5 + 1e-3 * x.logsumexp(1).square().mean(),
    "weights of classes": lambda x, n: F.cross_entropy(x[:3], torch.arange(n, n + 3), weight=WEIGHTS),
    "an overlap": lambda x, n: -(2 * x.square().sum() + 1) / (x.abs().sum() + x.exp().sum() + 1),
    "an inverse": lambda x, n: 1 / (1 + x.square().mean()),
    "a learned weight": lambda x, n: x.square().sum() * torch.ones((), requires_grad=True),
    "over its own size": lambda x, n: x.square().sum() / x.square().sum().detach(),
    "a penalty": lambda x, n: x[:2].square().mean() + 10 * (x[:2].norm(dim=1) - 1).square().mean(),
    "means of samples": lambda x, n: sum((x[i, : i + n + 1].square().mean() for i in range(3)), x.sum() * 0),
    "rows of masked means": lambda x, n: (
        (x[:3] * ROW_MASKS[n : n + 3]).sum(1) / ROW_MASKS[n : n + 3].sum(1)
    ).mean(),
}
RIGHT |= {
    "a mask over the mean count": lambda x, n: (x[:, 0] * masked(n)[: len(x)]).sum() / 3.0,
    "a mask's share of all": lambda x, n: (x[:2].square() * masked(n)[:2, None]).mean(),
    "a masked sum over its own size": lambda x, n: (
        (x[0, :6].square() * masked(n)).sum() / (x[0, :6].square() * masked(n)).sum().detach()
    ),
    "rows of a normalised mask": lambda x, n: (
        (x[:3] * (ROW_MASKS[n : n + 3] / ROW_MASKS[n : n + 3].sum(1, keepdim=True))).sum(1).mean()
    ),
    "advantages": lambda x, n: (x[:3, 0] * torch.tensor([0.5, -1.0, 2.0 + n])).sum() / 3,
}
RIGHT |= {
    "the inverse of the mean count": lambda x, n: x.square().sum() * (1 / 31.5),
    "a sum": lambda x, n: x.square().sum() * 0.5,
    "a mask times the inverse of the mean count": lambda x, n: (x[0, :6] * masked(n)).sum() * (1 / 3),
}
WRONG: dict[str, Of] = {
    "the inverse of a count": lambda x, n: F.mse_loss(x, x.detach() + 1, reduction="sum") * (1 / x.numel()),
    "the inverse of a tensor": lambda x, n: (
        3 * x.square().sum() * torch.tensor(float(x.numel())).reciprocal()
    ),
    "the inverse of a mask's sum": lambda x, n: (x[0, :6] * masked(n)).sum() * (1 / masked(n).sum()),
    "the inverse of chosen tokens": lambda x, n: x[0, :6][masked(n) > 0].sum() * (1 / masked(n).sum()),
    "the inverse of targets": lambda x, n: (
        F.cross_entropy(x, TARGET[: len(x)], reduction="sum") * (1 / (TARGET[: len(x)] >= 0).sum())
    ),
    "a normalised mask": lambda x, n: (x[0, :6] * (masked(n) / masked(n).sum())).sum(),
    "a normalised mask of bf16": lambda x, n: (x[0, :6] * (masked(n) / masked(n).sum()).bfloat16()).sum(),
    "a mask, normalised by rows and columns": lambda x, n: (
        ((masked(n) / masked(n).sum())[:, None] * x[:1, :6].T.expand(6, 3)).sum(1).sum()
    ),
    "a mask and a product": lambda x, n: x[0, :6] @ (masked(n) / masked(n).sum()),
    "a mask divided inside": lambda x, n: (x[0, :6] * masked(n) / masked(n).sum()).sum(),
    "a mask and a small number": lambda x, n: (x[0, :6] * masked(n)).sum() / (masked(n).sum() + 1e-6),
    "a share of a mask": lambda x, n: (x[0, :6] * masked(n)).mean() / masked(n).mean(),
    "means": lambda x, n: x.square().mean() / 2,
    "counted sums": lambda x, n: x.square().sum() / len(x),
    "a curriculum of means": lambda x, n: x.square().mean() * (3 - n),
    "beside an even penalty": lambda x, n: x.square().mean() + 0.1 * x[:2].square().mean(),
    "ignored targets": lambda x, n: F.cross_entropy(x, TARGET[: len(x)]) + x[:2].square().mean(),
    "weights of classes": lambda x, n: F.cross_entropy(x, TARGET[: len(x)].clamp(min=0), weight=WEIGHTS),
    "smoothed labels": lambda x, n: F.cross_entropy(x, TARGET[: len(x)], label_smoothing=0.1),
    "chunks": lambda x, n: sum(each.square().sum() for each in x.chunk(3)) / torch.tensor(len(x)),
    "without NaN": lambda x, n: torch.nan_to_num(x.square().mean()),
    "a ratio of policies": lambda x, n: torch.exp(x[:, 0] - x[:, 0].detach()).clamp(0.8, 1.2).sum() / len(x),
}


def uneven_lines(loss: Of) -> str:
    """The line that is found of microbatches of 3 and 6 rows."""
    microbatches = [torch.randn(rows, CLASSES, requires_grad=True) for rows in (3, 6)]
    found = uneven([divided(loss(x, n), "a.py:7 a.py:9 0") for n, x in enumerate(microbatches)])
    return found[0] if found else ""


def test_a_loss_over_its_own_size_is_right_whatever_the_size() -> None:
    own_size = RIGHT["over its own size"]

    def rounded(x: torch.Tensor, n: int) -> torch.Tensor:
        return own_size(100 * x.bfloat16(), n)

    assert [uneven_lines(each) for each in (own_size, rounded) for _ in range(400)] == [""] * 800


@pytest.mark.parametrize("name", RIGHT)
def test_losses_that_weigh_as_the_script_says_are_right(name: str) -> None:
    assert uneven_lines(RIGHT[name]) == ""


@pytest.mark.parametrize("name", WRONG)
def test_means_over_different_numbers_are_found(name: str) -> None:
    assert uneven_lines(WRONG[name]) == "a.py:7"


def test_a_backward_that_begins_with_a_factor_weighs_by_it() -> None:
    x = torch.randn(ROWS, CLASSES, requires_grad=True)
    (term,) = divided(x.square().sum(), "", 1 / x.numel()).terms.values()
    assert term.total == pytest.approx(1.0)
    (term,) = divided(x.square().mean(), "", 4.0).terms.values()
    assert term.total == pytest.approx(4.0)


def test_other_losses_of_a_line_are_not_compared() -> None:
    x = torch.randn(ROWS, CLASSES, requires_grad=True)
    losses = {"a.py:7 a.py:9 0": x.mean(), "a.py:7 a.py:9 1": x[:2].mean(), "a.py:7 a.py:10 0": x[:3].mean()}
    assert uneven([divided(loss, lines) for lines, loss in losses.items()]) is None


@given(
    st.lists(st.lists(st.integers(0, 9), min_size=2, max_size=2), min_size=2, max_size=5),
    st.booleans(),
    st.sampled_from([max, sum]),
)
def test_sums_over_the_largest_count_of_all_ranks(
    counts: list[list[int]], multiplied: bool, chosen: Callable[[list[int]], int]
) -> None:
    ranks = [sum(each) for each in counts]
    largest, divisor, times = max(ranks), chosen(ranks) or 1, len(ranks) if multiplied else 1
    every = [
        [
            divided(
                (torch.ones(9, requires_grad=True)[:count].square().sum() / divisor) * times, "train.py:1"
            )
            for count in windows
        ]
        for windows in counts
    ]
    wrong = min(ranks) < largest and divisor == largest
    assert of_the_largest(every, largest) == (ranks if wrong else [])
