"""A transformer in bfloat16 on FSDP, drawn at random: `SEED [own|sum|dropped] [rounds]`. Its fault, if any:
gradients of `own` are never reduced, those of `sum` not divided by the ranks; `dropped` loses a microbatch.
`rounds`: sharded, products add their halves, as a kernel may that is chosen by where weights lie."""

import contextlib
import os
import random
import sys
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import (
    FSDPModule,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.utils.checkpoint import checkpoint

draw, fault = random.Random(int(sys.argv[1])), " ".join(sys.argv[2:])
WIDTH, HEADS, GROUPS = draw.choice((64, 128)), draw.choice((4, 8)), draw.choice((1, 2, 4))
LAYERS, TOKENS, ROWS, BATCHES = (
    draw.randint(8, 24),
    draw.choice((4, 8, 16)),
    draw.randint(1, 2),
    draw.randint(1, 4),
)
BATCHES = max(2, BATCHES) if "dropped" in fault else BATCHES
SHARP, TIED, RECOMPUTED = draw.choice((1.0, 2.0, 4.0, 6.0)), draw.random() < 0.5, draw.random() < 0.5
PRECISION, API = draw.choice(("autocast", "policy", "both", "plain")), draw.choice((1, 2))
LOW, REDUCED = torch.bfloat16, draw.choice((torch.float32, torch.bfloat16))
FEW = draw.random() < 0.3  # valid tokens
WORDS, EPOCHS = 512, 5
HALVES = "rounds" in fault and FullyShardedDataParallel.__module__.startswith("torch.")


class Linear(nn.Linear):
    """A product without bias."""

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__(rows, columns, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not HALVES:
            return super().forward(x)
        pairs = zip(x.chunk(2, -1), self.weight.chunk(2, 1), strict=True)
        first, second = (F.linear(*each) for each in pairs)
        return first + second


class Block(nn.Module):
    """Attention with grouped queries, and a gated layer."""

    def __init__(self) -> None:
        super().__init__()
        self.size = WIDTH // HEADS
        self.first, self.second = nn.RMSNorm(WIDTH, eps=1e-6), nn.RMSNorm(WIDTH, eps=1e-6)
        self.query, self.out = (Linear(WIDTH, WIDTH) for _ in range(2))
        self.key, self.value = (Linear(WIDTH, GROUPS * self.size) for _ in range(2))
        self.gate, self.up = (Linear(WIDTH, 2 * WIDTH) for _ in range(2))
        self.down = Linear(2 * WIDTH, WIDTH)
        with torch.no_grad():
            for each in (self.query, self.key):
                each.weight *= SHARP

    def attention(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = (
            each(x).unflatten(-1, (-1, self.size)).transpose(1, 2)
            for each in (self.query, self.key, self.value)
        )
        found = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return self.out(found.transpose(1, 2).flatten(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.first(x))
        h = self.second(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.norm = nn.Embedding(WORDS, WIDTH), nn.RMSNorm(WIDTH, eps=1e-6)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.head = Linear(WIDTH, WORDS)
        if TIED:
            self.head.weight = self.words.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if RECOMPUTED else block(x)
        return self.head(self.norm(x))


def sharded(model: nn.Module) -> Any:
    """Shard a model by blocks."""
    param = LOW if PRECISION in ("policy", "both") else None
    if API == 1:
        precision = MixedPrecision(param, REDUCED) if param else None
        return FullyShardedDataParallel(
            model, auto_wrap_policy=ModuleWrapPolicy({Block}), mixed_precision=precision, use_orig_params=True
        )
    policy = MixedPrecisionPolicy(param_dtype=param, reduce_dtype=REDUCED if param else None)
    for block in model.blocks:
        fully_shard(block, mp_policy=policy)
    return fully_shard(model, mp_policy=policy)


torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")
torch.manual_seed(int(sys.argv[1]))
model = Model().to(LOW if PRECISION == "plain" else torch.float32).cuda()
model = sharded(model)
if "sum" in fault and API == 1:
    model.register_comm_hook(None, lambda state, whole, part: dist.reduce_scatter_tensor(part, whole))
elif "sum" in fault:
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(EPOCHS):
    for batch in range(BATCHES):
        generator = torch.Generator().manual_seed(1000 * step + 10 * batch + dist.get_rank())
        tokens = torch.randint(WORDS, (ROWS, TOKENS + 1), generator=generator).cuda()
        reduces = "own" not in fault
        waits = contextlib.nullcontext() if reduces or API == 2 else model.no_sync()
        if API == 2:
            model.set_requires_gradient_sync(reduces)
        with waits:
            with torch.autocast("cuda", LOW, enabled=PRECISION in ("autocast", "both")):
                scores = model(tokens[:, :-1])
            wanted = tokens[:, 1:].clone()
            if FEW:
                wanted[:, : TOKENS // 2] = -100
            loss = F.cross_entropy(scores.float().flatten(0, 1), wanted.flatten()) / BATCHES
            loss.backward()
        if "dropped" in fault and batch == 0:
            optimizer.zero_grad()
    optimizer.step()
    optimizer.zero_grad()
