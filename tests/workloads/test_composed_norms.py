"""RMSNorm of operators, as torch before 2.9 had it, computes what torch's own computes."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from fsdpbench.workloads.layers import composed_rms_norm


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("eps", [None, 1e-3])
@pytest.mark.parametrize("weighted", [True, False])
def test_it_is_torchs_norm(dtype: torch.dtype, tolerance: float, eps: float | None, weighted: bool) -> None:
    torch.manual_seed(0)
    x = torch.randn(3, 5, 64, dtype=dtype, requires_grad=True)
    weight = torch.rand(64, dtype=dtype) if weighted else None
    gradient = torch.randn(3, 5, 64, dtype=dtype)
    found = []
    for norm in (composed_rms_norm, F.rms_norm):
        y = norm(x, (64,), weight, eps)
        found.append((y, torch.autograd.grad(y, x, gradient)[0]))
    for ours, theirs in zip(*found, strict=True):
        assert ours.dtype == theirs.dtype == dtype
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)
