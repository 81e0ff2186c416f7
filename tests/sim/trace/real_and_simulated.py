"""Steps of small models, and the inputs of operators in their traces: of torch's profiler, and simulated."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

MEMBERS = ("Concrete Inputs", "Input type", "Input Strides", "Input Dims")
Step = Callable[[], None]
Calls = dict[str, set[str]]


class Odds(nn.Module):
    """Lists of tensors, wrapped numbers, masks, indices, conversions, reductions, expanded inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.norm = nn.Embedding(11, 8), nn.RMSNorm(8)
        self.qkv, self.head = nn.Linear(8, 24), nn.Linear(8, 11, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        mask = torch.ones(5, 5, dtype=torch.bool, device=tokens.device).triu(1)
        weights = torch.softmax((q @ k.transpose(1, 2)) * 8**-0.5, -1).masked_fill(mask, 0.0)
        x = torch.cat([x + (weights @ v) * F.silu(v), x * 2], 1)[:, :5].to(torch.bfloat16).float()
        x = torch.where(x > 0, x, x.square()).clamp(min=-1, max=3.5)
        x = x / x.pow(2).mean(-1, keepdim=True).add(1e-6).sqrt()
        x = torch.stack([x[:, torch.arange(5, device=tokens.device)], x.roll(1, 0)]).sum(0)
        return self.head(x).logsumexp(-1).sum()


def _linear(device: str) -> tuple[nn.Module, Callable[[], torch.Tensor]]:
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 4)).to(device)
    x, labels = torch.randn(2, 8, device=device), torch.zeros(2, dtype=torch.int64, device=device)
    return model, lambda: F.cross_entropy(model(x), labels)


def _convolutions(device: str) -> tuple[nn.Module, Callable[[], torch.Tensor]]:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(8, 8, 3, groups=2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4),
    ).to(device)  # fmt: skip
    x, wanted = torch.randn(2, 3, 16, 16, device=device), torch.zeros(2, 4, device=device)
    return model, lambda: F.mse_loss(model(x), wanted)


def _odds(device: str) -> tuple[nn.Module, Callable[[], torch.Tensor]]:
    model, tokens = Odds().to(device), torch.zeros(2, 5, dtype=torch.int64, device=device)
    return model, lambda: model(tokens)


def _half(device: str) -> tuple[nn.Module, Callable[[], torch.Tensor]]:
    model = nn.Sequential(nn.Linear(8, 16, bias=False), nn.SiLU(), nn.Linear(16, 4)).to(
        device, torch.bfloat16
    )
    x = torch.randn(2, 3, 8, device=device, dtype=torch.bfloat16)
    return model, lambda: model(x).abs().sum()


def _autocast(device: str) -> tuple[nn.Module, Callable[[], torch.Tensor]]:
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).to(device)
    x = torch.randn(2, 8, device=device)

    def loss() -> torch.Tensor:
        with torch.autocast(torch.device(device).type, torch.bfloat16):
            return model(x).float().square().mean()

    return model, loss


MODELS = {
    "linear": _linear,
    "convolutions": _convolutions,
    "odds": _odds,
    "half": _half,
    "autocast": _autocast,
}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "foreach": lambda parameters: torch.optim.AdamW(parameters, foreach=True),
    "fused": lambda parameters: torch.optim.AdamW(parameters, fused=True),
    "loop": lambda parameters: torch.optim.Adam(parameters, foreach=False, weight_decay=0.1),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, foreach=False),
}


def step_of(model: str, optimizer: str, device: str) -> Step:
    """Forward, backward, clipping (which fused optimizers are tried without) and the optimizer."""
    module, loss = MODELS[model](device)
    updates = OPTIMIZERS[optimizer](list(module.parameters()))

    def step() -> None:
        loss().backward()
        if optimizer != "fused":
            nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        updates.step()
        updates.zero_grad()

    step()
    return step


def calls_in(path: Path) -> Calls:
    """By operator of aten's, the inputs that its events have."""
    text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    found: Calls = {}
    for event in json.loads(text)["traceEvents"]:
        if event.get("cat") == "cpu_op" and event["name"].startswith(("aten::", "c10d::")):
            # Autograd sums gradients in another order where a device has a thread of its own.
            known = [
                member for member in MEMBERS if (event["name"], member) != ("aten::add", "Input Strides")
            ]
            inputs = {member: event["args"].get(member) for member in known}
            found.setdefault(event["name"], set()).add(json.dumps(inputs))
    return found


def simulated_calls(sim: Any, step: Step, folder: Path) -> Calls:
    """Of a step under the simulated trace."""
    path = folder / "rank0_trace.json.gz"
    with sim.trace(path) as trace:
        step()
        trace.step()
    return calls_in(path)
