"""What the programs beside this file share: a small net, and data of its own for each rank."""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

FAULT = "mended" not in sys.argv[1:]
"""Whether the program has its fault; `mended` on the command line takes it away."""
WIDTH = 24
DEVICE = "cuda"


def start() -> tuple[int, int]:
    """Begin; return rank and number of ranks."""
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    torch.manual_seed(0)
    return dist.get_rank(), dist.get_world_size()


class Block(nn.Module):
    """Two layers beside a shortcut."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 48), nn.Linear(48, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """(batch, WIDTH) to (batch, WIDTH)."""

    def __init__(self, blocks: int = 2) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def batch(rank: int, step: int, rows: int = 6) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs and targets of a rank's step."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(rows, WIDTH, generator=generator)
    return x.to(DEVICE), (x.roll(1, 1) * 2).to(DEVICE)


def loss_of(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    """Return the loss of a rank's step."""
    x, y = batch(rank, step)
    return F.mse_loss(model(x).float(), y)


def sharded(model: nn.Module, **options: object) -> nn.Module:
    """Shard a net with FSDP2, block by block."""
    from torch.distributed.fsdp import fully_shard

    for block in model.blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options)


STEPS = 7
