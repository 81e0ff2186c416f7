"""Soak test: many steps of different lengths with evaluation in between, and the memory of each step.

Every step ends with a synchronization, as in a loop that logs its loss. Steps are timed, but not traced.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import torch
from torch import nn
from torch.profiler import record_function

from fsdpbench.base.configuration.config import Config
from fsdpbench.base.configuration.soak import SoakSettings, StepShape
from fsdpbench.systems import System
from fsdpbench.workloads import Workload

Run = Callable[[], object]
_MEMORY = ("allocated", "active", "reserved", "inactive_split", "alloc_retries", "device_allocs")


class SoakDevice(Protocol):
    """The methods of a device that a soak uses."""

    def timed_step(self, step: Run) -> float: ...

    def take_memory(self) -> Any: ...


class ShapedBatches:
    """Batches of the shapes set by `expect`, each created on demand and not kept.

    All ranks have the same lengths in a step; each batch has its own seed.
    """

    def __init__(self, make: "Callable[[int, int | None, int], Iterator[Batch]]", seed: int) -> None:
        self._make, self._seed = make, seed
        self._made = 0
        self._expected: list[tuple[int, int | None]] = []

    def expect(self, shape: StepShape) -> None:
        """Set the microbatches of the next step."""
        self._expected = list(shape.microbatches)

    def __iter__(self) -> "Iterator[Batch]":
        return self

    def __next__(self) -> "Batch":
        rows, tokens = self._expected.pop(0)
        self._made += 1
        return next(self._make(rows, tokens, self._seed + self._made))


def shapes_of(config: Config) -> list[StepShape]:
    """Return the steps of the soak of `config`, including evaluation."""
    assert config.soak is not None
    settings = config.settings
    return list(config.soak.schedule(settings.batch, settings.grad_accum, settings.seq))


class Soak:
    """A running soak. `record` always has the results so far, also if a step raises."""

    def __init__(self, settings: SoakSettings, shapes: Sequence[StepShape]) -> None:
        self._shapes = shapes
        self._columns: dict[str, list[Any]] = {
            name: [] for name in ("training_step", "evaluates", "tokens", "seconds", *_MEMORY)
        }
        self._trained = 0
        self.record: dict[str, object] = {
            "steps": settings.steps,
            "steps_done": 0,
            "lengths": None if settings.lengths is None else settings.lengths.to_text(),
            "eval_every": settings.eval_every,
            "eval_steps": settings.eval_steps if settings.eval_every else 0,
            "distinct_shapes": len(set(shapes)),
            "first_retry_step": None,
            "last_device_alloc_step": None,
            "retries": 0,
            "out_of_memory_step": None,
            "over_steps": self._columns,
        }

    def run(self, device: SoakDevice, loop: "TrainingLoop", batches: ShapedBatches) -> list[float]:
        """Run all steps; return the seconds of each training step. Raises what a step raises."""
        times = []
        for shape in self._shapes:
            batches.expect(shape)
            self._trained += not shape.evaluates
            self.record["out_of_memory_step"] = self._trained  # `_note` clears it if the step succeeds
            seconds = device.timed_step(loop.evaluate if shape.evaluates else loop.step)
            self._note(shape, seconds, device.take_memory())
            if not shape.evaluates:
                times.append(seconds)
        return times

    def memory_per_step(self) -> list[dict[str, int | None]] | None:
        """Return memory per step, as runs without a soak record it; None if the device records none."""
        columns = self._columns
        if None in columns["reserved"]:
            return None
        names = ("allocated", "active", "reserved", "alloc_retries")
        rows = zip(*(columns[name] for name in names), strict=True)
        return [dict(zip(names, row, strict=True), ooms=0) for row in rows]

    def _note(self, shape: StepShape, seconds: float, memory: Any) -> None:
        record, columns = self.record, self._columns
        values = dict.fromkeys(_MEMORY) if memory is None else asdict(memory)
        values |= {
            "training_step": self._trained,
            "evaluates": shape.evaluates,
            "tokens": shape.tokens,
            "seconds": seconds,
        }
        for name, column in columns.items():
            column.append(values[name])
        record["steps_done"], record["out_of_memory_step"] = self._trained, None
        if values["alloc_retries"]:
            record["retries"] += values["alloc_retries"]
            if record["first_retry_step"] is None:
                record["first_retry_step"] = self._trained
        if values["device_allocs"]:
            record["last_device_alloc_step"] = self._trained


def mean_flops(
    workload: Workload, shapes: Sequence[StepShape], checkpointing: str, in_full: bool
) -> tuple[float, float]:
    """Return the FLOPs of the model and of the hardware per training step, averaged over `shapes`."""
    training = [shape for shape in shapes if not shape.evaluates]
    known: dict[tuple[int, int | None], tuple[float, float]] = {}
    model = hardware = 0.0
    for shape in training:
        for rows, tokens in shape.microbatches:
            if (rows, tokens) not in known:
                flops = workload.flops_per_step(rows, tokens, checkpointing, in_full)
                known[rows, tokens] = (float(flops.model), float(flops.hardware))
            model, hardware = model + known[rows, tokens][0], hardware + known[rows, tokens][1]
    return model / len(training), hardware / len(training)


def mean_tokens(shapes: Sequence[StepShape]) -> int | None:
    """Return the mean tokens of a training step, including padding."""
    counts = [shape.tokens for shape in shapes if not shape.evaluates]
    known = [count for count in counts if count is not None]
    return round(sum(known) / len(known)) if known else None


Batch = tuple[torch.Tensor, ...]
"""The arguments of one forward: inputs, then targets."""


@dataclass
class TrainingLoop:
    """A wrapped model with its optimizer and data. `step()` runs all microbatches and an optimizer step."""

    config: Config
    system: System
    model: nn.Module
    optimizer: torch.optim.Optimizer
    batches: "Iterator[Batch]"
    device: torch.device
    on_loss: Callable[[torch.Tensor], None]
    around_microbatch: Callable[[], AbstractContextManager[object]] = nullcontext
    """A context manager inside the system's own ones, for a simulated trainer's work."""
    around_update: Callable[[], AbstractContextManager[object]] = nullcontext
    """A context manager around clipping and the optimizer step."""

    def step(self) -> None:
        settings = self.config.settings
        for index in range(settings.grad_accum):
            is_last = index == settings.grad_accum - 1
            sync = is_last or settings.grad_sync == "every"
            with self.system.microbatch(self.model, sync=sync), self.around_microbatch():
                self._forward_backward(settings.grad_accum, is_last)
        with self.around_update():
            if settings.clip is not None:
                with record_function("clip"):
                    self.system.clip(self.model, settings.clip)
            with record_function("optimizer"):
                self.optimizer.step()
                self.optimizer.zero_grad(set_to_none=settings.zero_grad == "release")

    def evaluate(self) -> None:
        """Run forward of one batch without gradients, in evaluation mode."""
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
