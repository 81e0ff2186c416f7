"""FlexAttention in scripts: eager as torch composes it, compiled priced by what the mask leaves."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from conftest import RunScript

PROGRAM = """
import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

MASKS = {
    "full": None,
    "causal": lambda b, h, q, k: q >= k,
    "window": lambda b, h, q, k: (q >= k) & (q - k < 256),
    "documents": lambda b, h, q, k: (q >= k) & (documents[b, q] == documents[b, k]),
}
documents = torch.zeros(2, 4096, dtype=torch.long, device="cuda")
attend = torch.compile(flex_attention, **OPTIONS) if COMPILED else flex_attention

class Attention(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.project, self.bias = torch.nn.Linear(512, 3 * 512), torch.nn.Parameter(torch.zeros(8))
    def forward(self, x):
        q, k, v = self.project(x).view(2, 4096, 3, 8, 64).permute(2, 0, 3, 1, 4)
        if MASK == "sdpa":
            return F.scaled_dot_product_attention(q, k, v) * self.bias.sum()
        bias = self.bias
        score = (lambda score, b, h, i, j: score + bias[h]) if BIASED else None
        mask = MASKS[MASK] and create_block_mask(MASKS[MASK], 2, None, 4096, 4096, device="cuda")
        out = attend(q, k, v[..., :32], score_mod=score, block_mask=mask)
        assert out.shape == (2, 8, 4096, 32)
        return out if BIASED else out * bias.sum()

model = Attention().cuda().bfloat16()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(4):
    model(torch.randn(2, 4096, 512, device="cuda", dtype=torch.bfloat16)).float().sum().backward()
    assert all(p.grad.shape == p.shape for p in model.parameters())
    optimizer.step()
"""


def program(mask: str, *, compiled: bool = True, biased: bool = False, mode: str = "default") -> str:
    names = {"MASK": mask, "COMPILED": compiled, "BIASED": biased, "OPTIONS": {"mode": mode}}
    return "\n".join(f"{name} = {value!r}" for name, value in names.items()) + PROGRAM


@pytest.mark.parametrize("compiled", [pytest.param(False, marks=pytest.mark.campaign), True])
@pytest.mark.parametrize("biased", [pytest.param(False, marks=pytest.mark.campaign), True])
def test_it_trains(run_probe: RunScript, compiled: bool, biased: bool) -> None:
    run = run_probe(program("causal", compiled=compiled, biased=biased, mode="max-autotune-no-cudagraphs"))
    assert run.result["status"] == "ok", run.cause
    assert run.result["unknown_operators"] == {}
    if compiled:
        assert run.result["compilation"]["untuned"] == 1
        assert any("max-autotune" in note for note in run.result["script"]["notes"])


@pytest.mark.campaign
def test_the_price_is_that_of_what_the_mask_leaves(run_probe: RunScript) -> None:
    """Blocks of 128: causal 17/32 of all, a window of 256 at most three of 32 columns."""
    times = {
        mask: run_probe(program(mask)).result["step_time_s"]
        for mask in ("full", "causal", "window", "documents")
    }
    assert 0.4 < times["causal"] / times["full"] < 0.8
    assert times["window"] < 0.85 * times["causal"]
    assert times["documents"] == pytest.approx(times["causal"], rel=0.3)  # captured tensors count as zeros
