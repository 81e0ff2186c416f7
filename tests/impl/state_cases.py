"""Models with everything that state dicts have to do with, and comparisons; runs inside the ranks."""

from __future__ import annotations

from typing import Any

import torch
from fsdp_cases import Block, assert_close
from torch import nn
from torch.distributed import fsdp as torch_fsdp
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp.wrap import ModuleWrapPolicy as TorchModuleWrapPolicy
from torch.distributed.tensor import DTensor

from fsdpbench import impl

WIDTH = 6


class Parts(nn.Module):
    """A tied weight, buffers of all sorts, an ignored module, checkpointing around blocks."""

    def __init__(self, checkpointing: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, WIDTH)
        self.register_buffer("scale", torch.ones(1))
        self.register_buffer("hidden", torch.ones(2), persistent=False)
        self.blocks = nn.ModuleList(Block(WIDTH) for _ in range(2))
        if checkpointing:
            self.blocks[1] = checkpoint_wrapper(self.blocks[1])
        self.norm = nn.BatchNorm1d(WIDTH)
        self.ignored = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.head = nn.Linear(WIDTH, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) * self.scale
        for block in self.blocks:
            x = block(x)
        return self.head(self.ignored(self.norm(x).float()).to(x.dtype))


def api_of(kind: str) -> Any:
    return torch_fsdp if kind == "torch" else impl


def wrapped(
    kind: str, model: nn.Module | None = None, *, mesh: tuple[int, ...] = (), seed: int = 0, **arguments: Any
) -> Any:
    """Wrap with torch's or our ``FullyShardedDataParallel``: blocks by policy, and the root."""
    torch.manual_seed(seed)
    model = model if model is not None else Parts()
    api: Any = api_of(kind)
    policy: Any = TorchModuleWrapPolicy if kind == "torch" else impl.ModuleWrapPolicy
    if "sharding_strategy" in arguments:
        arguments["sharding_strategy"] = api.ShardingStrategy[arguments["sharding_strategy"]]
    if "mixed_precision" in arguments:
        arguments["mixed_precision"] = api.MixedPrecision(*arguments["mixed_precision"])
    if mesh:
        names = ("replicate", "shard")[-len(mesh) :]
        arguments["device_mesh"] = init_device_mesh("cpu", mesh, mesh_dim_names=names)
    if isinstance(model, Parts):
        arguments["ignored_modules"] = [model.ignored]
    return api.FullyShardedDataParallel(
        model, auto_wrap_policy=policy({Block}), device_id=torch.device("cpu"), **arguments
    )


def tokens_for(rank: int, step: int) -> torch.Tensor:
    return torch.randint(0, 11, (8,), generator=torch.Generator().manual_seed(10 * step + rank))


def train(model: Any, optimizer: torch.optim.Optimizer, rank: int, steps: range) -> list[float]:
    losses: list[float] = []
    for step in steps:
        tokens = tokens_for(rank, step)
        loss = nn.functional.cross_entropy(model(tokens).float(), tokens)
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        model.zero_grad()
    return losses


def kept_as(kind: str, model: Any, name: str, *configs: Any) -> Any:
    """The context in which state dicts are of one type; configs are made of (name, arguments)."""
    api = api_of(kind)
    made = [getattr(api, config)(**arguments) for config, arguments in configs]
    return api.FullyShardedDataParallel.state_dict_type(model, getattr(api.StateDictType, name), *made)


def local_of(value: Any) -> torch.Tensor:
    """This rank's part of any value."""
    if isinstance(value, ShardedTensor):
        shards = value.local_shards()
        return shards[0].tensor if shards else torch.empty(0)
    return value.to_local() if isinstance(value, DTensor) else value


def describe(value: Any) -> tuple[Any, ...]:
    """What two values must share besides their elements."""
    if isinstance(value, ShardedTensor):
        metadata = value.metadata()
        shards = [(s.shard_offsets, s.shard_sizes, str(s.placement)) for s in metadata.shards_metadata]
        return (ShardedTensor, tuple(value.size()), value.dtype, shards)
    if isinstance(value, DTensor):
        return (DTensor, tuple(value.shape), value.stride(), value.dtype, value.placements, value.device_mesh)
    if isinstance(value, torch.Tensor):
        return (torch.Tensor, tuple(value.shape), value.dtype)
    return (value,)


def assert_same_values(ours: dict[str, Any], theirs: dict[str, Any], tolerance: float = 1e-5) -> None:
    """The same keys in the same order, of the same types and layouts, with the same elements."""
    assert list(ours) == list(theirs), set(ours) ^ set(theirs)
    for name, value in theirs.items():
        assert describe(ours[name]) == describe(value), f"{name}: {describe(ours[name])} {describe(value)}"
    tensors = {name: local_of(v) for name, v in theirs.items() if hasattr(v, "dtype")}
    assert_close({name: local_of(ours[name]) for name in tensors}, tensors, tolerance)
