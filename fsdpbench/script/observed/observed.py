"""All that was seen of a script, as one record."""

from __future__ import annotations

import contextlib
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from fsdpbench.script.interposing.blocks import (
    Blocks,
    bare_parameters,
    blocks_of,
    class_name,
    is_unit,
    parameter_names,
    unwrapped_root,
)
from fsdpbench.script.interposing.calls import around_init
from fsdpbench.script.observed.calls import Calls
from fsdpbench.script.observed.exchange import Exchange
from fsdpbench.script.observed.gradients import Gradients
from fsdpbench.script.observed.habits import Habits
from fsdpbench.script.observed.loaders import Loaders
from fsdpbench.script.observed.waits import Waits
from fsdpbench.script.own_files import OwnFiles
from fsdpbench.sim import Simulation


class Observed:
    """Made before the script starts, and after the variations: what it does is seen, not what becomes of
    it."""

    def __init__(self, own_files: OwnFiles, waits: Waits, folder: Path, simulation: Simulation) -> None:
        self.calls = Calls(own_files)
        self.habits = Habits(own_files, self.calls.place)
        self.gradients = Gradients(self.calls.place, Exchange(simulation), self.calls.wrappers)
        self.loaders = Loaders(folder, simulation)
        self.waits = waits
        self._own_files = own_files
        self._model: dict[str, Any] | None = None
        register_optimizer_step_post_hook(lambda optimizer, args, kwargs: self._look_at_loop())
        around_init(torch.optim.Optimizer, lambda parameters, kwargs: self._look_at_model())

    def _look_at_model(self) -> None:
        """As the first optimizer is made the model is complete."""
        if self._model is None:
            with contextlib.suppress(Exception):  # a model may be anything
                self._model = self._described()
                self.gradients.names = parameter_names()

    def _look_at_loop(self) -> None:
        """An optimizer of the script's own has stepped."""
        frame = self._own_files.innermost() if self.waits.loop is None else None
        if frame is not None and self._own_files.has(frame.f_code.co_filename):
            self.waits.loop = frame.f_code

    def _described(self) -> dict[str, Any]:
        bare = unwrapped_root()
        wrapped = [
            each.module() for each in self.calls.wrappers.made if each.api != "DistributedDataParallel"
        ]
        model = bare or (wrapped[-1] if wrapped else None)
        if model is None:
            return {}
        units = [each for each in model.modules() if is_unit(each)]
        kinds = Counter(class_name(each) for each in units if each is not model)
        dtypes = Counter(parameter.dtype for parameter in model.parameters())
        return {
            "class": class_name(model),
            "blocks": self.calls.blocks if bare is None else _told(blocks_of(bare)),
            "units": len(units),
            "unit_classes": dict(kinds),
            "unwrapped_root": bare is not None,
            "unsharded_parameters": 0 if bare is None else bare_parameters(bare),
            "dtype": str(dtypes.most_common(1)[0][0]) if dtypes else None,
        }

    def to_dict(self, steps: int) -> dict[str, Any]:
        """As in `result.json`, after `steps` steps."""
        calls = self.calls
        return {
            "sharding": calls.sharding,
            "model": self._model or {},
            "optimizers": calls.optimizers,
            "loaders": calls.loaders,
            "checkpointing": calls.checkpointing,
            "forward_prefetch": calls.prefetching,
            "batch": calls.batch,
            "waits": self.waits.to_list(steps),
            **self.habits.to_dict(steps),
            "gradients": self.gradients.to_dict(),
        }


def _told(blocks: Blocks | None) -> dict[str, Any] | None:
    if blocks is None:
        return None
    return {"path": blocks.path, "class": blocks.class_name, "count": len(blocks.modules)}
