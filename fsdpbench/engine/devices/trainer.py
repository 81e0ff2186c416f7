"""What a trainer does around each microbatch, in the simulated time of its process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fsdpbench.sim.model.software import TrainerSoftware
from fsdpbench.sim.model.timeline import Timeline
from fsdpbench.workloads.families.gpt import GPT


class Trainer:
    """Work around each microbatch of `model`, as `software` says, in the time of `timeline`.

    Composer's, from the sources of Composer (`mosaicml`) 0.14.1 and 0.17.0. `_train_microbatch`
    (`trainer.py`) keeps the outputs, logits included, as `state.outputs` until the next microbatch's forward
    has returned. After each backward `_eval_train_metrics` updates two metrics (`metrics/nlp.py`), each a
    cross entropy of the logits: log-probabilities in their dtype, then autocast's fp32 copy for `nll_loss`.
        forward, loss ── backward ── metric ── metric ── forward, loss ── ...
               └ logits of this microbatch ...................^ released
    """

    def __init__(self, software: TrainerSoftware, model: nn.Module, timeline: Timeline) -> None:
        self._timeline = timeline
        self._software = software
        self._outputs: Tensor | None = None
        if software.keeps_outputs:
            gpt = next(module for module in model.modules() if isinstance(module, GPT))
            gpt.lm_head.register_forward_hook(self._keep)

    @contextmanager
    def microbatch(self) -> Iterator[None]:
        """Enter around one microbatch."""
        yield
        if self._software.metrics:
            self.update_metrics()
        if self._software.host_us:
            self._timeline.cpu += round(self._software.host_us * 1000)

    @torch.no_grad()
    def update_metrics(self) -> None:
        """Update the metrics; raises `RuntimeError` before the first microbatch."""
        if self._outputs is None:
            raise RuntimeError("metrics of a microbatch that had no forward")
        rows = self._outputs.flatten(0, -2)
        targets = torch.zeros(len(rows), dtype=torch.int64, device=rows.device)
        for _ in range(self._software.metrics):
            with torch.autocast(rows.device.type, torch.bfloat16):
                F.cross_entropy(rows, targets, reduction="sum")

    def _keep(self, head: nn.Module, inputs: Any, logits: Tensor) -> None:
        self._outputs = logits
