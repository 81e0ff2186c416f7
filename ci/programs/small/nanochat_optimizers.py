"""A pretraining loop of the kind of nanochat: AdamW and Muon that reduce and gather themselves, by futures."""

import math
import os
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor


def compute_init():
    ddp = int(os.environ.get("RANK", -1)) != -1
    assert ddp
    rank, local, world = (int(os.environ[k]) for k in ("RANK", "LOCAL_RANK", "WORLD_SIZE"))
    torch.manual_seed(42)
    torch.cuda.manual_seed(42)
    torch.set_float32_matmul_precision("high")
    device = torch.device("cuda", local)
    torch.cuda.set_device(device)
    dist.init_process_group(backend="nccl", device_id=device)
    dist.barrier()
    return rank, local, world, device


def zeropower_via_newtonschulz5(G: Tensor, steps: int) -> Tensor:
    a, b, c = (3.4445, -4.7750, 2.0315)
    X = G.bfloat16()
    if G.size(-2) > G.size(-1):
        X = X.mT
    X = X / (X.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        A = X @ X.mT
        B = b * A + c * A @ A
        X = a * X + B @ X
    if G.size(-2) > G.size(-1):
        X = X.mT
    return X


class DistMuon(torch.optim.Optimizer):
    def __init__(self, params, lr=0.02, momentum=0.95, nesterov=True, ns_steps=5):
        params = list(params)
        assert all(p.ndim == 2 for p in params)
        shapes = sorted({p.shape for p in params})
        groups = []
        for shape in shapes:
            gp = [p for p in params if p.shape == shape]
            groups.append({"params": gp, "zero_buffer": torch.zeros_like(gp[0])})
        super().__init__(groups, {"lr": lr, "momentum": momentum, "nesterov": nesterov, "ns_steps": ns_steps})

    @torch.no_grad()
    def step(self):
        rank, world_size = dist.get_rank(), dist.get_world_size()
        assert all(p.grad is not None for group in self.param_groups for p in group["params"])
        all_reduce_futures = []
        for group in self.param_groups:
            params, zero = group["params"], group["zero_buffer"]
            for base in range(0, len(params), world_size):
                owner = base + rank
                rs_in = [p.grad for p in params[base : base + world_size]]
                rs_in.extend([zero] * (world_size - len(rs_in)))
                rs_out = params[owner].grad if owner < len(params) else torch.empty_like(zero)
                all_reduce_futures.append(
                    dist.reduce_scatter(rs_out, rs_in, op=dist.ReduceOp.AVG, async_op=True).get_future()
                )
        gathers, i = [], 0
        for group in self.param_groups:
            params, zero = group["params"], group["zero_buffer"]
            for base in range(0, len(params), world_size):
                owner = base + rank
                all_reduce_futures[i].wait()
                i += 1
                if owner < len(params):
                    p = params[owner]
                    g = p.grad
                    state = self.state[p]
                    if "momentum_buffer" not in state:
                        state["momentum_buffer"] = torch.zeros_like(g)
                    buf = state["momentum_buffer"]
                    buf.lerp_(g, 1.0 - group["momentum"])
                    g = g.lerp_(buf, group["momentum"]) if group["nesterov"] else buf
                    g = zeropower_via_newtonschulz5(g, steps=group["ns_steps"])
                    scale = max(1.0, p.size(-2) / p.size(-1)) ** 0.5
                    p.add_(g, alpha=-group["lr"] * scale)
                ag_in = params[owner] if owner < len(params) else zero
                ag_out = params[base : base + world_size]
                ag_out.extend([torch.empty_like(zero) for _ in range(world_size - len(ag_out))])
                gathers.append(dist.all_gather(ag_out, ag_in, async_op=True).get_future())
        torch.futures.collect_all(gathers).wait()


class DistAdamW(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self):
        rank, world = dist.get_rank(), dist.get_world_size()
        futures, slices = [], []
        for group in self.param_groups:
            for p in group["params"]:
                rs = p.grad.shape[0] // world
                out = torch.empty_like(p.grad[:rs])
                futures.append(
                    dist.reduce_scatter_tensor(out, p.grad, op=dist.ReduceOp.AVG, async_op=True).get_future()
                )
                slices.append(out)
        idx, gathers = 0, []
        for group in self.param_groups:
            b1, b2 = group["betas"]
            for p in group["params"]:
                futures[idx].wait()
                rs = p.shape[0] // world
                p_slice = p[rank * rs : (rank + 1) * rs]
                g = slices[idx]
                idx += 1
                state = self.state[p]
                if not state:
                    state["step"] = torch.tensor(0, dtype=torch.int64, device=p.device)
                    state["exp_avg"] = torch.zeros_like(p_slice)
                    state["exp_avg_sq"] = torch.zeros_like(p_slice)
                state["step"] += 1
                p_slice.mul_(1 - group["lr"] * group["weight_decay"])
                state["exp_avg"].mul_(b1).add_(g, alpha=1 - b1)
                state["exp_avg_sq"].mul_(b2).addcmul_(g, g, value=1 - b2)
                bias1 = 1 - b1 ** state["step"]
                bias2 = 1 - b2 ** state["step"]
                denom = state["exp_avg_sq"].sqrt().add_(group["eps"])
                p_slice.add_(
                    state["exp_avg"].div(denom).mul_(group["lr"] * (torch.sqrt(bias2) / bias1)), alpha=-1.0
                )
                gathers.append(dist.all_gather_into_tensor(p, p_slice, async_op=True).get_future())
        torch.futures.collect_all(gathers).wait()


def norm(x):
    return F.rms_norm(x, (x.size(-1),))


def rotary(x, cos, sin):
    d = x.shape[3] // 2
    x1, x2 = x[..., :d], x[..., d:]
    return torch.cat([x1 * cos + x2 * sin, -x1 * sin + x2 * cos], 3).to(x.dtype)


class Block(nn.Module):
    def __init__(self, d, h):
        super().__init__()
        self.h = h
        self.c_q, self.c_k, self.c_v, self.c_proj = (nn.Linear(d, d, bias=False) for _ in range(4))
        self.c_fc, self.c_out = nn.Linear(d, 4 * d, bias=False), nn.Linear(4 * d, d, bias=False)

    def forward(self, x, cos, sin):
        B, T, C = x.shape
        y = norm(x)
        q, k, v = (f(y).view(B, T, self.h, -1) for f in (self.c_q, self.c_k, self.c_v))
        q, k = norm(rotary(q, cos, sin)), norm(rotary(k, cos, sin))
        y = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)), is_causal=True)
        x = x + self.c_proj(y.transpose(1, 2).reshape(B, T, C))
        return x + self.c_out(F.relu(self.c_fc(norm(x))).square())


class GPT(nn.Module):
    def __init__(self, vocab=1024, d=256, h=4, n=4, T=256):
        super().__init__()
        self.wte = nn.Embedding(vocab, d)
        self.blocks = nn.ModuleList(Block(d, h) for _ in range(n))
        self.lm_head = nn.Linear(d, vocab, bias=False)
        f = 10000 ** -(torch.arange(0, d // h, 2).float() / (d // h))
        ang = torch.outer(torch.arange(T).float(), f)
        self.register_buffer("cos", ang.cos()[None, :, None].bfloat16(), persistent=False)
        self.register_buffer("sin", ang.sin()[None, :, None].bfloat16(), persistent=False)

    def forward(self, idx, targets):
        x = norm(self.wte(idx))
        for b in self.blocks:
            x = b(x, self.cos[:, : idx.size(1)], self.sin[:, : idx.size(1)])
        logits = self.lm_head(norm(x))
        logits = 15 * torch.tanh(logits / 15)
        return F.cross_entropy(logits.float().view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)


def main():
    rank, _local, world, device = compute_init()
    master = rank == 0
    B, T, total = 4, 256, 4 * 256 * world * 2
    accum = total // (B * T * world)
    with torch.device("meta"):
        model = GPT()
    model.to_empty(device=device)
    for m in model.modules():
        if isinstance(m, nn.Linear):
            nn.init.normal_(m.weight, std=1 / math.sqrt(m.in_features))
        elif isinstance(m, nn.Embedding):
            nn.init.normal_(m.weight)
    f = 10000 ** -(torch.arange(0, 64, 2, device=device).float() / 64)
    ang = torch.outer(torch.arange(T, device=device).float(), f)
    model.cos, model.sin = ang.cos()[None, :, None].bfloat16(), ang.sin()[None, :, None].bfloat16()
    model.wte.to(dtype=torch.bfloat16)
    adam = DistAdamW(
        [{"params": [model.lm_head.weight], "lr": 0.004}, {"params": [model.wte.weight], "lr": 0.2}],
        betas=(0.8, 0.95),
    )
    muon = DistMuon(model.blocks.parameters())
    opts = [adam, muon]
    for o in opts:
        for g in o.param_groups:
            g["initial_lr"] = g["lr"]
    gen = torch.Generator().manual_seed(1337 + rank)
    autocast = torch.amp.autocast(device_type="cuda", dtype=torch.bfloat16)
    smooth, _t_total = 0.0, 0.0
    for step in range(10):
        torch.cuda.synchronize()
        t0 = time.time()
        for _ in range(accum):
            buf = torch.randint(0, 1024, (B * T + 1,), generator=gen).pin_memory()
            x = buf[:-1].view(B, T).to(device, non_blocking=True)
            y = buf[1:].view(B, T).to(device, non_blocking=True)
            with autocast:
                loss = model(x, y)
            train_loss = loss.detach()
            (loss / accum).backward()
        for o in opts:
            for g in o.param_groups:
                g["lr"] = g["initial_lr"] * (1 - step / 10)
        for g in muon.param_groups:
            g["momentum"] = (1 - min(step / 300, 1)) * 0.85 + min(step / 300, 1) * 0.95
        for o in opts:
            o.step()
        model.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        dt = time.time() - t0
        smooth = 0.9 * smooth + 0.1 * train_loss.item()
        if master:
            print(
                f"step {step:05d} | loss {smooth / (1 - 0.9 ** (step + 1)):.6f} | dt {dt * 1000:.2f}ms | tok/s {int(total / dt) if dt else 0}"
            )
    if master:
        print(f"Peak memory usage: {torch.cuda.max_memory_allocated() / 1024 / 1024:.2f}MiB")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
