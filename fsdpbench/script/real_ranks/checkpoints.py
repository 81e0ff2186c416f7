"""The content of a script's checkpoints, from its state when it saves and after it has loaded.

    first run    trains and saves           state2_rank0.pt: weights, optimizer states and data after step 2
                                            saved.txt: the step after which a rank saved first, and its line
    second run   other ranks, which load    state0_rank0.pt: the same, before their first step

The files are in the layer of the run; the second run gets a copy of the layer.
"""

import contextlib
import copy
import gc
import os
import sys
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.optim.lr_scheduler import LRScheduler

from fsdpbench.base.writing import write_whole
from fsdpbench.script.interposing import around
from fsdpbench.script.own_files import OwnFiles
from fsdpbench.script.real_ranks.pieces import Piece, keep
from fsdpbench.script.real_ranks.watching import Watch
from fsdpbench.script.steps import MeasuredAllError

_SAVED = "saved.txt"
_LIBRARY = "torch.distributed.checkpoint"


@dataclass
class State:
    """The state of a rank after `steps`: weights, optimizer states by kind, counts, and the data of the next
    step. `first`: the data of the run's first step; `place`: the script's line that loaded."""

    weights: Mapping[str, Piece]
    states: Mapping[str, Mapping[str, Piece | None]]
    counts: Mapping[str, float]
    steps: int
    place: str
    first: str = ""
    next: str = ""


def saved_after(folder: Path) -> tuple[int, str]:
    """Return the number of steps done when a rank first saved, and the script's line; 0 if none saved."""
    marker = folder / _SAVED
    steps, _, place = marker.read_text().partition(" ") if marker.exists() else ("0", "", "")
    return int(steps), place


def read_states(folder: Path, steps: int, ranks: int) -> list[State]:
    """Return the states of all ranks after `steps`; empty if a rank did not get that far with a model."""
    paths = [_path(folder, steps, rank) for rank in range(ranks)]
    states = [torch.load(path, weights_only=False) for path in paths if path.exists()]
    return states if len(states) == ranks and all(each.weights for each in states) else []


def _path(folder: Path, steps: int, rank: int) -> Path:
    return folder / f"state{steps}_rank{rank}.pt"


class CheckpointWatch(Watch):
    """The watch of a run that saves, or of one that loads (`resumes`)."""

    def __init__(self, own_files: OwnFiles, folder: Path, rank: int, steps: int, resumes: bool) -> None:
        super().__init__(own_files, folder, rank, steps)
        self._resumes = resumes
        self._state: State | None = None
        self._first = ""
        self._place = ""
        for owner, name in ((dcp, "save"), (dcp, "async_save"), (torch, "save")):
            around(owner, name, self._saving)
        for owner, name in ((dcp, "load"), (torch, "load")):
            around(owner, name, self._loading)

    def _saving(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        marker = self.folder / _SAVED
        if not self._inside() and not self._resumes and self.count and not marker.exists():
            write_whole(marker, f"{self.count} {self._own_files.line() or ''}")
        saved = original(*args, **kwargs)
        upload = getattr(saved, "upload_completion", saved)
        if isinstance(upload, Future):
            upload.result()  # the run may end before the script waits for it
        return saved

    def _loading(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not self._inside() and self._is_written(args[0] if args else kwargs.get("f")):
            self._place = self._own_files.line() or ""
        return original(*args, **kwargs)

    def _is_written(self, path: object) -> bool:
        """Return whether the first run wrote what is loaded: a file in the layer, or any state dict (dcp)."""
        if not isinstance(path, str | os.PathLike):
            return isinstance(path, dict)
        return os.path.exists(f"{self.folder / 'files'}{os.path.abspath(os.fsdecode(path))}")

    def _inside(self) -> bool:
        """Return whether torch's own checkpoints, or this project, are saving or loading a part."""
        caller = str(sys._getframe(3).f_globals.get("__name__"))
        return caller.startswith((_LIBRARY, "fsdpbench."))

    def _now(self, place: str) -> State:
        weights = {name: each.weight for name, each in self.held().items()}
        every = [state for each in self._optimizers for state in each.state.values()]
        shaped = {
            kind: self._as_gradients(kind) for kind in sorted({kind for state in every for kind in state})
        }
        states = {kind: found for kind, found in shaped.items() if any(found.values())}
        rates = [float(group["lr"]) for each in self._optimizers for group in each.param_groups]
        steps = [float(state["step"]) for state in every if "step" in state]
        counts = {"step": max(steps, default=0.0), "learning rate": rates[0] if rates else 0.0}
        schedules = [each for each in gc.get_objects() if issubclass(type(each), LRScheduler)]
        counts["the next learning rate of the schedule"] = sum(map(_next_rate, schedules))
        return State(weights, states, counts, self.count, place, self._first)

    def _as_gradients(self, kind: str) -> dict[str, Piece | None]:
        """Return one kind of optimizer state by parameter, sharded like the parameters: it replaces the
        gradients for a moment."""
        groups = [(each.state, group["params"]) for each in self._optimizers for group in each.param_groups]
        kept = [
            (each, each.grad, states.get(each, {}).get(kind)) for states, every in groups for each in every
        ]
        try:
            for parameter, _, state in kept:
                fits = isinstance(state, torch.Tensor) and state.shape == parameter.shape
                parameter.grad = state.to(parameter.dtype) if fits else None
            return {name: each.gradient for name, each in self.held().items()}
        finally:
            for parameter, gradient, _ in kept:
                parameter.grad = gradient

    def begin(self) -> None:
        """Record the state before a step."""
        self._state = self._now(self._place)

    def backward(self, run: Callable[[], None]) -> None:
        """Run a backward, after which the data of the step is known. A run that resumes ends with it."""
        run()
        self._first = self._first or self.record.inputs
        if self._state is not None:
            self._state.next, self._state.first = self.record.inputs, self._first
            self._leave(self._state)
        if self._resumes:
            raise MeasuredAllError

    def stepped(self) -> None:
        """End the run a step after a rank saved: a later checkpoint would replace the first."""
        if not self._resumes and 0 < saved_after(self.folder)[0] < self.count:
            raise MeasuredAllError

    def finish(self) -> None:
        """Record the state at the end of the script."""
        if not self._resumes or self._state is None:
            self._leave(self._now(self._place))

    def _leave(self, state: State) -> None:
        steps = 0 if self._resumes else state.steps  # loading may step an optimizer, to create its states
        keep(state, _path(self.folder, steps, self.rank))
        self._state = None


def _next_rate(schedule: Any) -> float:
    """Return the learning rate that a schedule's next step will set, without stepping it."""
    ahead = copy.copy(schedule)
    groups = [dict(group) for group in schedule.optimizer.param_groups]
    ahead.optimizer, ahead.last_epoch = SimpleNamespace(param_groups=groups), schedule.last_epoch + 1
    with warnings.catch_warnings(), contextlib.suppress(Exception):  # the class may be the script's own
        warnings.simplefilter("ignore")
        return float(ahead.get_lr()[0])
    return 0.0
