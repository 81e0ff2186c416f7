"""Activations on the host: results are those without, bit by bit, and what cannot be is said."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fsdpbench.impl import ActivationOffload, offload_activations


class Block(nn.Module):
    def __init__(self, width: int = 16, *, checkpointed: bool = False) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.checkpointed = checkpointed

    def transform(self, x: Tensor) -> Tensor:
        query, key, value = self.attention(self.norm(x)).chunk(3, -1)
        return x + self.out(nn.functional.scaled_dot_product_attention(query, key, value))

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.transform, x, use_reentrant=False) if self.checkpointed else self.transform(x)


class Inner(nn.Module):
    """A block in a block, of which both are offloaded."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Block()
        self.last = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.last(self.inner(x)))


def trained(
    make: Callable[[], nn.Sequential], *, offloaded: bool, backwards: int = 1
) -> tuple[list[Tensor], ActivationOffload | None]:
    """Losses, gradients and parameters of three steps."""
    torch.manual_seed(0)
    model, offload = make(), None
    if offloaded:
        blocks = [m for m in model.modules() if isinstance(m, (Block, Inner))]
        offload = offload_activations(blocks, least_bytes=0)
    optimizer, seen = torch.optim.SGD(model.parameters(), lr=0.1), []
    for _ in range(3):
        loss = model(torch.randn(2, 3, 16)).square().mean()
        for left in reversed(range(backwards)):
            loss.backward(retain_graph=left > 0)
        seen += [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
        optimizer.step()
        optimizer.zero_grad()
    return [*seen, *(p.detach() for p in model.parameters())], offload


def plain() -> nn.Sequential:
    return nn.Sequential(nn.Linear(16, 16), Block(), Block(), Block(), nn.Linear(16, 1))


def recomputed() -> nn.Sequential:
    return nn.Sequential(nn.Linear(16, 16), *(Block(checkpointed=True) for _ in range(3)))


def nested() -> nn.Sequential:
    return nn.Sequential(Inner(), Inner(), Block())


def shared() -> nn.Sequential:
    block = Block()
    return nn.Sequential(nn.Linear(16, 16), block, block, block)


@pytest.mark.parametrize("backwards", [1, 2])
@pytest.mark.parametrize("make", [plain, recomputed, nested, shared])
def test_results_are_equal_bit_by_bit(make: Callable[[], nn.Sequential], backwards: int) -> None:
    kept, _ = trained(make, offloaded=False, backwards=backwards)
    moved, offload = trained(make, offloaded=True, backwards=backwards)
    assert all(torch.equal(one, other) for one, other in zip(kept, moved, strict=True))
    assert offload is not None
    assert offload.host_bytes > 0


def test_host_memory_is_used_again() -> None:
    model = plain()
    offload = offload_activations([m for m in model if isinstance(m, Block)], least_bytes=0)
    held = []
    for rows in (2, 2, 2, 1, 1, 1):
        model(torch.randn(rows, 3, 16)).sum().backward()
        held.append(offload.host_bytes)
    assert held[1] == held[2]  # the first step did not know yet which block is the last
    assert held[5] < held[2]


def test_an_abandoned_forward_disturbs_nothing() -> None:
    torch.manual_seed(0)
    model = plain()
    offload_activations([m for m in model if isinstance(m, Block)], least_bytes=0)
    x = torch.randn(2, 3, 16)
    model(x)
    with torch.no_grad():
        model(x)
    with pytest.raises(RuntimeError, match="shape"):
        model(torch.randn(2, 3, 17))
    moved = torch.autograd.grad(model(x).sum(), list(model.parameters()))
    torch.manual_seed(0)
    kept = plain()
    expected = torch.autograd.grad(kept(x).sum(), list(kept.parameters()))
    assert all(torch.equal(one, other) for one, other in zip(moved, expected, strict=True))


class Overwritten(Block):
    """Writes into what its own product has saved."""

    def transform(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.out(x))
        product = hidden * hidden
        hidden.add_(1)
        return x + product


@pytest.mark.parametrize("least_bytes", [0, 2**20])
def test_writes_into_what_is_saved_are_refused_as_by_autograd(least_bytes: int) -> None:
    block = Overwritten()
    offload_activations([block], least_bytes=least_bytes)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        block(torch.randn(2, 3, 16)).sum().backward()


def test_parameters_and_what_blocks_share_stay() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(64, 64))

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return (x @ self.weight.t()) * mask

    first, second = Masked(), Masked()
    offload = offload_activations([first, second], least_bytes=64 * 64 * 4)
    mask = torch.randn(64, 64)
    x = torch.randn(64, 64, requires_grad=True)
    second(first(x, mask), mask).sum().backward()
    assert offload.host_bytes == 2 * 64 * 64 * 4  # the input of each; the last block is not known yet


def test_negative_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="least_bytes must be 0 or more, not -1"):
        offload_activations([], least_bytes=-1)
