"""A model made on the host with tied weights, its optimizer made before it is moved, and swapped out for a while."""

# prints: tied True, states 3, MiB moved 48 48

import torch
import torch.distributed as dist
from torch import nn


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.norm = nn.Embedding(8192, 512), nn.LayerNorm(512)
        self.head = nn.Linear(512, 8192, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids):
        return self.head(self.norm(self.table(ids)))


def mebibytes():
    return torch.cuda.memory_allocated() >> 20


dist.init_process_group("nccl")
model = Tied()
optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
model.cuda()
for _ in range(8):
    ids = torch.randint(0, 8192, (8, 64)).cuda()
    nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten()).backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad, dist.ReduceOp.AVG)
    optimizer.step()
    optimizer.zero_grad()
states, tied = len(optimizer.state), model.head.weight is model.table.weight
before = mebibytes()
model.cpu()
for state in optimizer.state.values():
    state.update({name: value.cpu() for name, value in state.items()})
away = mebibytes()
model.cuda()
for state in optimizer.state.values():
    state.update({name: value.cuda() for name, value in state.items()})
print(f"tied {tied}, states {states}, MiB moved {before - away} {mebibytes() - away}")
