"""Ragged rows packed on the device: zeros filled by slices, masks as indices, offsets, a prefix mask."""

# prints: 0 True True True True True True True True True True
# prints: 8 True True True True True True True True True True

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

dist.init_process_group("nccl")
w = dist.get_world_size()
torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
g = torch.Generator().manual_seed(dist.get_rank())
m = nn.Sequential(nn.Embedding(100, 64), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 100)).cuda()
d = nn.parallel.DistributedDataParallel(m)
o = torch.optim.AdamW(d.parameters())
for s in range(9):
    L = torch.randint(3, 20, (6,), generator=g).tolist()
    ids = torch.full((6, 24), 0, device="cuda")
    lab = torch.full((6, 24), -100, dtype=torch.long, device="cuda")
    att = torch.zeros(6, 24, dtype=torch.bool, device="cuda")
    seg = torch.zeros(6, 24, dtype=torch.int32, device="cuda")
    pos = torch.zeros(6, 24, dtype=torch.long, device="cuda")
    for i, n in enumerate(L):
        r = torch.randint(1, 100, (n,), generator=g).cuda()
        ids[i, :n] = r
        lab[i, 2:n] = r[2:]
        att[i, :n] = True
        seg[i, :n] = 1
        seg[i, n // 2 : n] += 1
        pos[i, :n] = torch.arange(n, device="cuda")
    real = att.sum()
    lens = att.sum(1)
    cu = F.pad(lens.cumsum(0), (1, 0)).int()
    flat = ids[att]
    y = lab[att]
    keep = y != -100
    prefix = (
        (torch.arange(24, device="cuda")[None, None] <= torch.arange(24, device="cuda")[None, :, None])
        & (seg[:, None] == seg[:, :, None])
        & att[:, None]
    )
    hist = torch.bincount(lens, minlength=25)
    last = (lens - 1).clamp(min=0)
    longest = int(lens.max())
    ids = ids[:, :longest]
    x = d(flat)
    l = F.cross_entropy(x[keep], y[keep], label_smoothing=0.1)
    l.backward()
    o.step()
    o.zero_grad()
    tot = torch.stack([real, keep.sum()])
    dist.all_reduce(tot)
    kept, half, turns = int(keep.sum()), sum(n // 2 for n in L), [n * (n + 1) // 2 for n in L]
    pairs = sum(n // 2 * (n // 2 + 1) // 2 + (n - n // 2) * (n - n // 2 + 1) // 2 for n in L)
    print(
        s,
        real.item() == sum(L),
        lens.tolist() == L,
        cu[-1].item() == sum(L),
        len(flat) == sum(L),
        kept == sum(n - 2 for n in L),
        int(prefix.sum()) == pairs,
        longest == max(L),
        hist.sum().item() == 6,
        int(pos.sum()) == sum(turns) - sum(L),
        tot.tolist() == [w * sum(L), w * kept],
        half,
    )
