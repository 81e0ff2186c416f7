"""The loss in the logits' own dtype: torch's value and gradient, with one tensor of their size, not three."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from fsdpbench.workloads.losses import token_loss


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 2**-7)])
def test_value_and_gradient_are_torchs(dtype: torch.dtype, tolerance: float) -> None:
    torch.manual_seed(0)
    logits = torch.randn(2, 32, 301, dtype=dtype, requires_grad=True)
    reference = logits.detach().clone().requires_grad_()
    targets = torch.randint(0, 301, (2, 32))
    loss = token_loss(logits, targets, in_fp32=False)
    expected = F.cross_entropy(reference.flatten(0, 1), targets.flatten())
    (3 * loss).backward()
    (3 * expected).backward()
    assert loss.item() == expected.item()
    assert logits.grad is not None
    assert reference.grad is not None
    assert logits.grad.dtype is dtype
    largest = reference.grad.abs().max()
    assert (logits.grad - reference.grad).abs().max() <= tolerance * largest


def test_a_second_backward_is_refused() -> None:
    logits = torch.randn(1, 4, 5, requires_grad=True)
    loss = token_loss(logits, torch.zeros(1, 4, dtype=torch.int64), in_fp32=False)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
