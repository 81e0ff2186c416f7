"""A tyro command line, Weights & Biases offline, TensorBoard, and a loader whose state is saved (torchdata)."""

import dataclasses
import os

import torch
import torch.distributed as dist
import tyro
import wandb
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import TensorDataset
from torch.utils.tensorboard import SummaryWriter
from torchdata.stateful_dataloader import StatefulDataLoader


@dataclasses.dataclass
class Settings:
    lr: float = 1e-3
    steps: int = 8
    mode: str = "disabled"


settings = tyro.cli(Settings)
dist.init_process_group("nccl")
rank = dist.get_rank()
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
if rank == 0:
    wandb.init(project="tried", config=dataclasses.asdict(settings), mode=settings.mode)
writer = SummaryWriter("tb") if rank == 0 else None
model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64)).cuda()
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=settings.lr)
loader = StatefulDataLoader(TensorDataset(torch.randn(128, 64)), batch_size=4, num_workers=0)
for step, (x,) in zip(range(settings.steps), loader, strict=False):
    loss = model(x.cuda()).square().mean()
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor()
    optimizer.step()
    optimizer.zero_grad()
    if rank == 0:
        wandb.log({"loss": loss.item(), "norm": norm.item(), "memory": torch.cuda.max_memory_allocated()})
        writer.add_scalar("loss", loss, step)
        writer.add_histogram("head", model[2].bias.to_local(), step)
    state = loader.state_dict()
loader.load_state_dict(state)
if rank == 0:
    wandb.finish()
    writer.close()
