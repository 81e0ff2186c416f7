"""The batch of each activation checkpointing: the largest one that leaves a margin of memory.

Two small batches are simulated with each; what a GPU holds grows with the batch along a line.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from fsdpbench.base.configuration.config import Config
from fsdpbench.base.settings import Settings, Value, show_value
from fsdpbench.base.writing import remove
from fsdpbench.engine.results.provenance import content_key
from fsdpbench.sim.model.profile import load_profile
from fsdpbench.sweep.planning import make_config
from fsdpbench.sweep.prediction import PROBE
from fsdpbench.sweep.runner import simulate
from fsdpbench.sweep.spaces.presets import CHECKPOINTING
from fsdpbench.sweep.spaces.rules import Rule
from fsdpbench.sweep.spaces.space import Space
from fsdpbench.sweep.trials import Progress, thrown_away, with_room
from fsdpbench.systems import get_system

MARGIN = 0.1  # of the memory; predictions of it are off by less in nine of ten cases
_TRIED = (1, 4)
_USUAL = (1, 2, 3, 4, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64, 80, 96, 128, 192, 256, 384, 512, 768, 1024)


def fitting_batches(
    space: Space, jobs: int, tell: Callable[[str], None], kept: Path | None = None
) -> tuple[Rule, ...]:
    """Return a rule for each activation checkpointing in `space` (simulated GPUs) that states its batch;
    none where it cannot be simulated. `tell` receives a line with them; `kept`: the folder of simulations."""
    if kept is None:
        with thrown_away("batches") as folder:
            return fitting_batches(space, jobs, tell, folder)
    if kept.is_symlink():
        remove(kept)
    values, system = space.lists[CHECKPOINTING], get_system(space.systems[0])
    usable = (1 - MARGIN) * load_profile(space.targets[0].hardware or "").usable_memory_bytes
    asked = [(value, batch) for value in values for batch in _TRIED]
    configs = [_config(space, value, batch) for value, batch in asked]
    if any(system.not_applicable(config) for config in configs):
        return ()
    held = dict(zip(asked, _held(configs, jobs, kept), strict=True))
    few, more = _TRIED
    found = {value: _most(usable, (few, held[value, few]), (more, held[value, more])) for value in values}
    # Of a large batch memory has its peak elsewhere and grows faster: between two points a line is safe.
    largest = _held([_config(space, value, batch) for value, batch in found.items()], jobs, kept)
    for (value, batch), reserved in zip(list(found.items()), largest, strict=True):
        if reserved is None or reserved > usable:
            found[value] = _most(usable, (more, held[value, more]), (batch, reserved))
    words = ", ".join(f"{batch} with {show_value(value)}" for value, batch in found.items())
    tell(f"  batch by activation_checkpointing: {words} (the largest that leave {MARGIN:.0%} of memory)")
    return tuple(Rule({CHECKPOINTING: (value,)}, {"batch": (batch,)}) for value, batch in found.items())


def _config(space: Space, value: Value, batch: int) -> Config:
    first = {name: listed[0] for name, listed in space.lists.items()}
    settings = Settings.of(**{**first, CHECKPOINTING: value, "batch": batch})
    return make_config(space.targets[0], space.systems[0], settings, space.targets[0].workload())


def _held(configs: list[Config], jobs: int, kept: Path) -> list[int | None]:
    """Return the peak of reserved bytes of each, on GPUs with room for all; None where that has no end."""
    roomy = [with_room(replace(config, measurement=PROBE)) for config in configs]
    results = simulate(roomy, kept, Progress(), jobs)
    return [results[content_key(config)].stored("peak_memory_bytes.reserved") for config in roomy]


def _most(usable: float, few: tuple[int, int | None], more: tuple[int, int | None]) -> int:
    """Return the largest usual batch on the line through two points (batch, bytes) that is `usable`."""
    if few[1] is None or more[1] is None:
        return few[0]
    each = max(1.0, (more[1] - few[1]) / max(more[0] - few[0], 1))
    return max((batch for batch in _USUAL if batch <= few[0] + (usable - few[1]) / each), default=1)
