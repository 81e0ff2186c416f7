"""Ring attention by hand: keys and values travel around the ranks by batch_isend_irecv, in both directions of autograd."""

import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F


class RingComm:
    def __init__(self, group):
        self._ops = []
        self.rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)
        self._reqs = None
        self.group = group
        self.send_rank = (
            dist.get_global_rank(group, (self.rank + 1) % self.world_size)
            if group is not None
            else (self.rank + 1) % self.world_size
        )
        self.recv_rank = (
            dist.get_global_rank(group, (self.rank - 1) % self.world_size)
            if group is not None
            else (self.rank - 1) % self.world_size
        )

    def send_recv(self, to_send, recv_tensor=None):
        res = torch.empty_like(to_send) if recv_tensor is None else recv_tensor
        self._ops.append(dist.P2POp(dist.isend, to_send, self.send_rank, group=self.group))
        self._ops.append(dist.P2POp(dist.irecv, res, self.recv_rank, group=self.group))
        return res

    def commit(self):
        if self._reqs is not None:
            raise RuntimeError("commit called twice")
        self._reqs = dist.batch_isend_irecv(self._ops)

    def wait(self):
        for req in self._reqs:
            req.wait()
        self._reqs, self._ops = None, []


def block_fwd(q, k, v, scale, causal):
    s = (q @ k.transpose(-2, -1)).float() * scale
    if causal:
        s = s.masked_fill(torch.ones(s.shape[-2:], dtype=torch.bool, device=s.device).triu(1), float("-inf"))
    lse = s.logsumexp(-1, keepdim=True)
    return (s - lse).exp().to(v.dtype) @ v, lse


class RingAttn(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, scale, group):
        comm = RingComm(group)
        out = lse = None
        ks, vs = k.contiguous(), v.contiguous()
        for step in range(comm.world_size):
            if step + 1 != comm.world_size:
                nk, nv = comm.send_recv(ks), comm.send_recv(vs)
                comm.commit()
            if step <= comm.rank:
                o, l = block_fwd(q, ks, vs, scale, causal=step == 0)
                if out is None:
                    out, lse = o.float(), l
                else:
                    new = torch.logaddexp(lse, l)
                    out = out * (lse - new).exp() + o.float() * (l - new).exp()
                    lse = new
            if step + 1 != comm.world_size:
                comm.wait()
                ks, vs = nk, nv
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.scale, ctx.group = scale, group
        return out

    @staticmethod
    def backward(ctx, dout):
        q, k, v, out, lse = ctx.saved_tensors
        kvc, dc = RingComm(ctx.group), RingComm(ctx.group)
        delta = (dout * out).float().sum(-1, keepdim=True)
        dq = torch.zeros_like(q, dtype=torch.float32)
        dk = dv = None
        ndk = ndv = None
        ks, vs = k.contiguous(), v.contiguous()
        for step in range(kvc.world_size):
            if step + 1 != kvc.world_size:
                nk, nv = kvc.send_recv(ks), kvc.send_recv(vs)
                kvc.commit()
            bk = torch.zeros_like(k, dtype=torch.float32)
            bv = torch.zeros_like(v, dtype=torch.float32)
            if step <= kvc.rank:
                s = (q @ ks.transpose(-2, -1)).float() * ctx.scale
                if step == 0:
                    s = s.masked_fill(
                        torch.ones(s.shape[-2:], dtype=torch.bool, device=s.device).triu(1), float("-inf")
                    )
                p = (s - lse).exp()
                bv = p.transpose(-2, -1) @ dout.float()
                ds = p * ((dout @ vs.transpose(-2, -1)).float() - delta) * ctx.scale
                dq += ds @ ks.float()
                bk = ds.transpose(-2, -1) @ q.float()
            if step == 0:
                dk, dv = bk, bv
            else:
                dc.wait()
                dk, dv = ndk + bk, ndv + bv
            if step + 1 != kvc.world_size:
                kvc.wait()
                ks, vs = nk, nv
            ndk, ndv = dc.send_recv(dk), dc.send_recv(dv)
            dc.commit()
        dc.wait()
        return dq.to(q.dtype), ndk.to(k.dtype), ndv.to(v.dtype), None, None


class Block(nn.Module):
    def __init__(self, d, h):
        super().__init__()
        self.h = h
        self.qkv, self.o = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.n1, self.n2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.mlp = nn.Sequential(nn.Linear(d, 4 * d), nn.GELU(), nn.Linear(4 * d, d))

    def forward(self, x):
        B, T, C = x.shape
        q, k, v = self.qkv(self.n1(x)).view(B, T, 3, self.h, C // self.h).permute(2, 0, 3, 1, 4)
        a = RingAttn.apply(q, k, v, (C // self.h) ** -0.5, dist.group.WORLD)
        x = x + self.o(a.transpose(1, 2).reshape(B, T, C))
        return x + self.mlp(self.n2(x))


def main():
    dist.init_process_group("nccl")
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    torch.manual_seed(0)
    d, seq = 128, 64 * world
    emb = nn.Embedding(512, d)
    pos = nn.Embedding(seq, d)
    model = nn.ModuleDict(
        {
            "emb": emb,
            "pos": pos,
            "blocks": nn.ModuleList(Block(d, 4) for _ in range(3)),
            "head": nn.Linear(d, 512),
        }
    ).to(device)
    for p in model.parameters():
        dist.broadcast(p.data, src=0)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
    gen = torch.Generator().manual_seed(7)  # all ranks: the same sequence
    for step in range(8):
        tokens = torch.randint(0, 512, (2, seq + 1), generator=gen)
        x = tokens[:, :-1].chunk(world, 1)[rank].to(device)
        y = tokens[:, 1:].chunk(world, 1)[rank].to(device)
        at = torch.arange(rank * 64, (rank + 1) * 64, device=device)
        h = model["emb"](x) + model["pos"](at)
        for b in model["blocks"]:
            h = b(h)
        loss = F.cross_entropy(model["head"](h).flatten(0, 1), y.flatten())
        loss.backward()
        for p in model.parameters():
            dist.all_reduce(p.grad, op=dist.ReduceOp.AVG)
        opt.step()
        opt.zero_grad(set_to_none=True)
        l = loss.detach().clone()
        dist.all_reduce(l, op=dist.ReduceOp.AVG)
        if rank == 0:
            print(step, l.item())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
