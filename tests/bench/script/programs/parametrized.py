"""Weight and spectral norms by nn.utils.parametrize, buffers that change, and weights that are tied."""

import torch
import torch.distributed as dist
from tiny import GPT, LENGTH, VOCAB
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.utils import parametrizations, parametrize


class Symmetric(nn.Module):
    def forward(self, weight):
        return weight.triu() + weight.triu(1).transpose(-1, -2)


dist.init_process_group("nccl")
model = GPT()
for block in model.blocks:
    parametrizations.weight_norm(block.mlp[0])
    parametrize.register_parametrization(block.out, "weight", Symmetric())
model.head.weight = model.embed.weight
model.register_buffer("seen", torch.zeros((), dtype=torch.long))
model = model.cuda()
for block in model.blocks:
    fully_shard(block)
fully_shard(model)
optimizer = torch.optim.Adamax(model.parameters())
for _ in range(8):
    tokens = torch.randint(0, VOCAB, (2, LENGTH), device="cuda")
    with parametrize.cached():
        model(tokens, tokens).backward()
    model.seen += 1
    optimizer.step()
    optimizer.zero_grad()
print(int(model.seen))
