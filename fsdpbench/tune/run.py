"""A search from its plan to its answer, in one folder that a second start goes on with.

search/     every point that was simulated, untraced       ── ranks ──┐
<config>/   the best of them, in full: on the device asked for  <─────┘  ──> tune.json, best.toml, snippets
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsdpbench.config import Config
from fsdpbench.errors import BenchError
from fsdpbench.provenance import content_key
from fsdpbench.settings import show_value
from fsdpbench.store import Store
from fsdpbench.sweep.prediction import as_simulated
from fsdpbench.sweep.runner import Progress, jobs_for, run_sweep
from fsdpbench.toml_text import to_toml
from fsdpbench.tune.front import Candidate, judge, pareto
from fsdpbench.tune.search import search
from fsdpbench.tune.snippets import snippets

BEST_FILE = "best.toml"
RECORD_FILE = "tune.json"


@dataclass(frozen=True)
class Goal:
    """What is wanted: the most of `name` (a key of `front.GOALS`) within `memory` bytes a GPU."""

    name: str
    memory: int | None = None


@dataclass(frozen=True)
class Answer:
    """The front, fastest first, as run in full; and how many points were tried to find it."""

    front: tuple[Candidate, ...]
    tried: int
    feasible: int


def tune(
    store: Store,
    space: dict[str, Any],
    points: Sequence[Config],
    goal: Goal,
    *,
    trials: int,
    seed: int,
    finalists: int,
    progress: Progress,
    quiet: Progress,
    tell: Callable[[str], None],
) -> Answer:
    """Search `points` on simulated GPUs, run the best `finalists` in full, write what came of it.

    `progress` shows the full runs, `quiet` the search's; `tell` takes a line now and then. The caller holds
    the store's lock. Raises `BenchError` if nothing that was tried is feasible.
    """
    simulated = [changed for config in points if (changed := as_simulated(config)) is not None]
    origin = {content_key(as_sim): config for config, as_sim in _pairs(points)}
    store.write_space(space, [])
    searching = Store.open_or_create(store.folder / "search")
    searching.write_space(space, simulated)
    done = 0

    def evaluate(batch: Sequence[Config]) -> list[Candidate]:
        nonlocal done
        run_sweep(searching, batch, quiet, jobs=jobs_for("sim"), index=False)
        done += len(batch)
        tell(f"{done} of {min(trials, len(simulated))} simulated")
        return [_judged(searching, config, goal) for config in batch]

    with searching.locked():
        tried = search(simulated, trials, seed, evaluate)
    best = _finalists(tried, finalists)
    if not best:
        raise BenchError(_nothing_fits(tried, goal))
    chosen = [origin[content_key(candidate.config)] for candidate in best]
    store.write_space(space, chosen)
    run_sweep(store, chosen, progress, jobs=jobs_for(chosen[0].device))
    front = tuple(pareto([_judged(store, config, goal) for config in chosen]))
    if not front:
        raise BenchError(f"none of the {len(chosen)} best configurations ran; see {store.folder}")
    answer = Answer(front, len(tried), sum(candidate.feasible for candidate in tried))
    _write(store.folder, answer, goal)
    return answer


def _pairs(points: Sequence[Config]) -> list[tuple[Config, Config]]:
    return [(config, changed) for config in points if (changed := as_simulated(config)) is not None]


def _judged(store: Store, config: Config, goal: Goal) -> Candidate:
    results = store.runs(config)
    # A folder removed while the search runs is a point that told nothing.
    return judge(config, results[0] if results else {"status": "error"}, goal.name, goal.memory)


def _finalists(tried: Sequence[Candidate], count: int) -> list[Candidate]:
    """The front from its fast end, then the fastest of the rest."""
    front = pareto(tried)[:count]
    keys = {content_key(candidate.config) for candidate in front}
    rest = sorted((c for c in tried if c.feasible), key=lambda candidate: -candidate.speed)
    rest = [candidate for candidate in rest if content_key(candidate.config) not in keys]
    return front + rest[: count - len(front)] if front and front[0].config.device != "sim" else front


def _nothing_fits(tried: Sequence[Candidate], goal: Goal) -> str:
    memories = [candidate.memory for candidate in tried if candidate.memory is not None]
    if goal.memory is not None and memories:
        least = min(memories) / 1e9
        return f"nothing of {len(tried)} fits into {goal.memory / 1e9:g} GB; the least needs {least:.1f} GB"
    return (
        f"none of the {len(tried)} points that were tried ran: smaller batches, "
        f"activation_checkpointing=full or more GPUs may"
    )


def _write(folder: Path, answer: Answer, goal: Goal) -> None:
    best = answer.front[0].config
    for name, source in snippets(best).items():
        _write_whole(folder / name, source)
    _write_whole(folder / BEST_FILE, to_toml(one_point_space(best)))
    record = {
        "schema": 1,
        "goal": goal.name,
        "memory_limit_bytes": goal.memory,
        "tried": answer.tried,
        "feasible": answer.feasible,
        "simulated": best.device == "sim",
        "best": best.name,
        "front": [
            {"name": each.config.name, "speed": each.speed, "peak_reserved_bytes": each.memory}
            for each in answer.front
        ],
    }
    _write_whole(folder / RECORD_FILE, json.dumps(record, indent=1) + "\n")


def one_point_space(config: Config) -> dict[str, Any]:
    """`config` as a space of one point: `fsdpbench sweep best.toml` runs it again."""
    settings = config.settings.to_dict()
    return {
        "model": config.model,
        "shape": ",".join(f"{n}={show_value(v)}" for n, v in config.shape_given.items()) or None,
        "system": [config.system],
        "device": config.device,
        "hardware": config.hardware,
        "gpus": config.gpus,
        "gpus_per_node": config.gpus_per_node,
        "data": config.data,
        "settings": {name: value for name, value in settings.items() if value is not None},
    }


def _write_whole(path: Path, text: str) -> None:
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text)
    os.replace(partial, path)
