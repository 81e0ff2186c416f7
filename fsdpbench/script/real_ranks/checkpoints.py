"""The content of a script's checkpoints, by its state when it saves and when it has loaded.

    first run    trains and saves           saved2_rank0.pt: weights, optimizer states and data after step 2
                                            saved.json: the step after which a rank saved first, and its line
    second run   other ranks, which load    loaded_rank0.pt: the same, before their first step

The files are in the layer of the run; the second run gets a copy of it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed.checkpoint as dcp

from fsdpbench.base.files.whole_files import write_whole
from fsdpbench.script.interposing import around
from fsdpbench.script.own_files import OwnFiles
from fsdpbench.script.real_ranks.pieces import Piece, held_parameters, keep
from fsdpbench.script.real_ranks.watching import Watch
from fsdpbench.script.steps import MeasuredAllError

_SAVED = "saved.json"
_LIBRARY = "torch.distributed.checkpoint"


class Moment(StrEnum):
    """When the state of a script is written down."""

    SAVED = "saved"
    LOADED = "loaded"


@dataclass
class State:
    """The state of a rank: weights, optimizer states by kind, and the data of the next step. `first`:
    the data of the run's first step; `place`: the script's line that saved or loaded."""

    weights: Mapping[str, Piece]
    states: Mapping[str, Mapping[str, Piece | None]] = field(default_factory=dict)
    counts: Mapping[str, float] = field(default_factory=dict)
    steps: int = 0
    first: str = ""
    next: str = ""
    place: str = ""


class Saved(msgspec.Struct, frozen=True):
    """The steps that were done when a rank saved first, and the script's line."""

    steps: int
    place: str


def _file(moment: Moment, steps: int, rank: int) -> str:
    return f"{moment}{steps if moment is Moment.SAVED else ''}_rank{rank}.pt"


def read_states(folder: Path, moment: Moment, ranks: int) -> list[State]:
    """Return the states of all ranks at a moment; none if it never came for one of them."""
    steps, place = 0, ""
    if moment is Moment.SAVED:
        if not (folder / _SAVED).exists():
            return []
        saved = msgspec.json.decode((folder / _SAVED).read_bytes(), type=Saved)
        steps, place = saved.steps, saved.place
    paths = [folder / _file(moment, steps, rank) for rank in range(ranks)]
    if not all(path.exists() for path in paths):
        return []
    found: list[State] = [torch.load(path, weights_only=False) for path in paths]
    for each in found:
        each.place = each.place or place
    return found


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

    def _saving(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def save(content: Any, *args: Any, **kwargs: Any) -> Any:
            marker = self.folder / _SAVED
            if not self._inside() and not self._resumes and self.count and not marker.exists():
                saved = Saved(self.count, self._own_files.line() or "")
                write_whole(marker, msgspec.json.encode(saved))
            return original(content, *args, **kwargs)

        return save

    def _loading(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def load(*args: Any, **kwargs: Any) -> Any:
            if not self._inside() and self._is_written(args[0] if args else kwargs.get("f")):
                self._place = self._own_files.line() or ""
            return original(*args, **kwargs)

        return load

    def _is_written(self, path: object) -> bool:
        """Return whether the first run wrote a file that is loaded: others hold data. States of dcp count."""
        if not isinstance(path, str | os.PathLike):
            return isinstance(path, dict)
        return os.path.exists(f"{self.folder / 'files'}{os.path.abspath(os.fsdecode(path))}")

    def _inside(self) -> bool:
        """Return whether torch's own checkpoints, or this project, save or load a part."""
        caller = str(sys._getframe(2).f_globals.get("__name__"))
        return caller.startswith((_LIBRARY, "fsdpbench."))

    def _now(self, place: str) -> State:
        weights = {name: each.weight for name, each in self.held().items()}
        states: dict[str, dict[str, Piece | None]] = {}
        every = [state for each in self._optimizers for state in each.state.values()]
        kinds = {kind for state in every for kind in state}
        for kind in sorted(kinds):
            shaped = self._as_gradients(kind)
            if any(each is not None for each in shaped.values()):
                states[kind] = shaped
        rates = [group["lr"] for each in self._optimizers for group in each.param_groups]
        steps = [float(state["step"]) for state in every if "step" in state]
        counts = {"step": max(steps, default=0.0), "learning rate": float(rates[0]) if rates else 0.0}
        return State(weights, states, counts, self.count, self._first, "", place)

    def _as_gradients(self, kind: str) -> dict[str, Piece | None]:
        """Return one kind of optimizer state by parameter, cut as the parameters are: it takes the place of
        the gradients for a moment."""
        kept: list[tuple[Any, Any]] = []
        try:
            for optimizer in self._optimizers:
                for group in optimizer.param_groups:
                    for parameter in group["params"]:
                        state = optimizer.state.get(parameter, {}).get(kind)
                        kept.append((parameter, parameter.grad))
                        fits = isinstance(state, torch.Tensor) and state.shape == parameter.shape
                        parameter.grad = state.to(parameter.dtype) if fits else None
            return {name: each.gradient for name, each in held_parameters().items()}
        finally:
            for parameter, gradient in kept:
                parameter.grad = gradient

    def begin(self) -> None:
        """Write down what the run has before a step."""
        self._state = self._now(self._place)

    def backward(self, run: Callable[[], None]) -> None:
        """Run a backward; the data of the step is known then. A run that resumes ends with it."""
        run()
        self._first = self._first or self.record.inputs
        if self._state is not None:
            self._state.next, self._state.first = self.record.inputs, self._first
            self._leave(self._state)
        if self._resumes:
            raise MeasuredAllError

    def finish(self) -> None:
        """Write down the state at the end of the script."""
        if not self._resumes or self._state is None:
            self._leave(self._now(self._place))

    def _leave(self, state: State) -> None:
        moment = Moment.LOADED if self._resumes else Moment.SAVED
        keep(state, self.folder / _file(moment, state.steps, self.rank))
        self._state = None
