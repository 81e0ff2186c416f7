"""Lightning Fabric with FSDP: sharded checkpoints saved and loaded, accumulation without sync, a CSV logger."""

import sys

import lightning as L
import torch
from lightning.fabric.loggers import CSVLogger
from lightning.fabric.strategies import FSDPStrategy
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(128, 512), nn.GELU(), nn.Linear(512, 128))

    def forward(self, x):
        return x + self.layers(x)


kind = sys.argv[1] if len(sys.argv) > 1 else "full"
strategy = FSDPStrategy(
    auto_wrap_policy={Block}, activation_checkpointing_policy={Block}, state_dict_type=kind
)
fabric = L.Fabric(
    accelerator="cuda", devices=8, strategy=strategy, precision="bf16-mixed", loggers=CSVLogger("logs")
)
fabric.launch()
fabric.seed_everything(1)
with fabric.init_module(empty_init=False):
    model = nn.Sequential(*(Block() for _ in range(3)), nn.Linear(128, 10))
model = fabric.setup_module(model)
optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=1e-3))
data = TensorDataset(torch.randn(512, 128), torch.randint(0, 10, (512,)))
loader = fabric.setup_dataloaders(DataLoader(data, batch_size=4, shuffle=True))
state = {"model": model, "optimizer": optimizer, "step": 0}
for x, y in loader:
    waits = state["step"] % 2 == 1
    state["step"] += 1
    with fabric.no_backward_sync(model, enabled=waits):
        loss = nn.functional.cross_entropy(model(x), y)
        fabric.backward(loss)
    if waits:
        continue
    fabric.clip_gradients(model, optimizer, max_norm=1.0)
    optimizer.step()
    optimizer.zero_grad()
    if state["step"] == 5:
        fabric.save("checkpoint.ckpt", state)
        fabric.load("checkpoint.ckpt", state)
    fabric.log("loss", fabric.all_reduce(loss.detach(), reduce_op="mean"), step=state["step"])
