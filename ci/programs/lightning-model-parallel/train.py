"""Train with Lightning's ModelParallelStrategy: FSDP2 over 4 ranks, tensor parallel over 2."""

from typing import Any

import lightning
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


class FeedForward(nn.Module):
    """A gated feed-forward block."""

    def __init__(self, width: int = 1024, hidden: int = 4096) -> None:
        super().__init__()
        self.w1 = nn.Linear(width, hidden, bias=False)
        self.w2 = nn.Linear(hidden, width, bias=False)
        self.w3 = nn.Linear(width, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> Any:
        return self.w2(nn.functional.silu(self.w1(x)) * self.w3(x))


class Blocks(lightning.LightningModule):
    """Eight blocks, sharded where Lightning asks for it."""

    def configure_model(self) -> None:
        if hasattr(self, "model"):
            return
        self.model = nn.Sequential(*[FeedForward() for _ in range(8)])
        data, tensor = self.device_mesh["data_parallel"], self.device_mesh["tensor_parallel"]
        plan = {"w1": ColwiseParallel(), "w2": RowwiseParallel(), "w3": ColwiseParallel()}
        for block in self.model:
            parallelize_module(block, tensor, plan)
            fully_shard(block, mesh=data)
        fully_shard(self.model, mesh=data)

    def training_step(self, batch: torch.Tensor, number: int) -> torch.Tensor:
        loss = self.model(batch).square().mean()
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3, fused=True)

    def train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(torch.randn(1024, 1024), batch_size=32, num_workers=1)


trainer = lightning.Trainer(
    accelerator="cuda", devices=8, max_steps=12, precision="bf16-true", logger=False,
    strategy=ModelParallelStrategy(data_parallel_size=4, tensor_parallel_size=2),
)  # fmt: skip
trainer.fit(Blocks())
