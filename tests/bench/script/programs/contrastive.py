"""Two towers and a contrastive loss over all ranks: gathers with gradients, a learned temperature that is clamped."""

import math

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as dist_nn
import torch.nn.functional as F
from tiny import WIDTH
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

dist.init_process_group("nccl")
rank, world = dist.get_rank(), dist.get_world_size()


class Towers(nn.Module):
    def __init__(self):
        super().__init__()
        self.image = nn.Sequential(nn.Conv2d(3, 32, 4, 4), nn.GELU(), nn.Flatten(), nn.Linear(32 * 64, WIDTH))
        self.text = nn.Sequential(
            nn.Embedding(512, WIDTH), nn.TransformerEncoderLayer(WIDTH, 4, batch_first=True)
        )
        self.scale = nn.Parameter(torch.full((1,), math.log(1 / 0.07)))

    def forward(self, images, tokens):
        images = F.normalize(self.image(images), dim=-1)
        texts = F.normalize(self.text(tokens).mean(1), dim=-1)
        return images, texts, self.scale.clamp(max=math.log(100)).exp()


model = FSDP(Towers(), device_id=0, use_orig_params=True)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.98))
for _ in range(8):
    images = torch.randn(4, 3, 32, 32, device="cuda")
    tokens = torch.randint(0, 512, (4, 16), device="cuda")
    ours, theirs, scale = model(images, tokens)
    every = torch.cat(dist_nn.all_gather(theirs))
    with torch.no_grad():
        others = [torch.zeros_like(ours) for _ in range(world)]
        dist.all_gather(others, ours)
    others[rank] = ours
    logits = scale * ours @ every.t()
    labels = torch.arange(len(ours), device="cuda") + rank * len(ours)
    back = scale * theirs @ torch.cat(others).t()
    loss = (F.cross_entropy(logits, labels) + F.cross_entropy(back, labels)) / 2
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
