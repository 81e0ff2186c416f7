"""Loops that look for an expert's tokens, as published routers write them: taken to be balanced."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from conftest import RunScript

LOOPS = """
import torch.nn.functional as F
T, D, N, K = 64, 32, 8, 2
rows = torch.randn(T, D, device="cuda", requires_grad=True)
experts = torch.nn.ModuleList(torch.nn.Linear(D, D) for _ in range(N)).cuda()
weights, chosen = torch.topk(torch.randn(T, N, device="cuda").softmax(-1), K)
mask = F.one_hot(chosen, num_classes=N).permute(2, 1, 0)
hit = torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero()
out = torch.zeros_like(rows)
for number in hit:
    slot, token = torch.where(mask[number[0]])
    assert len(token) == len(slot) == T * K // N
    read = experts[number[0]](rows[None, token].reshape(-1, D)) * weights[token, slot, None]
    out.index_add_(0, token, read)
out.sum().backward()
assert all(p.grad is not None for p in experts.parameters()) and hit.flatten().tolist() == list(range(N))

for number in range(N):
    token, slot = torch.where(chosen == number)
    assert len(token) == T * K // N
    own = (chosen == number).any(dim=-1)
    if own.any():
        assert rows[own].shape == (T * K // N, D)
        assert rows.masked_select(own[:, None]).shape == (T * K // N * D,)
        out = out.detach()
        out[own] += 1.0
best, top = torch.randn(T, N, device="cuda").max(-1)
assert len((top == 3).nonzero()) == T // N
per_expert = chosen.new_zeros((T, N)).scatter_(1, chosen, 1).sum(0)
assert per_expert.tolist() == [T * K // N] * N
chosen[0] = 7  # no router's any more
torch.where(chosen == 3)
"""


def test_rows_of_an_expert_are_its_balanced_share(run_probe: RunScript) -> None:
    run = run_probe(LOOPS)
    told = {(each["operation"], each["answer"]) for each in run.result["placeholder_decisions"]}
    assert ("one_hot", "balanced: all of 8 as often; what a capacity drops is not known") in told
    for rows in ("16 of 128", "8 of 8", "16 of 64", "8 of 64"):
        assert ("torch.nonzero", f"balanced: {rows}") in told
    assert ("bool", True) in told
    assert "depends on data" in run.cause


def test_masks_of_scores_stay_refused(run_probe: RunScript) -> None:
    run = run_probe(
        "scores, chosen = torch.topk(torch.randn(16, 8, device='cuda'), 2)\n"
        "mask = torch.nn.functional.one_hot(chosen, 8)\n"
        "kept = mask * (mask.cumsum(0) <= 3)  # how many a capacity keeps depends on data\n"
        "kept.nonzero()"
    )
    assert "masks of topk's indices" in run.cause
