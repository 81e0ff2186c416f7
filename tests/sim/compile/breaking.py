"""A program that breaks its graph and is compiled again, and what Dynamo makes of it on a device."""

from __future__ import annotations

import torch
from torch import nn


class Breaking(nn.Module):
    """Two graphs, the first of which depends on `scale`."""

    scale = 1

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.GELU(), nn.Tanh())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x) * self.scale
        torch._dynamo.graph_break()
        return self.inner(y) + 1


def told(device: str) -> str:
    """Frames that were compiled, in order, and breaks by their number."""
    module = Breaking()
    compiled = torch.compile(module, backend="eager")
    for module.scale in (1, 2, 2):
        for rows in (2, 3, 4):
            x = torch.randn(rows, 8, device=device, requires_grad=True)
            compiled(x).sum().backward()
    frames = [(each.compile_id, each.co_name) for each in torch._dynamo.utils.get_compilation_metrics()]
    return str((frames, sorted(torch._dynamo.utils.counters["graph_break"].values())))


if __name__ == "__main__":
    print(told("cpu"))
