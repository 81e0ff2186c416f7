"""A Llama in the forms of published code, trained with PyTorch's FSDP2.

    fsdpbench run --script docs/examples/llama_as_published.py --gpus 8 -- --norm composed --rotary complex

What these forms cost is the same as with the bench's own model and the settings `norm`, `rotary`, `loss`,
`clip` and `checkpoint_first` (a test compares them):

    norm        composed   RMSNorm of operators in fp32: Meta's Llama, TorchTitan until 2025, fms
    rotary      complex    complex numbers in fp32: Meta's Llama, TorchTitan
                matrices   2 x 2 matrices in fp32: foundation-model-stack (fms)
                halves     halves in the model's dtype: Hugging Face transformers
    loss        fp32       logits cast to fp32: TorchTitan; `low` leaves them in bf16: fms-fsdp
    clip        1.0        TorchTitan, fms-fsdp
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint


class ComposedNorm(nn.Module):
    """RMSNorm of single operators, normalised in fp32 and cast back before the weights."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
        return normed.type_as(x) * self.weight


def angles(length: int, width: int, theta: float, device: torch.device) -> Tensor:
    """[length, width / 2]: by how much each pair of a head turns at each position."""
    speeds = theta ** (-torch.arange(0, width, 2, device=device, dtype=torch.float32) / width)
    return torch.outer(torch.arange(length, device=device, dtype=torch.float32), speeds)


def turn(x: Tensor, table: Tensor, rotary: str) -> Tensor:
    """x: [batch, heads, length, width of a head]."""
    if rotary == "complex":
        numbers = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
        return torch.view_as_real(numbers * table).flatten(-2).type_as(x)
    if rotary == "matrices":
        pairs = x.float().unflatten(-1, (-1, 2)).unsqueeze(-2)
        return (table * pairs).sum(-1).flatten(-2).type_as(x)
    first, second = x.chunk(2, dim=-1)
    cosines, sines = table
    return x * cosines + torch.cat((-second, first), dim=-1) * sines


def make_table(turns: Tensor, rotary: str, batch: int, dtype: torch.dtype) -> Tensor:
    """Return the factors of `turn`, made once a forward."""
    if rotary == "complex":
        return torch.polar(torch.ones_like(turns), turns)
    if rotary == "matrices":
        cosines, sines = turns.cos(), turns.sin()
        matrices = torch.stack((cosines, -sines, sines, cosines), -1).unflatten(-1, (2, 2))
        return matrices.repeat(batch, 1, 1, 1, 1).unsqueeze(1)
    both = torch.cat((turns, turns), dim=-1)
    return torch.stack((both.cos(), both.sin())).to(dtype)


class Block(nn.Module):
    """Grouped-query attention and SwiGLU."""

    def __init__(self, options: argparse.Namespace, checkpointed: bool) -> None:
        super().__init__()
        width, kv = options.width, options.width // options.heads * options.kv_heads
        norm = ComposedNorm if options.norm == "composed" else nn.RMSNorm
        self.rotary, self.head, self.checkpointed = options.rotary, width // options.heads, checkpointed
        self.grouped = options.kv_heads != options.heads
        self.attention_norm, self.feed_forward_norm = norm(width), norm(width)
        self.wq, self.wk, self.wv = (nn.Linear(width, size, bias=False) for size in (width, kv, kv))
        self.wo = nn.Linear(width, width, bias=False)
        self.w1, self.w3 = (nn.Linear(width, options.ffn, bias=False) for _ in range(2))
        self.w2 = nn.Linear(options.ffn, width, bias=False)

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        if self.checkpointed:
            return checkpoint(self.inside, x, table, use_reentrant=False, preserve_rng_state=False)
        return self.inside(x, table)

    def inside(self, x: Tensor, table: Tensor) -> Tensor:
        h = self.attention_norm(x)
        q, k, v = (w(h).unflatten(-1, (-1, self.head)).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        q, k = turn(q, table, self.rotary), turn(k, table, self.rotary)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.grouped)
        x = x + self.wo(mixed.transpose(1, 2).flatten(2))
        h = self.feed_forward_norm(x)
        return x + self.w2(F.silu(self.w1(h)) * self.w3(h))


class Llama(nn.Module):
    """Logits of tokens."""

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__()
        self.options = options
        self.embedding = nn.Embedding(options.vocab, options.width)
        self.blocks = nn.ModuleList(
            Block(options, index < options.checkpoint_first) for index in range(options.layers)
        )
        self.norm = (ComposedNorm if options.norm == "composed" else nn.RMSNorm)(options.width)
        self.head = nn.Linear(options.width, options.vocab, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x, options = self.embedding(tokens), self.options
        turns = angles(tokens.shape[1], options.width // options.heads, 10000.0, x.device)
        table = make_table(turns, options.rotary, len(tokens), x.dtype)
        for block in self.blocks:
            x = block(x, table)
        return self.head(self.norm(x))


def build(options: argparse.Namespace, device: torch.device) -> Llama:
    """A unit a block, parameters materialised after sharding."""
    with torch.device("meta"):
        model = Llama(options)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    model.to_empty(device=device)
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    return model


def main() -> None:
    parser = argparse.ArgumentParser()
    for name, default in {"layers": 8, "width": 2048, "ffn": 5632, "heads": 16, "kv-heads": 4}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    for name, default in {
        "vocab": 32000,
        "length": 4096,
        "batch": 1,
        "steps": 6,
        "checkpoint-first": 0,
    }.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--norm", choices=("fused", "composed"), default="fused")
    parser.add_argument("--rotary", choices=("halves", "complex", "matrices"), default="halves")
    parser.add_argument("--loss", choices=("fp32", "low"), default="fp32")
    parser.add_argument("--clip", type=float, default=0.0, help="the largest norm; 0: not clipped")
    options = parser.parse_args()

    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    device = torch.device("cuda", local_rank)
    dist.init_process_group("nccl", device_id=device)
    torch.manual_seed(0)
    model = build(options, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    for _ in range(options.steps):
        tokens = torch.randint(options.vocab, (options.batch, options.length + 1), device=device)
        logits = model(tokens[:, :-1]).flatten(0, 1)
        loss = F.cross_entropy(logits.float() if options.loss == "fp32" else logits, tokens[:, 1:].flatten())
        loss.backward()
        if options.clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), options.clip)
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
