"""Documents packed with varlen attention, microbatches without sync, metrics collected late, a duration in tokens."""

# prints: 3 49152
# prints: 9 147456

import collections
import dataclasses
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.attention.varlen import varlen_attn

EOS = 0


@dataclasses.dataclass
class Duration:
    value: int
    unit: str

    @classmethod
    def tokens(cls, n):
        return cls(n, "tokens")

    def due(self, step, tokens, epoch):
        return {"steps": step, "tokens": tokens, "epochs": epoch}[self.unit] >= self.value


class Attn(nn.Module):
    def __init__(self, d, h):
        super().__init__()
        self.h, self.qkv, self.o, self.qn, self.kn = (
            h,
            nn.Linear(d, 3 * d, bias=False),
            nn.Linear(d, d, bias=False),
            nn.RMSNorm(d // h),
            nn.RMSNorm(d // h),
        )

    def forward(self, x, cu, mx):
        T, D = x.shape
        q, k, v = self.qkv(x).view(T, 3, self.h, -1).unbind(1)
        q, k = self.qn(q).to(v.dtype), self.kn(k).to(v.dtype)
        return self.o(varlen_attn(q, k, v, cu, cu, mx, mx, window_size=(-1, 0)).reshape(T, D))


class Block(nn.Module):
    def __init__(self, d, h):
        super().__init__()
        self.a, self.n1, self.n2, self.f = (
            Attn(d, h),
            nn.RMSNorm(d),
            nn.RMSNorm(d),
            nn.Sequential(nn.Linear(d, 4 * d), nn.SiLU(), nn.Linear(4 * d, d)),
        )

    def forward(self, x, cu, mx):
        x = x + self.n1(self.a(x, cu, mx))
        return x + self.n2(self.f(x))


class LM(nn.Module):
    def __init__(self, d=256, n=3, h=4):
        super().__init__()
        self.e, self.b, self.n, self.o = (
            nn.Embedding(512, d),
            nn.ModuleList(Block(d, h) for _ in range(n)),
            nn.RMSNorm(d),
            nn.Linear(d, 512, bias=False),
        )

    def forward(self, t, cu, mx):
        x = self.e(t)
        for b in self.b:
            x = b(x, cu, mx)
        return self.o(self.n(x))


def doc_lens(t):
    ends = (t == EOS).nonzero(as_tuple=True)[0] + 1
    ends = torch.cat([ends, torch.tensor([len(t)])]) if len(ends) == 0 or ends[-1] != len(t) else ends
    return torch.diff(ends, prepend=torch.zeros(1, dtype=ends.dtype))


class Trainer:
    def __init__(self):
        self.m = LM().cuda()
        [fully_shard(b, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32)) for b in self.m.b]
        fully_shard(self.m, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
        self.o = torch.optim.AdamW(
            [
                {"params": [p for n, p in self.m.named_parameters() if "e.weight" in n], "weight_decay": 0.0},
                {"params": [p for n, p in self.m.named_parameters() if "e.weight" not in n]},
            ],
            1e-3,
            fused=True,
        )
        self.metrics = collections.defaultdict(dict)
        self.step = self.tokens = 0
        self.max = Duration.tokens(dist.get_world_size() * 2048 * 9)

    def record(self, k, v, red=None):
        self.metrics[self.step][k] = (
            v.detach().float() if torch.is_tensor(v) else torch.tensor(float(v)),
            red,
        )

    def flush(self):
        steps = sorted(self.metrics)
        flat = [
            (s, k, v.to("cuda", non_blocking=True), r)
            for s in steps
            for k, (v, r) in sorted(self.metrics[s].items())
        ]
        mean = torch.stack([v / dist.get_world_size() if r == "mean" else v for _, _, v, r in flat])
        dist.reduce(mean, 0)
        out = mean.to("cpu", non_blocking=True)
        torch.cuda.current_stream().synchronize()
        self.metrics.clear()
        return {(s, k): float(o) for (s, k, _, _), o in zip(flat, out, strict=False)}

    def train(self):
        g = torch.Generator().manual_seed(dist.get_rank())
        t0 = time.perf_counter()
        while not self.max.due(self.step, self.tokens, 0):
            self.step += 1
            x = torch.randint(0, 64, (4, 512), generator=g)
            mbs = x.split(1)
            lab = x.clone()
            lab[:, 0] = -100
            lab[:, 1:][x[:, :-1] == EOS] = -100
            n = (lab != -100).sum().to("cuda")
            for i, mb in enumerate(mbs):
                self.m.set_is_last_backward(i == len(mbs) - 1)
                self.m.set_requires_gradient_sync(i == len(mbs) - 1)
                t = mb.view(-1)
                dl = doc_lens(t)
                mx = int(dl.max())
                cu = torch.cat([torch.zeros(1, dtype=torch.int32), dl.cumsum(0).to(torch.int32)]).cuda(
                    non_blocking=True
                )
                y = torch.cat([t[1:], torch.tensor([-100])]).cuda(non_blocking=True)
                lg = self.m(t.cuda(non_blocking=True), cu, mx).float()
                ce = F.cross_entropy(lg, y, ignore_index=-100, reduction="sum") / n
                z = 1e-4 * (torch.logsumexp(lg, -1).pow(2) * (y != -100)).sum() / n
                (ce + z).backward()
                self.record("ce", ce, "mean")
                self.record("z", z, "mean")
            gn = nn.utils.clip_grad_norm_(self.m.parameters(), 1.0, error_if_nonfinite=True).full_tensor()
            self.record("gn", gn)
            self.record("docs", len(dl))
            self.o.step()
            self.o.zero_grad(set_to_none=True)
            self.tokens += x.numel() * dist.get_world_size()
            if self.step % 3 == 0:
                m = self.flush()
                print(
                    self.step,
                    self.tokens,
                    n.item(),
                    {f"{k}@{s}": round(v, 3) for (s, k), v in list(m.items())[:4]},
                    round(self.tokens / (time.perf_counter() - t0)),
                )


dist.init_process_group("nccl")
Trainer().train()
