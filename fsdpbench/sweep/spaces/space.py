"""Expansion of a space to its configurations: expand lists, skip and note the impossible, draw a sample.

worlds x systems x lists  ──when──>  more lists  ──exclude──>  ──not applicable──>  points  ──sample──>

Conditions are lists that apply only to some points, and combinations that are left out:

    when     strategy=HYBRID_SHARD => shard_size=2,4     TOML: [[when]]     match = {...}  settings = {...}
    exclude  batch=32 activation_checkpointing=none      TOML: [[exclude]]  match = {...}

A match names settings, `system` or `gpus`, each with one or more values; a point matches if all of them do.
"""

import hashlib
import itertools
import json
import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from fsdpbench.base.configuration.config import Config
from fsdpbench.base.errors import UsageError, error_text
from fsdpbench.base.numbers import whole_number
from fsdpbench.base.settings import Settings, Value, read_list, setting_named, show_value
from fsdpbench.sweep.planning import Target, make_config, without_absent
from fsdpbench.systems import get_system
from fsdpbench.workloads import Workload

MOST_COMBINATIONS = 100_000
"""A larger space is refused: at about 0.2 ms each, listing it takes longer than running a good sample."""
_PLACES = ("system", "gpus")
Match = Mapping[str, tuple[Value, ...]]


@dataclass(frozen=True)
class Rule:
    """A condition on points that `match`: with `lists`, sweep these too; without, leave the points out."""

    match: Match
    lists: Mapping[str, tuple[Value, ...]] = field(default_factory=dict)

    def holds(self, config: Config) -> bool:
        """Return whether `config` matches. Call it before `without_absent` sets settings to null."""
        return all(_actual(config, name) in values for name, values in self.match.items())

    def to_table(self) -> dict[str, dict[str, list[Value]]]:
        """Return the rule as a TOML table."""
        table = {"match": _as_typed(self.match)}
        if self.lists:
            table["settings"] = _as_typed(self.lists)
        return table


def read_rule(table: object, where: str, *, adds: bool) -> Rule:
    """Return the rule in a TOML table. `adds`: `settings` are required. Raises `UsageError` with `where`."""
    keys = {"match", "settings"} if adds else {"match"}
    if not isinstance(table, Mapping) or set(table) != keys:
        shape = "match = {...} and settings = {...}" if adds else "match = {...}"
        raise UsageError(f"{where}: expected a table with {shape}, not {table!r}")
    for key in keys:
        if not isinstance(table[key], Mapping) or not table[key]:
            raise UsageError(f"{where}: {key} must name at least one setting")
    lists = {
        setting_named(name).name: tuple(read_list(name, v)) for name, v in table.get("settings", {}).items()
    }
    return Rule(_read_match(table["match"]), lists)


def parse_when(text: str) -> Rule:
    """Parse `strategy=HYBRID_SHARD => shard_size=2,4`. Raises `UsageError`."""
    match, arrow, lists = text.partition("=>")
    if not arrow:
        raise UsageError(error_text("space.when", text))
    return read_rule({"match": _assigned(match), "settings": _assigned(lists)}, "--when", adds=True)


def parse_exclude(text: str) -> Rule:
    """Parse `batch=32 activation_checkpointing=none`. Raises `UsageError`."""
    return read_rule({"match": _assigned(text)}, "--exclude", adds=False)


def _assigned(text: str) -> dict[str, str]:
    found = {}
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise UsageError(f"{text!r} in a condition: {error}") from None
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or not value:
            raise UsageError(f"{word!r} in a condition: write name=value, or name=value,value")
        found[name.strip()] = value
    return found


def _read_match(given: Mapping[str, Any]) -> dict[str, tuple[Value, ...]]:
    match: dict[str, tuple[Value, ...]] = {}
    for name, values in given.items():
        if name in _PLACES:
            items = (
                values
                if isinstance(values, Sequence) and not isinstance(values, str)
                else str(values).split(",")
            )
            match[name] = tuple(_ranks(item) if name == "gpus" else str(item).strip() for item in items)
        else:
            match[setting_named(name).name] = tuple(read_list(name, values))
    return match


def _ranks(item: object) -> int:
    try:
        return whole_number(str(item), 1)
    except ValueError:
        raise UsageError(f"gpus={item} in a condition: expected a number of ranks") from None


def _actual(config: Config, name: str) -> Value:
    if name in _PLACES:
        value: Value = getattr(config, name)
        return value
    found: Value = getattr(config.settings, name)
    return found


def _as_typed(lists: Mapping[str, Sequence[Value]]) -> dict[str, list[Any]]:
    return {name: [show_value(v) if v is None else v for v in values] for name, values in lists.items()}


@dataclass(frozen=True)
class Space:
    """The values to combine. `targets` are one model on worlds of different sizes. If there are more than
    `max_points` points, a sample of them is drawn with `sample_seed`. `references` are systems that run once
    each, with the first value of every list."""

    targets: tuple[Target, ...]
    systems: tuple[str, ...]
    lists: Mapping[str, Sequence[Value]]
    when: tuple[Rule, ...] = ()
    exclude: tuple[Rule, ...] = ()
    max_points: int | None = None
    sample_seed: int = 0
    references: tuple[str, ...] = ()

    @property
    def combinations(self) -> int:
        """Return the number of combinations before conditions apply and inapplicable points are removed."""
        each = math.prod(len(values) for values in self.lists.values())
        return len(self.targets) * len(self.systems) * each


@dataclass
class Plan:
    """The points of a sweep in execution order, and notes on what was left out and why, without repeats."""

    points: list[Config] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)


def expand(space: Space) -> Plan:
    """Return the points of `space`, without duplicates and inapplicable ones.

    Raises `UsageError` if there are too many combinations to list.
    """
    if space.combinations > MOST_COMBINATIONS:
        raise UsageError(error_text("space.too_many", space.combinations, MOST_COMBINATIONS))
    plan, seen = Plan(), set()
    single = tuple(rule for rule in space.when if all(len(values) == 1 for values in rule.lists.values()))
    once = replace(space, lists={name: values[:1] for name, values in space.lists.items()}, when=single)
    parts = [(system, space) for system in space.systems]
    parts += [(system, once) for system in space.references if system not in space.systems]
    for target in space.targets:
        workload = target.workload()
        for system, part in parts:
            for config in _combinations(part, target, workload, system, plan):
                identity = json.dumps(config.to_dict(), sort_keys=True, default=str)
                if identity not in seen:
                    seen.add(identity)
                    plan.points.append(config)
    if space.max_points is not None and len(plan.points) > space.max_points:
        plan.note(error_text("space.drawn", space.max_points, len(plan.points), space.sample_seed))
        plan.points = sample(plan.points, space.max_points, space.sample_seed)
    return plan


def sample(points: Sequence[Config], count: int, seed: int) -> list[Config]:
    """Return `count` of `points`, in their order. A larger sample with the same seed contains the smaller
    one, so finished points stay part of it. The sample does not depend on how points are measured."""

    def drawn(config: Config) -> bytes:
        point = config.identity()
        del point["measurement"]
        text = json.dumps([seed, point], sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).digest()

    chosen = set(sorted(range(len(points)), key=lambda index: drawn(points[index]))[:count])
    return [config for index, config in enumerate(points) if index in chosen]


def _combinations(
    space: Space, target: Target, workload: Workload, system: str, plan: Plan
) -> Iterator[Config]:
    for asked in _assignments(space, target, workload, system):
        config = make_config(target, system, Settings.of(**asked), workload)
        if any(rule.holds(config) for rule in space.exclude):
            continue
        _note_absent(space, config, asked, plan)
        config = without_absent(config)
        refused = get_system(system).not_applicable(config)
        for name, reason in refused.items():
            value = show_value(asked.get(name, getattr(config.settings, name, getattr(config, name, None))))
            plan.note(f"{system}: {name}={value} is not applicable ({reason}); left out")
        if not refused:
            yield config


def _assignments(space: Space, target: Target, workload: Workload, system: str) -> Iterator[dict[str, Value]]:
    """Yield each combination of the lists, including lists that conditions add."""
    for values in itertools.product(*space.lists.values()):
        given = dict(zip(space.lists, values, strict=True))
        yield from _with_conditions(given, space.when, target, workload, system)


def _with_conditions(
    given: dict[str, Value], rules: Sequence[Rule], target: Target, workload: Workload, system: str
) -> Iterator[dict[str, Value]]:
    """Apply rules in their order, so that a rule can match values from the lists of an earlier one."""
    for index, rule in enumerate(rules):
        if not rule.holds(make_config(target, system, Settings.of(**given), workload)):
            continue
        for values in itertools.product(*rule.lists.values()):
            extended = {**given, **dict(zip(rule.lists, values, strict=True))}
            yield from _with_conditions(extended, rules[index + 1 :], target, workload, system)
        return
    yield given


def _note_absent(space: Space, config: Config, asked: Mapping[str, Value], plan: Plan) -> None:
    absent = get_system(config.system).absent_settings(config)
    swept = {name for name, values in space.lists.items() if len(values) > 1}
    swept |= {name for rule in space.when for name, values in rule.lists.items() if len(values) > 1}
    for name in asked:
        if name in absent and name in swept:
            plan.note(f"{config.system}: {name} is not applicable ({absent[name]}); not swept")
