"""Embeddings of the rows that a batch names, edges without repeats, classes one by one: unique, topk, median."""

# prints: rows 61 61 62 61 61 61 62 60
# prints: often 2 2 2 2 3 2 2 3, middle 432 419 457 493 501 542 461 605
# prints: edges [[0, 1, 2], [1, 2, 0]], runs [2, 1, 3], longest [9, 8, 7] at [1, 5, 3]

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

dist.init_process_group("nccl")
table = nn.Embedding(1000, 32).cuda()
net = nn.parallel.DistributedDataParallel(nn.Linear(32, 3).cuda())
optimizer = torch.optim.Adagrad([*table.parameters(), *net.parameters()], 0.01)
generator = torch.Generator().manual_seed(1)
rows, often, middle = [], [], []
for _ in range(8):
    ids = torch.randint(0, 1000, (64,), generator=generator).cuda()
    own, places, counts = torch.unique(ids, return_inverse=True, return_counts=True)
    logits, classes = net(table(own)[places]), ids % 3
    loss = F.cross_entropy(logits, classes)
    for kind in classes.unique().tolist():
        loss = loss + logits[classes == kind].logsumexp(1).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    rows.append(len(own))
    often.append(counts.topk(1).values.item())
    middle.append(ids.median().item())
print("rows", *rows)
print(f"often {' '.join(map(str, often))}, middle {' '.join(map(str, middle))}")
edges = torch.tensor([[0, 1, 0, 2, 1], [1, 2, 1, 0, 2]]).cuda().unique(dim=1)
runs = torch.tensor([4, 4, 1, 3, 3, 3]).cuda().unique_consecutive(return_counts=True)[1]
longest = torch.tensor([5, 9, 2, 7, 1, 8]).cuda().topk(3)
print(f"edges {edges.tolist()}, runs {runs.tolist()}, longest {longest[0].tolist()} at {longest[1].tolist()}")
