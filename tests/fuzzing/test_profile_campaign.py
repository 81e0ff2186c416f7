"""Hostile values in every key of every packaged profile: refused by name, or simulated sanely, or doubted.

A run is sane if its step takes from a microsecond to ten minutes and holds no more memory than the GPU has.
What the result of a profile that was changed does not show must be in `environment.warnings`.
"""

from __future__ import annotations

import itertools
import json
import random
import tomllib
from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from forked_commands import CommandServer
from fuzz_count import FuzzCount
from workshop import PROFILES

from fsdpbench.base.files.documents import to_toml
from fsdpbench.sim.model import software
from fsdpbench.sim.model.keys import KEYS
from fsdpbench.sim.model.profile import load_profile, parse_profile, profile_names
from fsdpbench.sim.model.sections import GIB
from fsdpbench.sim.model.software import software_names

SOFTWARE = Path(software.__file__).parents[1] / "profiles" / "software"
RUN = (
    "run", "--model", "gpt", "--shape", "layers=2,d_model=64,heads=2,vocab=256,max_seq=64", "--device", "sim",
    "--gpus", "16", "--gpus-per-node", "8", "--strategy", "HYBRID_SHARD", "--json",
)  # fmt: skip
NUMBERS = (
    -1,
    0,
    1,
    -300_000,
    1e-12,
    1e-300,
    1e12,
    1e17,
    1e300,
    0.5,
    2,
    7.5,
    1000,
    10**40,
    float("nan"),
    float("inf"),
)
OTHERS = (
    "",
    "8",
    "nan",
    "x" * 5000,
    "\x1b[31m",
    True,
    [],
    {},
    [[]],
    [{}],
    [1],
    [[1, 1]],
    {"a": 1},
    [True] * 3000,
)
_REMOVED = object()
_LEAST_S, _MOST_S = 1e-6, 600.0


def places(table: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every key and every position in lists, tables and lists included."""
    if place:
        yield place
    items = table.items() if isinstance(table, dict) else enumerate(table) if isinstance(table, list) else ()
    for name, value in items:
        if isinstance(table, dict) or name in (0, 1, len(table) - 1):
            yield from places(value, (*place, name))


def changed(
    table: dict[str, Any], place: tuple[Any, ...], change: Callable[[Any], Any] | None
) -> dict[str, Any]:
    """A copy with what is at a place changed; removed without `change`."""
    copy = deepcopy(table)
    node: Any = copy
    for part in place[:-1]:
        node = node[part]
    if change is None:
        del node[place[-1]]
    else:
        node[place[-1]] = change(node[place[-1]])
    return copy


def refused(table: dict[str, Any], name: str) -> str | None:
    """The error of a profile's text; None if it is taken. Any other exception is a finding."""
    from fsdpbench.sim.model.keys import ProfileError

    try:
        text = to_toml(table)
    except (TypeError, ValueError):
        return "not TOML"
    try:
        parse_profile(text, f"{name}.toml")
    except ProfileError as error:
        return str(error)
    return None


@pytest.mark.campaign
@pytest.mark.parametrize("name", profile_names())
def test_no_value_of_any_key_breaks_the_reader(name: str) -> None:
    """Each key and position of a profile with each value: an error of one line that names it, or a profile
    whose figures are possible."""
    table = tomllib.loads((PROFILES / f"{name}.toml").read_text())
    cases = list(itertools.product(places(table), (_REMOVED, *NUMBERS, *OTHERS)))
    cases = random.Random(name).sample(cases, min(len(cases), 3000 if "libraries" not in table else 500))
    taken = 0
    for place, value in cases:
        error = refused(
            changed(table, place, None if value is _REMOVED else lambda old, value=value: value), name
        )
        taken += error is None
        if error is not None and error != "not TOML":
            assert "\n" not in error
            named = any(str(part) in error for part in place)
            assert named or any(word in error for word in ("sources", "runs_use", "lacks")), (
                place,
                value,
                error,
            )
    print(f"{name}: {len(cases)} values tried, {taken} taken")


@pytest.mark.campaign
@pytest.mark.timeout(3600)
def test_hostile_profiles_are_refused_simulated_sanely_or_doubted(
    commands: CommandServer, tmp_path: Path
) -> None:
    count = FuzzCount()
    draw = random.Random(33)
    for number, (name, table, what) in enumerate(hostile_profiles(draw)):
        (tmp_path / "mine.toml").write_text(to_toml(table))
        flag = "--hardware" if name in profile_names() else "--software"
        outcome = commands.run_case([*RUN, flag, "mine.toml", "-o", f"run{number}"], tmp_path, timeout=100)
        count.judge(f"{name}: {what}", outcome)
        if outcome.code == 0 and flag == "--hardware":
            found = insane(json.loads(outcome.out), tmp_path / "mine.toml")
            count.failures += [f"{name}: {what}: {text}" for text in found]
        print(f"{number}: {name}: {what}: exit {outcome.code}, {len(count.failures)} failures", flush=True)
    count.check()


def hostile_profiles(draw: random.Random) -> Iterator[tuple[str, dict[str, Any], str]]:
    """For every key of the table a value at each end of its range, and beyond what is usual."""
    for key in KEYS.values():
        values = (key.least, key.most, key.low / 9, key.low / 11, key.high * 9, key.high * 11)
        for value in draw.sample(values, 2):
            of_software = key.name.startswith("software.")
            names = software_names() if of_software else profile_names()
            folder = SOFTWARE if of_software else PROFILES
            for name in draw.sample(names, len(names)):
                table = tomllib.loads((folder / f"{name}.toml").read_text())
                found = [place for place in places(table) if is_key(place, key.name)]
                if found:
                    whole = float(value).is_integer()
                    place = draw.choice(found)
                    new = changed(
                        table, place, lambda old, v=value, w=whole: int(v) if w and type(old) is int else v
                    )
                    yield name, new, f"{'.'.join(map(str, place))} = {value:g}"
                    break


_POSITIONS = {"rows": 0, "columns": 1, "efficiency": 2, "bytes": 0, "gb_s": 1, "us": 1}


def is_key(place: tuple[Any, ...], key: str) -> bool:
    """Whether a place in a file is one of a row's."""
    words = [part for part in place if isinstance(part, str)]
    if words[0] == "libraries":
        words = ["libraries", *words[2:]]
    if "factors" in words:
        words = ["libraries", "factors", words[-1]]
    elif words[:2] == ["libraries", "products"]:
        words = ["libraries", "products", *words[3:]]
    elif words[:2] == ["libraries", "collectives"]:
        words = ["libraries", "collectives", *words[3:]]
    elif words[0] == "nvlink" and words[-1] == "points":
        words = ["nvlink", "points"]
    *parents, last = key.removeprefix("software.").split(".")
    if words == [*parents, last]:
        return not isinstance(place[-1], int) or last in ("axes", "factors")
    return words == parents and words[-1] in ("tiles", "points") and place[-1] == _POSITIONS.get(last)


def insane(result: dict[str, Any], path: Path) -> Iterator[str]:
    """What is wrong with a result that nothing warns of."""
    # The flags state the nodes that were simulated.
    profile = load_profile(f"{path}{result['config']['hardware'].removeprefix(path.name)}")
    warned = bool(result["environment"].get("warnings"))
    step, peaks = result["step_time_s"], result["peak_memory_bytes"]
    if result["status"] == "ok" and not warned and not _LEAST_S < step < _MOST_S:
        yield f"a step of {step} s, and no warning"
    if result["status"] == "ok" and peaks["reserved"] > profile.memory.capacity_gib * GIB:
        yield f"{peaks['reserved']} bytes reserved of {profile.memory.capacity_gib} GiB"
    if bool(profile.doubts()) is not warned:
        yield f"doubts {profile.doubts()} and warnings {result['environment'].get('warnings')}"
