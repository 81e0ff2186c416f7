"""The optimizers of the settings `optimizer` and `optimizer_dtype`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from fsdpbench.base.configuration.config import Config
from fsdpbench.base.settings import Settings

MakeMuon = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
"""Muon of matrices, as a system has it."""

_ADAMW = {"adamw": (None, True), "adamw-foreach": (True, False), "adamw-loop": (False, False)}
"""`foreach` and `fused` of torch's AdamW."""


class Together(torch.optim.Optimizer):
    """Several optimizers of different parameters that step one after another."""

    def __init__(self, *optimizers: torch.optim.Optimizer) -> None:
        self._optimizers = optimizers
        groups = [{"params": group["params"]} for each in optimizers for group in each.param_groups]
        super().__init__(groups, {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Step each of them."""
        for each in self._optimizers:
            each.step()


def make_optimizer(
    settings: Settings, model: nn.Module, block_classes: tuple[type[nn.Module], ...], make_muon: MakeMuon
) -> torch.optim.Optimizer:
    """Make the optimizer of the model's (sharded) parameters. `block_classes`: with Muon's matrices."""
    parameters = _by_mesh(p for p in model.parameters() if p.requires_grad)
    if settings.optimizer == "sgd":
        return torch.optim.SGD(parameters, lr=1e-2)
    if settings.optimizer == "muon":
        matrices = _matrices(model, block_classes)
        chosen = set(matrices)
        rest = [p for p in model.parameters() if p.requires_grad and p not in chosen]
        made = [make_muon(matrices)] if matrices else []
        return Together(*made, *([_adamw("adamw", settings, rest)] if rest else []))
    return _adamw(settings.optimizer, settings, parameters)


def _by_mesh(parameters: Iterable[nn.Parameter]) -> list[dict[str, list[nn.Parameter]]]:
    """Make a parameter group for each mesh: an operator over several DTensors takes those of one mesh."""
    groups: dict[Any, list[nn.Parameter]] = {}
    for parameter in parameters:
        groups.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
    return [{"params": group} for group in groups.values()]


def _adamw(name: str, settings: Settings, parameters: Iterable[Any]) -> torch.optim.Optimizer:
    if settings.optimizer_dtype == "bf16":
        from fsdpbench.impl import AdamW

        return AdamW(parameters, lr=1e-4)
    foreach, fused = _ADAMW[name]
    return torch.optim.AdamW(parameters, lr=1e-4, foreach=foreach, fused=fused)


def _matrices(model: nn.Module, block_classes: tuple[type[nn.Module], ...]) -> list[nn.Parameter]:
    """Return the two-dimensional parameters inside blocks, each once: neither embeddings nor the head."""
    blocks = (module for module in model.modules() if isinstance(module, block_classes))
    found = (p for block in blocks for p in block.parameters() if p.requires_grad and p.ndim == 2)
    return list(dict.fromkeys(found))


def refuse_optimizer(config: Config) -> dict[str, str]:
    """Refuse optimizers that the rest of `config` excludes: setting -> reason."""
    settings, refused = config.settings, {}
    if settings.optimizer_dtype is not None and settings.optimizer not in ("adamw", "muon"):
        refused["optimizer_dtype"] = f"it is AdamW's (optimizer=adamw or muon), not {settings.optimizer}'s"
    if settings.cpu_offload and config.device == "sim":
        if settings.optimizer_dtype is not None:
            refused["optimizer_dtype"] = "on the host (cpu_offload) only torch's own AdamW is priced"
        if settings.optimizer == "muon":
            refused["optimizer"] = "on the host (cpu_offload) only AdamW and SGD are priced, not Muon"
    return refused
