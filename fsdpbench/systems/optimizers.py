"""The optimizers of the setting `optimizer`."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def make_optimizer(name: str, model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer of that name over the model's (sharded) parameters."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    if name == "sgd":
        return torch.optim.SGD(parameters, lr=1e-2)
    ways: dict[str, dict[str, Any]] = {
        "adamw": {"fused": True},
        "adamw-foreach": {"foreach": True, "fused": False},
        "adamw-loop": {"foreach": False, "fused": False},
    }
    return torch.optim.AdamW(parameters, lr=1e-4, **ways[name])
