"""Units that return every kind of output, and callers that do every kind of thing to it."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

WIDTH = 4
ROWS = 6
Pair = namedtuple("Pair", ["first", "second"])


@dataclass
class Data:
    hidden: torch.Tensor
    rest: Any = None


@dataclass
class LateField:
    """One field is set after ``__init__``."""

    number: int
    hidden: torch.Tensor = field(init=False)


class Box:
    """An object that nothing knows."""

    def __init__(self, hidden: torch.Tensor) -> None:
        self.hidden = hidden
        self.me = self


class Slots:
    __slots__ = ("hidden",)

    def __init__(self, hidden: torch.Tensor) -> None:
        self.hidden = hidden


def late_field(hidden: torch.Tensor) -> LateField:
    made = LateField(1)
    made.hidden = hidden
    return made


Out = tuple[Callable[["Block", torch.Tensor, torch.Tensor], Any], Callable[[Any], torch.Tensor]]
"""What a block returns of its result and its input, and how the caller gets the tensor out of that."""


def same(output: Any) -> Any:
    return output


OUTPUTS: dict[str, Out] = {
    "tensor": (lambda block, h, x: h, same),
    "view": (lambda block, h, x: h.view(2, -1, WIDTH), lambda out: out.view(-1, WIDTH)),
    "flat view": (lambda block, h, x: h.view(-1), same),
    "transposed": (lambda block, h, x: h.t(), lambda out: out.t()),
    "slice": (lambda block, h, x: h[:], same),
    "part": (lambda block, h, x: h[1:3], lambda out: out.repeat(3, 1)),
    "split": (lambda block, h, x: h.split(3), lambda out: out[0]),
    "split and joined": (lambda block, h, x: h.split(3), torch.cat),
    "chunk": (lambda block, h, x: list(h.chunk(2, -1)), lambda out: torch.cat(out, -1)),
    "unbind": (lambda block, h, x: h.unbind(), torch.stack),
    "expanded": (lambda block, h, x: h.mean(0).expand(ROWS, WIDTH), lambda out: out.clone()),
    "two views": (lambda block, h, x: (h.view(-1, WIDTH), h[:2]), lambda out: out[0]),
    "view and base": (lambda block, h, x: (h.view(-1, WIDTH), h), lambda out: out[0]),
    "view of two layers": (lambda block, h, x: (block.second(h).view(-1, WIDTH), h.mean()),
                           lambda out: out[0] * (1 + 0.1 * out[1])),
    "view of the input": (lambda block, h, x: (x.view(-1, WIDTH), h), lambda out: out[1]),
    "the input": (lambda block, h, x: (x, h), lambda out: out[1] + out[0]),
    "tuple": (lambda block, h, x: (h, None, 3), lambda out: out[0]),
    "list in dict": (lambda block, h, x: {"a": [h, (h.sin(), "text")]}, lambda out: out["a"][1][0]),
    "namedtuple": (lambda block, h, x: Pair(h, h.cos()), lambda out: out.first * out.second),
    "dataclass": (lambda block, h, x: Data(h, [h.sin()]), lambda out: out.hidden + out.rest[0]),
    "late field": (lambda block, h, x: late_field(h), lambda out: out.hidden),
    "object": (lambda block, h, x: Box(h), lambda out: out.hidden),
    "object in a list": (lambda block, h, x: [{"box": Box(h)}, h.sum()], lambda out: out[0]["box"].hidden),
    "slots": (lambda block, h, x: Slots(h), lambda out: out.hidden),
    "object of a view": (lambda block, h, x: Box(h.view(-1, WIDTH)), lambda out: out.hidden),
    "twice": (lambda block, h, x: (h, h), lambda out: out[0] * out[1]),
    "detached": (lambda block, h, x: (h, h.detach()), lambda out: out[0] + out[1]),
    "stored": (lambda block, h, x: block.store(h), lambda out: out),
    "stored aside": (lambda block, h, x: block.aside(h), lambda out: out),
    "stored last": (lambda block, h, x: block.aside_last(h), lambda out: out),
    "parameter": (lambda block, h, x: (h, block.first.bias), lambda out: out[0] + out[1]),
    "clone of a parameter": (lambda block, h, x: (h, block.first.bias * 1.0), lambda out: out[0] + out[1]),
}  # fmt: skip


def data_of(out: torch.Tensor) -> torch.Tensor:
    out.data = out.data * 2
    return out


def gathered(out: torch.Tensor) -> torch.Tensor:
    return out.index_put_((torch.tensor([0]),), torch.zeros(()))


CALLERS: dict[str, Callable[[torch.Tensor], Any]] = {
    "nothing": same,
    "add_": lambda out: out.add_(1.5),
    "mul_": lambda out: out.mul_(2.0),
    "relu_": torch.relu_,
    "copy_": lambda out: out.copy_(out.detach() * 2),
    "index_put_": gathered,
    "row set": lambda out: out.__setitem__(0, 0.5) or out,
    "view added to": lambda out: out.view(-1).add_(1.0) is None or out,
    "half of it": lambda out: out[: out.shape[0] // 2].mul_(3.0) is None or out,
    "squeezed": lambda out: out.unsqueeze_(0).squeeze_(0),
    "swapped": lambda out: out.t_().t_() if out.dim() == 2 else out,
    "no_grad add_": lambda out: torch.no_grad()(lambda: out.add_(1.0))() is None or out,
    "detach_": lambda out: out.detach_(),
    "detach": lambda out: out.detach() + out * 0.5,
    "requires_grad_": lambda out: out.requires_grad_(),
    "data": data_of,
    "retain_grad": lambda out: out.retain_grad() or out,
    "hook": lambda out: out.register_hook(lambda gradient: gradient * 2) is None or out,
    "twice": lambda out: out * out.sin(),
    "unused": lambda out: torch.ones_like(out),
    "in inference": lambda out: torch.zeros_like(out) if out.is_inference() else out,
}


class Block(nn.Module):
    """Two layers around what a spec says."""

    def __init__(self, output: str) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.output = output
        self.kept: list[torch.Tensor] = []

    def store(self, hidden: torch.Tensor) -> torch.Tensor:
        """All of the result is stored: what is returned has no gradient."""
        self.kept = [hidden]
        return hidden.detach()

    def aside(self, hidden: torch.Tensor) -> torch.Tensor:
        """An auxiliary loss that is computed before what is returned."""
        self.kept = [self.second(hidden).square().mean()]
        return self.first(hidden)

    def aside_last(self, hidden: torch.Tensor) -> torch.Tensor:
        """The same after it: backward comes to it first."""
        returned = self.first(hidden)
        self.kept = [self.second(hidden).square().mean()]
        return returned

    def forward(self, x: torch.Tensor) -> Any:
        hidden = self.second(torch.tanh(self.first(x)))  # what is changed in place must not be saved
        return OUTPUTS[self.output][0](self, hidden, x)


class Model(nn.Module):
    """A stem, blocks and a head; between them the caller's part."""

    def __init__(self, output: str, caller: str, how: str = "") -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block(output) for _ in range(3))
        self.head = nn.Linear(WIDTH, WIDTH)
        self.output, self.caller, self.how = output, caller, how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x if self.how == "no stem" else self.stem(x)
        for block in self.blocks:
            if self.how in ("reentrant", "non-reentrant"):
                out = checkpoint(block, x, use_reentrant=self.how == "reentrant")
            else:
                out = block(x)
            if self.how == "twice":
                out = block(OUTPUTS[self.output][1](out))
            x = CALLERS[self.caller](OUTPUTS[self.output][1](out))
        return self.head(x)

    def loss(self, output: torch.Tensor) -> torch.Tensor:
        kept = [each.square().mean() for block in self.blocks for each in block.kept]
        return output.square().mean() + sum(kept)


def plain_of(model: nn.Module) -> Model:
    return next(module for module in model.modules() if isinstance(module, Model))


def batch_of(step: int) -> torch.Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(step))


def training(model: nn.Module, steps: int = 2) -> Iterator[dict[str, Any]]:
    """Two steps of SGD."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(steps):
        loss = plain_of(model).loss(model(batch_of(step)))
        loss.backward()
        yield {"loss": loss}
        optimizer.step()
        optimizer.zero_grad()
