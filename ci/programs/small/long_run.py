"""Forty steps to the end, with garbage in cycles, exceptions that hold tensors, and hooks that keep themselves."""

# prints: memory stays True
# prints: times stay True

import time

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.fsdp import fully_shard


class Trainer:
    def __init__(self):
        self.m = nn.Sequential(
            *[nn.TransformerEncoderLayer(128, 4, 512, 0, batch_first=True) for _ in range(3)]
        ).cuda()
        [fully_shard(b) for b in self.m]
        fully_shard(self.m)
        self.o = torch.optim.AdamW(self.m.parameters(), 1e-3)
        self.hist = []
        self.acts = {}
        self.m[1].linear1.register_forward_hook(self.hook)
        self.cb = [self.on_step]

    def hook(self, mod, i, o):
        self.acts["l1"] = (o.detach(), self)

    def on_step(self, s):
        self.last = s

    def evaluate(self):
        class Ctx:
            pass

        c = Ctx()
        c.self = c
        c.buf = torch.empty(32 << 20, dtype=torch.uint8, device="cuda")
        try:
            with torch.no_grad():
                y = self.m(torch.randn(4, 16, 128, device="cuda"))
                raise ValueError("bad batch")
        except ValueError as e:
            c.err = e
            return y.shape[0]

    def step(self, s):
        x = torch.randn(8, 32, 128, device="cuda")
        y = self.m(x)
        l = y.square().mean()
        l.backward()
        nn.utils.clip_grad_norm_(self.m.parameters(), 1.0)
        self.o.step()
        self.o.zero_grad()
        self.hist.append(l.detach())
        [c(s) for c in self.cb]
        return l


dist.init_process_group("nccl")
t = Trainer()
mem, times = [], []
for s in range(40):
    t0 = time.perf_counter()
    t.step(s)
    torch.cuda.synchronize()
    times.append(round(1e3 * (time.perf_counter() - t0), 3))
    t.evaluate()
    mem.append(torch.cuda.memory_allocated() >> 20)
print("memory stays", max(mem[3:]) == min(mem[3:]))
print("times stay", max(times[3:]) < 1.01 * min(times[3:]), times[3:6], times[-3:])
