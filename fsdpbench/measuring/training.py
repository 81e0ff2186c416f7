"""One training step as scripts write it: microbatches, backward, optimizer; the same on every device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import nn
from torch.profiler import record_function

from fsdpbench.configuration.config import Config
from fsdpbench.systems import System

Batch = tuple[torch.Tensor, ...]
"""What one forward takes: the inputs, then the targets."""


@dataclass
class TrainingLoop:
    """A wrapped model with its optimizer and data. `step()` is one optimizer step over `grad_accum`
    microbatches."""

    config: Config
    system: System
    model: nn.Module
    optimizer: torch.optim.Optimizer
    batches: Iterator[Batch]
    device: torch.device
    on_loss: Callable[[torch.Tensor], None]
    around_microbatch: Callable[[], AbstractContextManager[object]] = nullcontext
    """Entered inside what the system enters: what a simulated trainer does."""

    def step(self) -> None:
        settings = self.config.settings
        for index in range(settings.grad_accum):
            is_last = index == settings.grad_accum - 1
            sync = is_last or settings.grad_sync == "every"
            with self.system.microbatch(self.model, sync=sync), self.around_microbatch():
                self._forward_backward(settings.grad_accum, is_last)
        if settings.clip is not None:
            with record_function("clip"):
                self.system.clip(self.model, settings.clip)
        with record_function("optimizer"):
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=settings.zero_grad == "release")

    def evaluate(self) -> None:
        """Forward of one batch without gradients, in evaluation mode."""
        self.model.eval()
        with record_function("evaluation"), torch.no_grad():
            batch = next(self.batches)
            with self.system.forward_context(self.config, self.device):
                self.model(*batch)
        self.model.train()

    def _forward_backward(self, microbatches: int, is_last: bool) -> None:
        with self.system.microbatch_of(self.model, next(self.batches)) as batch:
            with record_function("forward"):
                with self.system.forward_context(self.config, self.device):
                    loss = self.model(*batch)
                if microbatches > 1:
                    loss = loss / microbatches
            with record_function("backward"), self.system.backward_context(self.config):
                self.system.backward(self.model, loss, is_last=is_last)
        self.on_loss(loss.detach())
