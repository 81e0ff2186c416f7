"""Simulates what the atlas needs, wave by wave: what is tried next depends on what came before."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from fsdpbench.atlas.space import Cell, Results, next_wave
from fsdpbench.configuration.config import Config
from fsdpbench.sweep.runner import simulate
from fsdpbench.sweep.trials import Progress


def build(
    cells: Sequence[Cell],
    folder: Path,
    progress: Callable[[], Progress],
    jobs: int | None = None,
) -> Results:
    """The results of all that was tried, by content key. Interrupted, call it again to resume."""
    results: Results = {}
    tried: list[Config] = []
    while wave := next_wave(cells, results):
        tried += wave
        results = simulate(tried, folder, progress(), jobs)
    return results
