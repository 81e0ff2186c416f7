"""Lightning's Trainer with FSDP1: validation, checkpoints by a callback, TensorBoard, accumulation, a schedule."""

import lightning as L
import torch
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.strategies import FSDPStrategy
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Network(L.LightningModule):
    def __init__(self, width=128):
        super().__init__()
        self.save_hyperparameters()
        self.layers = nn.Sequential(
            *(nn.TransformerEncoderLayer(width, 4, batch_first=True) for _ in range(2))
        )
        self.head = nn.Linear(width, 10)

    def training_step(self, batch, index):
        x, y = batch
        loss = nn.functional.cross_entropy(self.head(self.layers(x)[:, 0]), y)
        self.log("train_loss", loss, prog_bar=True, sync_dist=True)
        return loss

    def validation_step(self, batch, index):
        x, y = batch
        self.log("val_loss", nn.functional.cross_entropy(self.head(self.layers(x)[:, 0]), y), sync_dist=True)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 5), "interval": "step"}]


def loader(count):
    return DataLoader(
        TensorDataset(torch.randn(count, 16, 128), torch.randint(0, 10, (count,))), batch_size=4
    )


trainer = L.Trainer(
    accelerator="gpu", devices=8, max_steps=10, precision="bf16-mixed", log_every_n_steps=2, val_check_interval=4,
    strategy=FSDPStrategy(auto_wrap_policy={nn.TransformerEncoderLayer}, state_dict_type="full"),
    callbacks=[ModelCheckpoint("saved", every_n_train_steps=4, save_last=True), LearningRateMonitor()],
    logger=TensorBoardLogger("tb"), gradient_clip_val=1.0, gradient_clip_algorithm="value", accumulate_grad_batches=2,
)  # fmt: skip
trainer.fit(Network(), loader(1024), loader(64))
