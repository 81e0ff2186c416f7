"""A residual network, its sharding with FSDP2, and its training loop."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard


class Block(nn.Module):
    """Two layers beside a shortcut."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.layers = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.layers(self.norm(x))


def build(width: int, blocks: int) -> nn.Sequential:
    """The model, without sharding."""
    return nn.Sequential(*(Block(width) for _ in range(blocks)))


def shard(model: nn.Sequential, policy: MixedPrecisionPolicy | None = None) -> nn.Sequential:
    """Shard block by block."""
    policy = policy or MixedPrecisionPolicy()
    for block in model:
        fully_shard(block, mp_policy=policy)
    return fully_shard(model, mp_policy=policy)


def train(steps: int = 10, batch: int = 64, width: int = 1024, blocks: int = 4) -> None:
    """Train on GPUs, started by torchrun; `batch`: of each GPU."""
    dist.init_process_group("nccl")
    torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = shard(build(width, blocks).cuda(), policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    for step in range(steps):
        x = torch.randn(batch, width, device="cuda")
        loss = (model(x) - x).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 100 == 0:
            print(f"step {step}: {loss.item():.4f}")


if __name__ == "__main__":
    train(steps=1000)
