"""Where a program is: step, phase, module, span and line."""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable
from enum import StrEnum
from typing import Any, NamedTuple

from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from fsdpbench.sim.torch_device.backward_streams import BackwardStreams

Lines = Callable[[], str | None]
"""Answers with the line of the user's own program that runs ("train.py:12"), if any."""

_WRAPPERS = re.compile(
    r"(?:^|(?<=\.))(?:_fsdp_wrapped_module|_checkpoint_wrapped_module|_orig_mod|module)\.?"
)
OUTSIDE = "outside of modules"


class Phase(StrEnum):
    """What part of a training step the CPU is in."""

    BUILDING = "building"
    FORWARD = "forward"
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"


class Place(NamedTuple):
    """Where an allocation was made. ``module``: its path; ``span``: innermost span of the profiler."""

    step: int
    phase: Phase
    module: str
    span: str
    line: str | None


class Places:
    """Follows a program by hooks on all modules and optimizers, from its making to `close`.

    The first optimizer that steps ends the steps. ``backward`` knows whether backward runs.
    """

    def __init__(self, backward: BackwardStreams, line: Lines | None) -> None:
        self._backward = backward
        self.roots: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self.optimizers: weakref.WeakSet[Any] = weakref.WeakSet()
        self.on_step: Callable[[], None] | None = None
        self.on_root: Callable[[nn.Module], None] | None = None
        self.step = 1
        self._line = line or (lambda: None)
        self._names: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
        self._modules: list[str] = []
        self._spans: list[str] = []
        self._leading: Any = None
        self._in_optimizer = False
        self._hooks: list[RemovableHandle] = [
            register_module_forward_pre_hook(self._enter_module),
            register_module_forward_hook(self._leave_module, always_call=True),
            register_optimizer_step_pre_hook(self._enter_optimizer),
            register_optimizer_step_post_hook(self._leave_optimizer),
        ]

    def close(self) -> None:
        """Take the hooks off."""
        for hook in self._hooks:
            hook.remove()

    def now(self) -> Place:
        """Where the program is."""
        module = self._modules[-1] if self._modules else OUTSIDE
        return Place(self.step, self.phase, module, self._spans[-1] if self._spans else "", self._line())

    @property
    def phase(self) -> Phase:
        """Which part of a step runs."""
        if self._backward.is_active:
            return Phase.BACKWARD
        if self._in_optimizer:
            return Phase.OPTIMIZER
        return Phase.FORWARD if self.roots else Phase.BUILDING

    def enter(self, span: str) -> None:
        """A span of the profiler begins."""
        self._spans.append(span)

    def leave(self, span: str) -> None:
        """A span of the profiler ends."""
        if span in self._spans:
            del self._spans[len(self._spans) - 1 - self._spans[::-1].index(span) :]

    def _enter_module(self, module: nn.Module, args: Any) -> None:
        name = self._names.get(module)
        if name is None:
            name = self._learn(module)
        self._modules.append(name)

    def _learn(self, root: nn.Module) -> str:
        self.roots.add(root)
        if self.on_root is not None:
            self.on_root(root)
        for path, module in root.named_modules():
            self._names[module] = _WRAPPERS.sub("", path).strip(".") or type(root).__name__
        return self._names[root]

    def _leave_module(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._modules:
            self._modules.pop()

    def _enter_optimizer(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self.optimizers.add(optimizer)
        self._in_optimizer = True

    def _leave_optimizer(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._in_optimizer = False
        self._leading = self._leading or optimizer
        if self._leading is optimizer:
            if self.on_step is not None:
                self.on_step()
            self.step += 1
