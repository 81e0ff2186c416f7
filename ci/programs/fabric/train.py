"""A loop of one's own with Fabric and FSDP, as its guide shows. Started by `fabric run`, or as it is."""

import os

import lightning as L
import torch
import torch.nn.functional as F
from lightning.fabric.strategies import FSDPStrategy
from lightning.pytorch.demos import Transformer, WikiText2  # noqa: F401 (the guide's imports)
from torch.utils.data import DataLoader, TensorDataset

policy = {torch.nn.TransformerEncoderLayer, torch.nn.TransformerDecoderLayer}
fabric = L.Fabric(
    accelerator="cuda", devices=8, strategy=FSDPStrategy(auto_wrap_policy=policy), precision="bf16-mixed"
)
if "LT_CLI_USED" not in os.environ:  # `fabric run` has started the processes
    fabric.launch()
fabric.seed_everything(42)
with fabric.rank_zero_first():
    tokens = torch.randint(0, 1000, (2000, 257))
with fabric.init_module(empty_init=False):
    model = Transformer(vocab_size=1000, nlayers=8, nhid=2048, ninp=512, nhead=8)
model = fabric.setup_module(model)
optimizer = fabric.setup_optimizers(torch.optim.Adam(model.parameters(), lr=1e-4))
loader = fabric.setup_dataloaders(DataLoader(TensorDataset(tokens), batch_size=8))
for step, (batch,) in enumerate(loader):
    output = model(batch[:, :-1], batch[:, 1:])
    loss = F.nll_loss(output, batch[:, 1:].reshape(-1))
    fabric.backward(loss)
    fabric.clip_gradients(model, optimizer, max_norm=1.0)
    optimizer.step()
    optimizer.zero_grad()
    fabric.print(f"step {step}: {loss.item():.3f}")
    if step == 12:
        break
fabric.save("checkpoint", {"model": model, "optimizer": optimizer})
