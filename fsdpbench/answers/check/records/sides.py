"""Read one side of a comparison from any supported source, with the surroundings of its figures.

A side is a sweep's folder, a configuration's folder in it (with its repeated runs), a `result.json`, the
output of `sweep --json`, or a baseline.
"""

import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import msgspec

from fsdpbench.answers.check import LEAVE_OUT as FLAG
from fsdpbench.answers.check.metrics import with_records
from fsdpbench.answers.check.records import baseline as baselines
from fsdpbench.answers.check.records.entries import Entry, entry_of
from fsdpbench.base.configuration.config import Config
from fsdpbench.base.configuration.simulated_cuda import VARIABLE
from fsdpbench.base.errors import CannotJudgeError, UsageError, error_text
from fsdpbench.base.reading import UnreadableError, one_line, read_json
from fsdpbench.engine.results.provenance import another_key
from fsdpbench.engine.results.records import Status, read_records
from fsdpbench.engine.results.store import RESULT_FILE, SWEEP_FILE, Store
from fsdpbench.reports.consistency import misfiled

Result = Mapping[str, Any]

_KEY = re.compile(r"-[0-9a-f]{8}$")
_FURTHER_RUN = re.compile(r"\.run([2-9]|[1-9][0-9]{1,8})$")


@dataclass(frozen=True)
class Side:
    """One side of a comparison. `absent`: its configurations without a usable result, with the reason.
    `left_out`: configurations excluded from a baseline.  `took_place`: start times of the first and last run
    (ISO 8601), if known."""

    label: str
    entries: dict[str, Entry]
    surroundings: baselines.Surroundings
    took_place: tuple[str, str] | None = field(default=None, compare=False)
    absent: Mapping[str, str] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()
    how: str = ""
    """`eager`, `compiled` or `eager and compiled`; empty if not known."""


def read_side(path: Path) -> Side:
    """Read a side from `path`. Raises `UsageError` if there are no results, `CannotJudgeError` if there are
    none for this version of torch, or no usable ones."""
    if os.path.isdir(path):
        if (path / SWEEP_FILE).is_file():
            return stored_side(path)
        if (path / RESULT_FILE).is_file():
            return _judgeable(side_of(str(path), {_name_in(path): _runs_beside(path)}))
        raise UsageError(f"{path}: neither a sweep's folder ({SWEEP_FILE}) nor a result's ({RESULT_FILE})")
    content = read_json(path)
    if baselines.is_baseline(content):
        return baseline_side(baselines.Baseline.of(content, path), path)
    if isinstance(content, Mapping) and isinstance(content.get("results"), list):
        return _judgeable(side_of(str(path), _named_results(path, content["results"])))
    if isinstance(content, Mapping) and "config" in content and "status" in content:
        if (name := _result_name(content)) is None:
            raise UsageError(f"{path}: its `config` is not that of this version")
        return _judgeable(side_of(str(path), {name: [content]}))
    raise UsageError(f"{path}: is not a result, the output of `sweep --json` or a baseline of this version")


def baseline_side(baseline: baselines.Baseline, path: Path) -> Side:
    """Return the set for the installed torch. Raises `CannotJudgeError` if there is none."""
    figures = baseline.of_this_torch(path)
    surroundings = baselines.Surroundings(figures.surroundings)
    return Side(str(path), figures.entries(), surroundings, left_out=tuple(figures.left_out))


def stored_side(folder: Path) -> Side:
    """Return the configurations that a sweep's folder lists, with all runs of each."""
    named = Store.open(folder).read_space().get("points", [])
    if not isinstance(named, list) or not all(
        isinstance(name, str) and name not in ("", ".", "..") and not {"/", "\0"} & {*name} for name in named
    ):
        raise UsageError(f"{folder / SWEEP_FILE}: points must be a list of folders beside it")
    found: dict[str, list[Result] | str] = {}
    for name in named:
        path = folder / name
        runs = _runs_beside(path)
        configuration = _KEY.sub("", name) if isinstance(runs, str) else _name_in(path)
        if configuration in found:
            raise CannotJudgeError(f"{folder}: holds two configurations named {configuration}")
        found[configuration] = runs
    if not found:
        raise CannotJudgeError(f"{folder}: holds no finished configuration")
    return _judgeable(side_of(str(folder), found))


def side_of(label: str, results: Mapping[str, Sequence[Result] | str]) -> Side:
    """Build a side from the results of all runs of each configuration, or the reason why there are none."""
    usable: dict[str, Sequence[Result]] = {}
    absent: dict[str, str] = {}
    for name, runs in results.items():
        try:
            if isinstance(runs, str):
                raise UsageError(runs)
            for run in runs:
                baselines.strictly(run, _SeenResult, "its result")
            usable[name] = runs
        except UsageError as error:
            absent[name] = str(error)
    every = [result for runs in usable.values() for result in runs]
    _refuse_rehearsals(label, usable)
    began = sorted(start for result in every if isinstance(start := _began(result), str))
    return Side(
        label,
        {name: entry_of(runs) for name, runs in usable.items()},
        baselines.surroundings_of(every),
        (began[0], began[-1]) if began else None,
        absent,
        how=_how(every),
    )


def _how(results: Sequence[Result]) -> str:
    found = {known for result in results if isinstance(known := result.get("compiled"), bool)}
    return " and ".join(word for word, known in (("eager", False), ("compiled", True)) if known in found)


def _refuse_rehearsals(label: str, results: Mapping[str, Sequence[Result]]) -> None:
    """Raise `CannotJudgeError` if the cuda path ran on a simulated GPU. Such a run tests the path; its
    figures are neither measured nor those of `--device sim`."""
    for name, runs in results.items():
        for run in runs:
            hardware = run.get("hardware")
            if run.get("device") != "sim" and isinstance(hardware, Mapping) and hardware.get("simulated"):
                raise CannotJudgeError(error_text("sides.not_cuda", label, name, VARIABLE))


def paired(before: Side, after: Side) -> tuple[dict[str, Entry], dict[str, Entry]]:
    """Return the entries of both sides by name. If each side has only one, pair these anyway."""
    first, second = before.entries, after.entries
    alone = not before.absent and not after.absent
    if alone and len(first) == len(second) == 1 and first.keys() != second.keys():
        name = f"{next(iter(first))} -> {next(iter(second))}"
        return {name: next(iter(first.values()))}, {name: next(iter(second.values()))}
    return first, second


def absent_of(before: Side, after: Side) -> dict[str, str]:
    """Return the configurations without a usable result on either side, with side and reason."""
    reasons = {name: f"on the older side, {reason}" for name, reason in before.absent.items()}
    return reasons | {name: f"on the newer side, {reason}" for name, reason in after.absent.items()}


def notes_on(before: Side, after: Side) -> list[str]:
    """Return notes for the reader of a comparison: possible drift, and whether it ran eager or compiled."""
    if before.how == after.how:
        return _drift(before, after) + ([f"both sides: {after.how}"] if after.how else [])
    how = "; ".join(f"{side.label}: {side.how or 'not known whether compiled'}" for side in (before, after))
    return [*_drift(before, after), how]


def _drift(before: Side, after: Side) -> list[str]:
    one, other = before.took_place, after.took_place
    if before.surroundings.is_exact or one is None or other is None:
        return []
    apart = one[1] < other[0] or other[1] < one[0]
    return [error_text("sides.drift")] * apart


def require_common(before: Iterable[str], after: Iterable[str]) -> None:
    """Raise `CannotJudgeError` if no configuration is on both sides."""
    first, second = set(before), set(after)
    if not first & second:
        found = [each for side in (first, second) for each in (len(side), min(side, default="none"))]
        raise CannotJudgeError(error_text("sides.nothing_shared", *found))


def _judgeable(side: Side) -> Side:
    """Return the side. Raises `CannotJudgeError` if it has no usable result."""
    if not side.entries:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in list(side.absent.items())[:3])
        raise CannotJudgeError(f"{side.label}: holds no usable result ({reasons or 'it is empty'})")
    return side


def _runs_beside(folder: Path) -> list[Result] | str:
    """Return the results in a configuration's folder and its further runs, or why one cannot be read."""
    further = {}
    for name in os.listdir(folder.parent):
        found = _FURTHER_RUN.search(name) if name.startswith(folder.name) else None
        if found and name == f"{folder.name}{found[0]}":
            further[int(found[1])] = folder.parent / name
    results = []
    for number, run in {1: folder, **dict(sorted(further.items()))}.items():
        file = run / RESULT_FILE
        try:
            result = read_json(file)
        except UnreadableError as error:
            return f"{RESULT_FILE} of run {number} {str(error).removeprefix(f'{file}: ')}"
        if why := _other_files_say(run, result):
            return why if number == 1 else f"of run {number}, {why}"
        results.append(with_records(result, read_records(run)) if isinstance(result, Mapping) else result)
    return results


def _other_files_say(folder: Path, result: object) -> str | None:
    """Return how other files in the folder show that a result belongs to another configuration, or None."""
    try:
        config = read_json(folder / "config.json")
    except UnreadableError:
        return None  # missing or broken: the result itself has its configuration
    if not isinstance(config, Mapping) or not isinstance(result, Mapping):
        return None
    return misfiled(folder.resolve().name, config, result) or another_key(config, result)


def _name_in(folder: Path) -> str:
    """Return a configuration's name from `config.json`, else from the result, else from the folder."""
    for file, name_of in (("config.json", _recorded_name), (RESULT_FILE, _result_name)):
        try:
            name = name_of(read_json(folder / file))
        except UnreadableError:
            continue
        if name is not None:
            return name
    return _KEY.sub("", folder.resolve().name)


def _recorded_name(content: object) -> str | None:
    name = content.get("name") if isinstance(content, Mapping) else None
    return name if isinstance(name, str) else None


def _result_name(content: object) -> str | None:
    """Return the name of a result's `config`, or None if this version cannot read it."""
    try:
        return Config.from_dict(content["config"]).name  # type: ignore[index]
    except (AttributeError, KeyError, TypeError, ValueError, UsageError):
        return None


def _named_results(path: Path, results: Iterable[object]) -> dict[str, list[Result] | str]:
    """Return the results in the output of `sweep --json`, by configuration. Raises `UsageError`."""
    found: dict[str, list[Result] | str] = {}
    for result in results:
        name = _recorded_name(result)
        if name is None or not isinstance(result, Mapping):
            raise UsageError(f"{path}: holds a result without a name")
        if name in found:
            raise CannotJudgeError(f"{path}: holds two configurations named {name}")
        found[name] = [result]
    return found


def _began(result: Result) -> object:
    bench = result.get("bench")
    return bench.get("started") if isinstance(bench, Mapping) else None


class _Environment(msgspec.Struct, frozen=True):
    versions: dict[str, object] | None = None
    machine: dict[str, object] | None = None
    variables: dict[str, object] | None = None


class _Config(msgspec.Struct, frozen=True):
    shape: dict[str, object] | None = None


class _SeenResult(msgspec.Struct, frozen=True):
    status: Status
    device: str
    schema: Literal[1] = 1
    config: _Config | None = None
    hardware: dict[str, object] | None = None
    environment: _Environment | None = None


_NAMED = 5
_LONGEST = 500


def whole(side: Side, leave_out: Collection[str]) -> Side:
    """Return `side` without `leave_out`. Raises `CannotJudgeError` that names every other configuration that
    failed, is not finished or has an invalid figure; `UsageError` if the sweep lacks one of `leave_out`."""
    baselines.check_names(leave_out, [*side.entries, *side.absent], side.label, "", f"configuration ({FLAG})")
    kept = replace(
        side,
        entries={name: entry for name, entry in side.entries.items() if name not in leave_out},
        absent={name: reason for name, reason in side.absent.items() if name not in leave_out},
    )
    flaws = flaws_of(kept)
    if flaws:
        lines = [one_line(f"{name}: {flaw}", _LONGEST) for name, flaw in flaws.items()]
        shown = "; ".join(lines[:_NAMED])
        more = f"; and also {', '.join(list(flaws)[_NAMED:])}" if len(flaws) > _NAMED else ""
        raise CannotJudgeError(error_text("sides.failed", side.label, shown, more, FLAG))
    if not kept.entries:
        raise CannotJudgeError(f"{side.label}: no configuration is left for a baseline")
    return kept


def flaws_of(side: Side) -> dict[str, str]:
    """Return why configurations cannot be part of a baseline, by name."""
    flaws = dict(side.absent)
    most = max((len(entry.runs) for entry in side.entries.values() if entry.status.is_answer), default=0)
    for name, entry in side.entries.items():
        if not entry.status.is_answer:
            flaws[name] = f"ended with {entry.status.value}" + (f" ({entry.cause})" if entry.cause else "")
        elif entry.status is Status.OK:
            broken = next((f"{figure} {why}" for figure, why in entry.flaws().items()), None)
            if broken is not None:
                flaws[name] = broken
            elif len(entry.runs) < most:
                flaws[name] = f"has {len(entry.runs)} of {most} runs"
    return flaws
