"""What the tests of the device share: a small GPT, training under torch's wrappers, a second process."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from fsdpbench.sim import Simulation, load_profile

VOCABULARY = 512


class Block(nn.Module):
    """A transformer block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.heads = width // 64

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        heads = [
            part.view(batch, length, self.heads, -1).transpose(1, 2)
            for part in self.qkv(self.norm_1(x)).chunk(3, -1)
        ]
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class TinyGPT(nn.Module):
    """A decoder-only transformer that returns its loss."""

    def __init__(self, width: int = 256, layers: int = 4, checkpointing: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.checkpointing = checkpointing

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            if self.checkpointing:
                x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
            else:
                x = block(x)
        logits = self.head(x).flatten(0, 1).float()
        return F.cross_entropy(logits, tokens.flatten())


def start(world_size: int = 8, **kwargs: Any) -> Simulation:
    """A simulation of A100s, eight a node, with its process group."""
    sim = Simulation.start(load_profile("a100-80gb"), world_size, min(world_size, 8), **kwargs)
    sim.init_process_group()
    return sim


def wrap(system: str, model: TinyGPT, world_size: int, **kwargs: Any) -> nn.Module:
    """The model under torch's own FSDP2, FSDP1 or DDP, bf16 for compute."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import (
        FullyShardedDataParallel,
        MixedPrecision,
        MixedPrecisionPolicy,
        fully_shard,
    )
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    if system == "fsdp2":
        mesh = init_device_mesh("sim", (world_size,))
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
        for block in model.blocks:
            fully_shard(block, mesh=mesh, mp_policy=policy, **kwargs)
        return fully_shard(model, mesh=mesh, mp_policy=policy, **kwargs)
    if system == "fsdp1":
        return FullyShardedDataParallel(
            model,
            auto_wrap_policy=ModuleWrapPolicy({Block}),
            device_id=torch.device("sim", 0),
            mixed_precision=MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16),
            **kwargs,
        )
    return nn.parallel.DistributedDataParallel(model, **kwargs)


def build(
    system: str,
    world_size: int,
    model: dict[str, Any] | None = None,
    tokens_shape: tuple[int, int] = (2, 128),
    **kwargs: Any,
) -> Callable[[], None]:
    """A function that does one training step with fused AdamW."""
    with torch.device("sim"):
        network = TinyGPT(**(model or {}))
    wrapped = wrap(system, network, world_size, **kwargs)
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-3, fused=True)
    torch.sim.empty_cache()

    def step() -> None:
        tokens = torch.randint(0, VOCABULARY, tokens_shape, device="sim")
        wrapped(tokens).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def in_new_process(function: Callable[[], Any]) -> Any:
    """The (picklable) result of a function, computed in a fork of this process."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        with os.fdopen(writer, "wb") as pipe:
            pickle.dump(function(), pipe)
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        content = pipe.read()
    os.waitpid(child, 0)
    assert content, "the new process failed"
    return pickle.loads(content)
