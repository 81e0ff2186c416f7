"""All observations of a script as one record, and habits that cost time needlessly."""

import contextlib
import linecache
import os
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from fsdpbench.base.result_sections import Norms, ObservedModel, ObservedScript, Place
from fsdpbench.script import model_blocks
from fsdpbench.script.interposing import around, around_init
from fsdpbench.script.observed.calls import Calls
from fsdpbench.script.observed.exchange import Exchange
from fsdpbench.script.observed.gradients import Gradients
from fsdpbench.script.observed.waits import Loaders, Waits
from fsdpbench.script.own_files import OwnFiles
from fsdpbench.sim import Simulation


class Observed:
    """All observers of one script. Created before it starts, and after the variations, so that they observe
    the script's own calls, not the calls as changed by variations."""

    def __init__(self, own_files: OwnFiles, waits: Waits, folder: Path, simulation: Simulation) -> None:
        self.calls = Calls(own_files)
        self.habits = Habits(own_files, self.calls.place)
        self.gradients = Gradients(self.calls.place, Exchange(simulation), self.calls.wrappers)
        self.loaders = Loaders(folder, simulation)
        self.waits = waits
        self._own_files = own_files
        self._model: ObservedModel | None = None
        register_optimizer_step_post_hook(lambda optimizer, args, kwargs: self._look_at_loop())
        around_init(torch.optim.Optimizer, lambda parameters, kwargs: self._look_at_model())

    def _look_at_model(self) -> None:
        """Describe the model, which is complete when the first optimizer is created."""
        if self._model is None:
            with contextlib.suppress(Exception):  # an unusual model may raise anything
                self._model = self._described()
                self.gradients.names = model_blocks.parameter_names()

    def _look_at_loop(self) -> None:
        """Remember the script's own code that calls the step of an optimizer."""
        frame = self._own_files.innermost() if self.waits.loop is None else None
        if frame is not None and self._own_files.has(frame.f_code.co_filename):
            self.waits.loop = frame.f_code

    def _described(self) -> ObservedModel:
        bare = model_blocks.unwrapped_root()
        wrapped = [
            each.module() for each in self.calls.wrappers.made if each.api != "DistributedDataParallel"
        ]
        model = bare or (wrapped[-1] if wrapped else None)
        if model is None:
            return ObservedModel()
        blocks = self.calls.blocks
        if bare is not None:
            found = model_blocks.blocks_of(bare)
            blocks = None if found is None else found.reported()
        units = [each for each in model.modules() if model_blocks.is_unit(each)]
        kinds = Counter(model_blocks.class_name(each) for each in units if each is not model)
        dtypes = Counter(parameter.dtype for parameter in model.parameters())
        return ObservedModel(
            kind=model_blocks.class_name(model),
            blocks=blocks,
            stacks={} if bare is not None else model_blocks.stacks_of(model),
            units=len(units),
            unit_classes=dict(kinds),
            unwrapped_root=bare is not None,
            unsharded_parameters=0 if bare is None else model_blocks.bare_parameters(bare),
            dtype=str(dtypes.most_common(1)[0][0]) if dtypes else None,
        )

    def reported(self, steps: int, computes_in: str | None) -> ObservedScript:
        """Return the observations after `steps` steps; `computes_in`: the dtype of most matrix products."""
        calls, habits = self.calls, self.habits
        return ObservedScript(
            sharding=[*calls.sharding.values()],
            model=self._model or ObservedModel(),
            optimizers=calls.optimizers,
            loaders=calls.loaders,
            checkpointing=calls.checkpointing,
            saved_on_host=calls.saved_on_host,
            forward_prefetch=calls.prefetching,
            batch=calls.batch,
            waits=self.waits.reported(steps),
            backward_in_autocast=habits.backward_in_autocast,
            zeroed=habits.zeroed,
            anomaly=habits.anomaly,
            launch_blocking=habits.launch_blocking(),
            norms=habits.norms(steps),
            gradients=self.gradients.reported(),
            computes_in=computes_in,
        )


_SEVERAL = 8
"""Norms of one line in a step from which the line is reported."""

_BLOCKING = "CUDA_LAUNCH_BLOCKING"


class Habits:
    """Habits that cost time needlessly: backward inside autocast, gradients filled with zeros, norms computed
    one by one, autograd's anomaly detection, and synchronous CUDA launches left on.

    `place()` returns the place of the script's line that is running.
    """

    def __init__(self, own_files: OwnFiles, place: Callable[[], Place]) -> None:
        self.backward_in_autocast: Place | None = None
        self.zeroed: Place | None = None
        self.anomaly: Place | None = None
        self._asked_for_anomaly: Place | None = None
        self._own_files = own_files
        self._place = place
        self._norms: Counter[tuple[str, int]] = Counter()
        self._norm_places: dict[tuple[str, int], Place] = {}
        self._around(torch.Tensor, "backward", self._backward)
        for kind in (torch.autograd.detect_anomaly, torch.autograd.set_detect_anomaly):
            self._around(kind, "__init__", self._asks_for_anomaly)
        self._around(torch.optim.Optimizer, "zero_grad", self._zero_grad)
        self._around(nn.Module, "zero_grad", self._zero_grad)
        for owner, name in ((torch.Tensor, "norm"), (torch, "norm"), (torch.linalg, "vector_norm")):
            self._around(owner, name, self._norm)

    def _backward(self, *args: Any, **kwargs: Any) -> None:
        if self.backward_in_autocast is None and torch.is_autocast_enabled("cuda"):
            self.backward_in_autocast = self._place()
        if self.anomaly is None and torch.is_anomaly_enabled():
            self.anomaly = self._asked_for_anomaly or self._place()

    def _asks_for_anomaly(self, *args: Any, **kwargs: Any) -> None:
        self._asked_for_anomaly = self._place()

    def launch_blocking(self) -> Place | None:
        """Return where the script requests blocking launches; without a line if its environment does."""
        if os.environ.get(_BLOCKING) != "1":
            return None
        for file in self._own_files.seen():
            for number, text in enumerate(linecache.getlines(file), 1):
                if _BLOCKING in text:
                    return Place(file, number, text.strip())
        return Place(text=f"{_BLOCKING}=1")

    def _zero_grad(self, owner: Any, set_to_none: bool = True, **kwargs: Any) -> None:
        if not set_to_none and self.zeroed is None:
            self.zeroed = self._place()

    def _norm(self, *args: Any, **kwargs: Any) -> None:
        frame = sys._getframe(3)  # the caller of the wrapped function
        if not self._own_files.has(frame.f_code.co_filename):
            return
        key = frame.f_code.co_filename, frame.f_lineno
        self._norms[key] += 1
        if key not in self._norm_places:
            self._norm_places[key] = self._place()

    def _around(self, owner: Any, name: str, note: Callable[..., None]) -> None:
        def noted(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            if not torch.compiler.is_compiling():
                note(*args, **kwargs)
            return original(*args, **kwargs)

        around(owner, name, noted)

    def norms(self, steps: int) -> Norms | None:
        """Return the line that computes most norms, in `steps` steps; None if no line computes several."""
        if not self._norms or not steps:
            return None
        key, count = self._norms.most_common(1)[0]
        if count < _SEVERAL * steps:
            return None
        return Norms.at(self._norm_places[key], per_step=count / steps)
