"""Sequences packed into one row: document masks, positions by document, varlen attention, losses by tokens."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from tiny import VOCAB, WIDTH
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.attention import SDPBackend, sdpa_kernel

LENGTHS = (60, 20, 48)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x, mask):
        q, k, v = (p.unflatten(-1, (4, -1)).transpose(1, 2) for p in self.qkv(x).chunk(3, -1))
        with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return x + self.out(y.transpose(1, 2).flatten(2))


dist.init_process_group("nccl")
embed, head = nn.Embedding(VOCAB, WIDTH).cuda(), nn.Linear(WIDTH, VOCAB).cuda()
layers = nn.ModuleList(Layer() for _ in range(3)).cuda()
model = nn.ModuleDict({"embed": embed, "layers": layers, "head": head})
for module in (embed, *layers, head):
    fully_shard(module)
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(8):
    ids = torch.randint(0, VOCAB, (1, sum(LENGTHS)))
    documents = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))[None]
    ends = torch.tensor(LENGTHS).cumsum(0)
    labels = ids.roll(-1, 1)
    labels[0, ends - 1] = -100
    ids, labels, documents = (t.cuda(non_blocking=True) for t in (ids, labels, documents))
    same = documents[:, :, None] == documents[:, None, :]
    mask = (same & torch.ones_like(same).tril())[:, None]
    x = embed(ids)
    for layer in layers:
        x = layer(x, mask)
    logits = head(x).float()
    count = (labels != -100).sum()
    dist.all_reduce(count)
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")
    (loss * dist.get_world_size() / count).backward()
    optimizer.step()
    optimizer.zero_grad()
    assert int(count) == 8 * (sum(LENGTHS) - len(LENGTHS)), int(count)
