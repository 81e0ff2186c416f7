"""A transformer under Lightning's FSDPStrategy: on GPUs, or by `fsdpbench run --script` without them.

fsdpbench run --script docs/examples/train_lightning.py --gpus 8
"""

from __future__ import annotations

import os

import lightning
import torch
from lightning.pytorch.strategies import FSDPStrategy
from torch import Tensor, nn
from torch.nn import functional as F

VOCABULARY, WIDTH = 32000, 2048


class Encoder(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers: nn.ModuleList | None = None

    def configure_model(self) -> None:
        if self.layers is not None:
            return
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 16, 4 * WIDTH, batch_first=True, norm_first=True)
            for _ in range(8)
        )
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def training_step(self, tokens: Tensor, index: int) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers or ():
            x = layer(x)
        loss = F.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


def main() -> None:
    trainer = lightning.Trainer(
        accelerator="cuda",
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        strategy=FSDPStrategy(auto_wrap_policy={nn.TransformerEncoderLayer}, sharding_strategy="FULL_SHARD"),
        precision="bf16-mixed",
        max_steps=12,
        logger=False,
        enable_checkpointing=False,
    )
    samples = [torch.randint(0, VOCABULARY, (1024,)) for _ in range(4000)]
    trainer.fit(Encoder(), torch.utils.data.DataLoader(samples, batch_size=8))


if __name__ == "__main__":
    main()
