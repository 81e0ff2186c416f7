"""Models of specs, and what their forwards and backwards can be told to do; runs inside the ranks."""

from __future__ import annotations

from typing import Any

import torch
from differential.outputs import received, returned
from differential.specs import BlockSpec, ModelSpec
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import checkpoint


class BoomError(Exception):
    """Raised on purpose."""


class Fuse(torch.autograd.Function):
    """Passes on what it gets; its backward raises where the block says so."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, block: Block) -> torch.Tensor:
        ctx.block = block
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        if ctx.block.fails_backward:
            raise BoomError("backward")
        return gradient, None


class Inner(nn.Module):
    """A block inside a block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.matrix = nn.Linear(width, width)
        self.gain = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.matrix(x)) * self.gain


class Block(nn.Module):
    """``x + down(act(up(norm(x))))`` and what its spec adds."""

    def __init__(self, spec: BlockSpec, width: int) -> None:
        super().__init__()
        self.spec = spec
        self.fails_forward = self.fails_backward = False
        self.uses_branch = True
        norms = {"layer": nn.LayerNorm, "batch": nn.BatchNorm1d}
        self.norm = norms[spec.norm](width) if spec.norm else None
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.inner = Inner(width) if spec.inner else None
        self.side = nn.Linear(width, width, bias=False) if spec.branch else None
        if spec.unused:
            self.unused = nn.Parameter(torch.ones(width))
        if spec.extra:
            self.extra = nn.Parameter(torch.ones(width, dtype=getattr(torch, spec.extra)))
        if spec.counter:
            self.register_buffer("count", torch.zeros(1))
        if spec.extension:
            from test_tensor_extensions import HalfPrecision, Quantised

            kind: Any = {"half": HalfPrecision, "scaled": Quantised}[spec.extension]
            self.up.weight = nn.Parameter(kind(self.up.weight.detach()))
        for name, parameter in self.named_parameters():
            if spec.frozen == "all" or (spec.frozen and name.endswith(spec.frozen)):
                parameter.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.fails_forward:
            raise BoomError("forward")
        y = x if self.norm is None else self.norm(x)
        y = torch.tanh(self.up(y.to(self.up.weight.dtype)))
        y = self.down(y.to(self.down.weight.dtype))
        if self.inner is not None:
            y = self.inner(y)
        if self.side is not None and self.uses_branch:
            y = y + self.side(y)
        if self.spec.extra:
            y = y * self.extra.to(y.dtype)
        if self.spec.counter:
            with torch.no_grad():
                self.count += 1
            y = y + self.count.to(y.dtype) * 0.01
        return returned(self.spec, Fuse.apply(x + y, self))


class Model(nn.Module):
    """A stem, blocks and a head. ``skipped`` and the blocks' attributes tell what the next forward does."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.spec = spec
        self.skipped: tuple[int, ...] = ()
        self.stem = nn.Linear(spec.width, spec.width)
        self.blocks = nn.ModuleList(Block(block, spec.width) for block in spec.blocks)
        self.head = nn.Linear(spec.width, spec.width, bias=False)
        if spec.tied:
            self.head.weight = self.stem.weight
        self.to(getattr(torch, spec.dtype))
        for index, block in enumerate(spec.blocks):
            if block.extra:
                extra = self.blocks[index].extra
                extra.data = extra.data.to(getattr(torch, block.extra))
            if block.checkpoint == "wrapper":
                self.blocks[index] = checkpoint_wrapper(self.blocks[index])

    def forward(self, x: torch.Tensor) -> Any:
        x = self.stem(x)
        for index in self.spec.order or range(len(self.blocks)):
            if index in self.skipped:
                continue
            how = self.spec.blocks[index].checkpoint
            if how in ("reentrant", "non-reentrant"):
                out = checkpoint(self.blocks[index], x, use_reentrant=how == "reentrant")
            else:
                out = self.blocks[index](x)
            x = received(self.spec, self.spec.blocks[index], out, x)
        y = self.head(x.to(self.head.weight.dtype))
        if self.spec.output == "dict":
            return {"y": y, "parts": [x, {"name": "x"}]}
        return (y, x) if self.spec.output == "tuple" else y


def plain_blocks(model: nn.Module) -> list[Block]:
    """The blocks themselves, whatever is around them."""
    return [module for module in model.modules() if isinstance(module, Block)]


def loss_of(output: Any) -> torch.Tensor:
    if isinstance(output, dict):
        return output["y"].float().square().mean() + output["parts"][0].float().mean()
    if isinstance(output, tuple):
        return output[0].float().square().mean() + output[1].float().mean()
    return output.float().square().mean()


def batch_of(rank: int, index: int, spec: ModelSpec) -> torch.Tensor:
    """This rank's part of a batch."""
    generator = torch.Generator().manual_seed(100 * index + rank)
    made = torch.randn(4, spec.width, generator=generator, dtype=torch.float64)
    return made.to(getattr(torch, spec.dtype))
