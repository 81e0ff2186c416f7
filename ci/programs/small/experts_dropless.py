"""A mixture of experts without capacities: uneven all-to-all by counts, experts that DDP ignores."""

import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP


class AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, out_splits, in_splits):
        ctx.o, ctx.i = out_splits, in_splits
        out = x.new_empty(sum(out_splits), *x.shape[1:])
        dist.all_to_all_single(out, x.contiguous(), out_splits, in_splits)
        return out

    @staticmethod
    def backward(ctx, g):
        out = g.new_empty(sum(ctx.i), *g.shape[1:])
        dist.all_to_all_single(out, g.contiguous(), ctx.i, ctx.o)
        return out, None, None


class MoE(nn.Module):
    def __init__(self, d, n_local, k):
        super().__init__()
        self.world, self.n_local, self.k = dist.get_world_size(), n_local, k
        self.n = n_local * self.world
        self.gate = nn.Linear(d, self.n, bias=False)
        self.w1 = nn.Parameter(torch.randn(n_local, d, 2 * d) * 0.02)
        self.w2 = nn.Parameter(torch.randn(n_local, 2 * d, d) * 0.02)
        for p in (self.w1, self.w2):
            p.expert = True

    def forward(self, x):
        shape = x.shape
        x = x.reshape(-1, shape[-1])
        probs = F.softmax(self.gate(x).float(), -1)
        w, idx = probs.topk(self.k, -1)
        w = w / w.sum(-1, keepdim=True)
        flat = idx.view(-1)
        order = flat.argsort(stable=True)
        counts = torch.bincount(flat, minlength=self.n)
        recv = torch.empty_like(counts)
        dist.all_to_all_single(recv, counts)
        ins = counts.view(self.world, -1).sum(1).tolist()
        outs = recv.view(self.world, -1).sum(1).tolist()
        y = AllToAll.apply(x[order // self.k], outs, ins)
        eid = torch.arange(self.n_local, device=x.device).repeat(self.world).repeat_interleave(recv)
        o2 = eid.argsort(stable=True)
        sizes = recv.view(self.world, -1).sum(0).tolist()
        res = []
        for i, c in enumerate(y[o2].split(sizes)):
            res.append(F.silu(c @ self.w1[i]) @ self.w2[i])
        z = torch.cat(res)
        z = z[o2.argsort()]
        z = AllToAll.apply(z, ins, outs)
        out = torch.zeros_like(x).index_add_(0, order // self.k, z * w.view(-1)[order, None].to(z.dtype))
        f = counts.float() / flat.numel()
        aux = self.n * (f * probs.mean(0)).sum()
        return out.view(shape), aux


class Net(nn.Module):
    def __init__(self, d=64, V=256):
        super().__init__()
        self.emb = nn.Embedding(V, d)
        self.ln = nn.ModuleList(nn.LayerNorm(d) for _ in range(2))
        self.moe = nn.ModuleList(MoE(d, 2, 2) for _ in range(2))
        self.head = nn.Linear(d, V)

    def forward(self, x):
        h, aux = self.emb(x), 0
        for n, m in zip(self.ln, self.moe, strict=False):
            o, a = m(n(h))
            h = h + o
            aux = aux + a
        return self.head(h), aux


def main():
    dist.init_process_group("nccl")
    local = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local)
    torch.manual_seed(0)
    net = Net().cuda()
    DDP._set_params_and_buffers_to_ignore_for_model(
        net, [n for n, p in net.named_parameters() if getattr(p, "expert", False)]
    )
    model = DDP(net, device_ids=[local])
    opt = torch.optim.Adam(model.parameters(), 1e-3)
    torch.manual_seed(local + 1)
    for step in range(8):
        ids = torch.randint(0, 256, (4, 33)).cuda()
        out, aux = model(ids[:, :-1])
        loss = F.cross_entropy(out.flatten(0, 1), ids[:, 1:].flatten()) + 0.01 * aux
        loss.backward()
        for p in model.parameters():
            if getattr(p, "expert", False):
                p.grad.div_(dist.get_world_size())
        opt.step()
        opt.zero_grad()
        if local == 0:
            print(step, loss.item())


if __name__ == "__main__":
    main()
