"""The smallest model learns real text."""

from itertools import islice
from pathlib import Path

import torch

from workloads import get_workload

# The licence: a real text that every checkout has.
TEXT = Path(__file__).parents[2] / "LICENSE"


def test_loss_falls_on_real_text():
    torch.set_num_threads(1)
    torch.manual_seed(0)
    workload = get_workload("gpt-tiny")
    model = workload.build(seq=32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for inputs, targets in islice(workload.batches(8, 32, 0, 0, "cpu", TEXT), 40):
        loss = model(inputs, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[0] > 6.0  # near ln 512
    assert sum(losses[-5:]) / 5 < 3.2
