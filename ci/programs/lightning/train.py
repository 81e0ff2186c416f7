"""A transformer language model of Lightning's demos under its Trainer with FSDP, as its guide shows."""

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.demos import Transformer
from lightning.pytorch.strategies import FSDPStrategy
from torch.utils.data import DataLoader, Dataset


class Tokens(Dataset):
    def __len__(self):
        return 4000

    def __getitem__(self, index):
        tokens = torch.randint(0, 1000, (257,))
        return tokens[:-1], tokens[1:]


class LanguageModel(L.LightningModule):
    def __init__(self, vocab_size):
        super().__init__()
        self.vocab_size = vocab_size
        self.model = None
        self.save_hyperparameters()

    def configure_model(self):
        if self.model is None:
            self.model = Transformer(vocab_size=self.vocab_size, nlayers=8, nhid=2048, ninp=512, nhead=8)

    def training_step(self, batch):
        inputs, target = batch
        output = self.model(inputs, target)
        loss = F.nll_loss(output, target.view(-1))
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


if __name__ == "__main__":
    L.seed_everything(42)
    policy = {torch.nn.TransformerEncoderLayer, torch.nn.TransformerDecoderLayer}
    trainer = L.Trainer(
        accelerator="cuda",
        devices=8,
        strategy=FSDPStrategy(auto_wrap_policy=policy, activation_checkpointing_policy=policy),
        precision="bf16-true",
        max_steps=12,
    )
    trainer.fit(LanguageModel(vocab_size=1000), DataLoader(Tokens(), batch_size=8, num_workers=2))
