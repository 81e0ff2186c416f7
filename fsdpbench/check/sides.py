"""Reads one side of a comparison, whatever it lies in, with the surroundings that its figures belong to.

A side is a sweep's folder, a configuration's folder in one (its repeated runs with it), a `result.json`, what
`sweep --json` printed, or a baseline.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fsdpbench.check.baseline import Baseline, is_baseline
from fsdpbench.check.entries import Entry, entry_of
from fsdpbench.check.surroundings import Surroundings, surroundings_of
from fsdpbench.config import Config
from fsdpbench.errors import CannotJudgeError, UsageError
from fsdpbench.reading import read_json
from fsdpbench.store import RESULT_FILE, SWEEP_FILE, Store

Result = Mapping[str, Any]


@dataclass(frozen=True)
class Side:
    """`took_place`: when its first and its last run began (ISO 8601), where it is known."""

    label: str
    entries: dict[str, Entry]
    surroundings: Surroundings
    took_place: tuple[str, str] | None = field(default=None, compare=False)


def read_side(path: Path) -> Side:
    """Raises `UsageError` for a path that holds no results, `CannotJudgeError` for one that holds none of
    this torch."""
    if path.is_dir():
        if (path / SWEEP_FILE).is_file():
            return stored_side(path)
        if (path / RESULT_FILE).is_file():
            return side_of(str(path), {_name_in(path): _runs_beside(path)})
        raise UsageError(f"{path}: neither a sweep's folder ({SWEEP_FILE}) nor a result's ({RESULT_FILE})")
    content = read_json(path)
    if is_baseline(content):
        baseline = Baseline.read(path)
        return Side(str(path), baseline.entries(path), baseline.surroundings(path))
    if isinstance(content, Mapping) and isinstance(content.get("results"), list):
        return side_of(str(path), {result["name"]: [result] for result in content["results"]})
    if isinstance(content, Mapping) and "config" in content and "status" in content:
        return side_of(str(path), {_name_of(path, content): [content]})
    raise UsageError(f"{path}: is no result, no `sweep --json` and no baseline of this version")


def stored_side(folder: Path) -> Side:
    """The configurations that a sweep's folder names, all runs of each."""
    points = Store.open(folder).current_points()
    if not points:
        raise CannotJudgeError(f"{folder}: holds no finished configuration")
    return side_of(str(folder), {point.config["name"]: _runs_beside(point.folder) for point in points})


def side_of(label: str, results: Mapping[str, Sequence[Result]]) -> Side:
    """From the results of all runs, by configuration name."""
    entries = {name: entry_of(runs) for name, runs in results.items()}
    every = [result for runs in results.values() for result in runs]
    began = sorted(start for result in every if (start := (result.get("bench") or {}).get("started")))
    return Side(label, entries, surroundings_of(every), (began[0], began[-1]) if began else None)


def paired(before: Side, after: Side) -> tuple[dict[str, Entry], dict[str, Entry]]:
    """The entries of both by name; where each side holds one configuration, those two, whatever their
    names."""
    first, second = before.entries, after.entries
    if len(first) == len(second) == 1 and first.keys() != second.keys():
        name = f"{next(iter(first))} -> {next(iter(second))}"
        return {name: next(iter(first.values()))}, {name: next(iter(second.values()))}
    return first, second


def notes_on(before: Side, after: Side) -> list[str]:
    """What the reader of a measured comparison should know of how it was measured."""
    if before.surroundings.is_exact or before.took_place is None or after.took_place is None:
        return []
    if before.took_place[1] < after.took_place[0] or after.took_place[1] < before.took_place[0]:
        return [
            "the sides were measured one after the other: a drift of the machine would pass for a change; "
            "one sweep of both with --repeat interleaves them"
        ]
    return []


def _runs_beside(folder: Path) -> list[Result]:
    """The result in a configuration's folder, and those of its further runs."""
    further = [path for path in folder.parent.glob(f"{folder.name}.run*") if (path / RESULT_FILE).is_file()]
    numbered = sorted(further, key=lambda path: int(path.name.rpartition(".run")[2]))
    return [read_json(path / RESULT_FILE) for path in (folder, *numbered)]


def _name_in(folder: Path) -> str:
    path = folder / "config.json"
    if path.is_file():
        return str(read_json(path)["name"])
    return _name_of(folder / RESULT_FILE, read_json(folder / RESULT_FILE))


def _name_of(path: Path, result: Result) -> str:
    try:
        return Config.from_dict(result["config"]).name
    except (KeyError, TypeError) as error:
        raise UsageError(f"{path}: its `config` is not that of this version ({error})") from None


def require_common(before: Iterable[str], after: Iterable[str]) -> None:
    """Raises `CannotJudgeError` if no configuration is on both sides."""
    first, second = set(before), set(after)
    if not first & second:
        raise CannotJudgeError(
            f"no configuration is on both sides: {len(first)} on one ({min(first, default='none')}), "
            f"{len(second)} on the other ({min(second, default='none')})"
        )
