"""The optimizers that a script makes: the first one that steps ends its steps, and those that never do are
named."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from fsdpbench.script.own_files import OwnFiles


@dataclass
class _Made:
    """An optimizer by its kind and where it was made."""

    name: str
    place: dict[str, Any]
    steps: int = 0

    def __str__(self) -> str:
        file = os.path.basename(self.place["file"])
        return f"{self.name} ({file}:{self.place['line']})" if file else f"{self.name} (?)"


class Optimizers:
    """Made before the script starts. `on_step` is called when the first of its optimizers has stepped."""

    def __init__(self, own_files: OwnFiles) -> None:
        self.on_step: Callable[[], None] | None = None
        self._own_files = own_files
        self._made: list[_Made] = []
        self._leading: torch.optim.Optimizer | None = None
        register_optimizer_step_post_hook(self._stepped)
        kind: Any = torch.optim.Optimizer
        original = kind.__init__

        @functools.wraps(original)
        def init(optimizer: Any, *args: Any, **kwargs: Any) -> None:
            original(optimizer, *args, **kwargs)
            optimizer._sim_made = self._remember(optimizer)

        kind.__init__ = init

    def _remember(self, optimizer: torch.optim.Optimizer) -> _Made:
        made = _Made(type(optimizer).__name__, self._own_files.place(self._own_files.innermost()))
        self._made.append(made)
        return made

    def _stepped(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        made = getattr(optimizer, "_sim_made", None)
        if made is not None:
            made.steps += 1
        if self._leading is None:
            self._leading = optimizer
        if self._leading is optimizer and self.on_step is not None:
            self.on_step()

    def without_steps(self) -> list[str]:
        """What to say of those whose `step()` was never called."""
        if not self._made:
            return ["it made no optimizer of torch.optim"]
        idle = [str(made) for made in self._made if not made.steps]
        return [f"step() of {' and '.join(idle)} was never called"] if idle else []
