"""Jagged tensors through linear layers, norms, flash attention and an embedding, under DDP by hooks."""

# prints: 7 True True True

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F


class Block(nn.Module):
    def __init__(self, d=128, h=4):
        super().__init__()
        self.h, self.qkv, self.o, self.n1, self.n2, self.m = (
            h,
            nn.Linear(d, 3 * d),
            nn.Linear(d, d),
            nn.LayerNorm(d),
            nn.LayerNorm(d),
            nn.Sequential(nn.Linear(d, 4 * d), nn.GELU(), nn.Linear(4 * d, d)),
        )

    def forward(self, x):
        q, k, v = self.qkv(self.n1(x)).chunk(3, -1)
        q, k, v = (t.unflatten(-1, [self.h, -1]).transpose(1, 2) for t in (q, k, v))
        x = x + self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2))
        return x + self.m(self.n2(x))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.e, self.b, self.o = (
            nn.Embedding(100, 128),
            nn.ModuleList(Block() for _ in range(2)),
            nn.Linear(128, 100),
        )

    def forward(self, t):
        x = self.e(t)
        for b in self.b:
            x = b(x)
        return self.o(x)


dist.init_process_group("nccl")
m = Net().cuda()
o = torch.optim.AdamW(m.parameters())
g = torch.Generator().manual_seed(dist.get_rank())
for p in m.parameters():
    p.register_post_accumulate_grad_hook(lambda p: dist.all_reduce(p.grad, op=dist.ReduceOp.AVG))
for s in range(8):
    L = torch.randint(5, 40, (8,), generator=g).tolist()
    nt = torch.nested.nested_tensor(
        [torch.randint(0, 100, (l,), generator=g) for l in L], layout=torch.jagged, device="cuda"
    )
    with torch.autocast("cuda", torch.bfloat16):
        y = m(nt)
    v = y.values()
    loss = F.cross_entropy(v.float(), nt.values())
    pad = y.to_padded_tensor(0.0)
    loss.backward()
    o.step()
    o.zero_grad()
    print(s, v.shape == (sum(L), 100), pad.shape[1] == max(L), nt.offsets().tolist()[-1] == sum(L))
