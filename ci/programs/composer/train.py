"""Composer's Trainer and FSDP, as its documentation shows: a model of ours, wrapped by `fsdp_config`."""

import torch
import torch.nn.functional as F
from composer import Trainer
from composer.models import ComposerModel
from composer.utils import dist
from torch.utils.data import DataLoader, TensorDataset


class Block(torch.nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(width)
        self.mlp = torch.nn.Sequential(
            torch.nn.Linear(width, 4 * width), torch.nn.GELU(), torch.nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mlp(self.norm(x))


class Classifier(ComposerModel):
    def __init__(self) -> None:
        super().__init__()
        self.model = torch.nn.Sequential(
            torch.nn.Linear(256, 1024), *(Block(1024) for _ in range(8)), torch.nn.Linear(1024, 10)
        )
        for block in self.model:
            block._fsdp_wrap = isinstance(block, Block)

    def forward(self, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return self.model(batch[0])

    def loss(self, outputs: torch.Tensor, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return F.cross_entropy(outputs, batch[1])


model = Classifier()
data = TensorDataset(torch.randn(2048, 256), torch.randint(0, 10, (2048,)))
trainer = Trainer(
    model=model,
    train_dataloader=DataLoader(data, batch_size=16, sampler=dist.get_sampler(data)),
    max_duration="12ba",
    optimizers=torch.optim.AdamW(model.parameters()),
    device="gpu",
    parallelism_config={"fsdp": {"sharding_strategy": "FULL_SHARD", "mixed_precision": "DEFAULT"}},
    precision="amp_bf16",
    progress_bar=False,
)
trainer.fit()
