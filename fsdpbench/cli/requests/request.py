"""Requests for sweeps, checked and completed: targets, systems, values of settings, rules, sample size."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fsdpbench.base.configuration.config import DEFAULT_HARDWARE, NO_EMULATION, Config, Measurement
from fsdpbench.base.errors import UsageError, error_text
from fsdpbench.base.numbers import whole_number
from fsdpbench.base.settings import Settings, Value, show_value
from fsdpbench.engine.devices.detection import Choice, choose_device
from fsdpbench.engine.results.provenance import node_stated
from fsdpbench.sweep.hf_model import parse_shape, usual_settings, with_hf_model
from fsdpbench.sweep.planning import Target, check_device, check_systems, make_config, make_target
from fsdpbench.sweep.spaces.presets import CHECKPOINTING, Preset, get_preset, of_what_is_named
from fsdpbench.sweep.spaces.space import Plan, Rule, Space, expand, parse_exclude, parse_when, read_rule
from fsdpbench.sweep.spaces.space_file import read_space

DEFAULT_GPUS = 8
_MOST_WORLDS = 100
_NOT_BY_DEFAULT = ("system", "shape", "hf_config", "preset", "when", "exclude", "max_points")


@dataclass(frozen=True)
class SweepRequest:
    """A sweep to run. `is_default`: nothing but model and place was named; `assumed`: settings that a model
    of a configuration file got, as the user named none."""

    space: Space
    choice: Choice
    is_default: bool
    preset: str | None = None
    """The preset that lists came from."""
    of_preset: tuple[str, ...] = ()
    """Settings that vary because of it."""
    assumed: Mapping[str, Value] = field(default_factory=dict)

    @property
    def target(self) -> Target:
        """Return the first target; all have one model and one device."""
        return self.space.targets[0]

    @property
    def gpus(self) -> list[int]:
        return [target.gpus for target in self.space.targets]

    def plan(self) -> Plan:
        return expand(self.space)

    def to_space(self) -> dict[str, object]:
        """Return the space as in a TOML file, which `fsdpbench sweep FILE` reads back."""
        target, space = self.target, self.space
        several = len(space.targets) > 1
        most = max(space.targets, key=lambda each: each.gpus)
        return {
            "schema": 1,
            "model": target.model,
            "shape": ",".join(f"{name}={value}" for name, value in target.shape.items()) or None,
            "system": list(space.systems),
            "reference": list(space.references) or None,
            "device": target.device,
            "hardware": target.hardware,
            "sanitize": target.sanitize or None,
            "software": target.software,
            "gpus": self.gpus if several else target.gpus,
            **node_stated(most.hardware, most.gpus, most.gpus_per_node, most.gpus_used_per_node),
            "data": target.data,
            "max_points": space.max_points,
            "sample_seed": space.sample_seed or None,
            "when": [rule.to_table() for rule in space.when] or None,
            "exclude": [rule.to_table() for rule in space.exclude] or None,
            "settings": {
                name: ["none" if value is None else value for value in values]
                for name, values in space.lists.items()
            },
        }

    def added_by_preset(self) -> str | None:
        """Return a note on settings that only the preset varies, and how to avoid that; else None."""
        if not self.of_preset and len(self.space.systems) < 2:
            return None
        lists = self.space.lists
        ruled = {name: values for rule in self.space.when for name, values in rule.lists.items()}
        varied = [
            f"{name} ({', '.join(map(show_value, dict.fromkeys((*lists[name], *ruled.get(name, ())))))})"
            for name in self.of_preset
            if name in lists
        ]
        varied += [f"{name} (by condition)" for name in self.of_preset if name not in lists]
        if not varied:
            return None
        return error_text("request.preset_varies", self.preset, ", ".join(varied))

    def announcement(self, points: int, how: str = "") -> str:
        """Return the first line of a sweep: what runs, where and why there. `how`: eager or compiled."""
        target = self.target
        gpus = ", ".join(map(str, self.gpus))
        if target.device == "sim":
            profile = target.profile
            largest = max(self.space.targets, key=lambda each: each.gpus)
            ranks = largest.gpus_used_per_node or largest.gpus_per_node
            title = profile.title.partition(f", {profile.nic.gb_s_per_node:g} GB/s a node")[0]
            network = f", {profile.node_words(ranks)}" if largest.gpus > ranks else ""
            where = f"simulating {gpus} x {title}{network} ({self.choice.reason})"
        else:
            where = f"running on {gpus} x {target.device} ({self.choice.reason})"
        noun = "configuration" if points == 1 else "configurations"
        what = f"{noun}, {how}" if how else noun
        return f"{target.model}: {points} {what}, {where}{assumed_words(self.assumed)}"


def make_request(
    given: Mapping[str, Any], lists: Mapping[str, Sequence[Value]], *, whole_space: bool
) -> SweepRequest:
    """Return the request of `given` (`model`, `gpus`, `preset`, `when`, ...) and `lists` (values by setting).

    With `whole_space` (a TOML file) the default lists are not added. Raises `UsageError`.
    """
    is_named = any(given.get(name) for name in _NOT_BY_DEFAULT)
    keep_content = any(value != "own" for value in lists.get("implementation", ()))
    given = with_hf_model({**given, "keep_content": keep_content})
    named_preset = given.get("preset")
    counts = gpu_counts(given.get("gpus"))
    largest, choice = target_of({**given, "gpus": max(counts)})
    preset = Preset({})
    varied = [name for name, values in lists.items() if len(values) > 1]
    if varied and named_preset is None and not whole_space:
        preset = of_what_is_named(largest.device, counts[0], _node_size(given, largest))
    elif named_preset is not None or not whole_space:
        preset = get_preset(
            str(named_preset or "default"), largest.device, counts[0], _node_size(given, largest)
        )
    if len(counts) == 1 and preset.gpus:
        counts = list(preset.gpus)
    batches_fit = largest.device == "sim" and len(preset.lists.get(CHECKPOINTING, ())) > 1
    usual = usual_settings(largest.model, (*preset.lists, *lists, *["batch"] * batches_fit))
    systems = _names(given.get("system")) or list(preset.systems)
    space = Space(
        targets=tuple(target_of({**given, "gpus": count})[0] for count in counts),
        systems=tuple(check_systems(systems)),
        lists={**{name: [value] for name, value in usual.items()}, **preset.lists, **lists},
        when=(*_not_named(preset.when, lists), *_rules(given.get("when"), "when", parse_when)),
        exclude=(
            *(rule for rule in preset.exclude if not rule.match.keys() & lists.keys()),
            *_rules(given.get("exclude"), "exclude", parse_exclude),
        ),
        max_points=_at_least_one("max_points", given.get("max_points")),
        sample_seed=whole("sample_seed", given.get("sample_seed") or 0),
        references=tuple(check_systems(_references(given, lists, preset))),
    )
    by_rules = [name for rule in preset.when for name in rule.lists]
    more = [name for name, values in preset.lists.items() if len(values) > 1]
    return SweepRequest(
        preset=str(named_preset or "default"),
        of_preset=tuple(name for name in dict.fromkeys((*more, *by_rules)) if name not in lists),
        space=space,
        choice=choice,
        is_default=not (lists or whole_space or len(counts) > 1 or is_named),
        assumed=usual,
    )


def assumed_words(assumed: Mapping[str, Value]) -> str:
    """Return the end of a line that names the `assumed` settings; empty if there are none."""
    words = ", ".join(f"{name}={value}" for name, value in assumed.items())
    return f"; {words}, as not named" if words else ""


def request_of_space(space: Mapping[str, Any]) -> SweepRequest:
    """Return the request that `SweepRequest.to_space` recorded. Raises `UsageError`."""
    target, lists = read_space(space, "the recorded space")
    return make_request(target, lists, whole_space=True)


def target_of(given: Mapping[str, Any]) -> tuple[Target, Choice]:
    """Return the target in `given` and the choice of its device. Raises `UsageError`."""
    given = with_hf_model(given)
    gpus, *others = gpu_counts(given.get("gpus"))
    if others:
        raise UsageError(f"--gpus {given['gpus']}: expected one number; `sweep` takes several")
    hardware = given.get("hardware")
    if given.get("emulate"):
        raise UsageError(NO_EMULATION)
    of_simulation = given.get("nic_gb_s") is not None or given.get("gpus_used_per_node") is not None
    choice = choose_device(
        check_device(given.get("device") or "auto"),
        gpus,
        hardware or (DEFAULT_HARDWARE if of_simulation else None),
        elsewhere=given.get("launcher") not in (None, "local"),
    )
    if hardware is not None and choice.device != "sim":
        raise UsageError(error_text("request.hardware", hardware, choice.device))
    shape = given.get("shape")
    measurement = Measurement.default_for(choice.device)
    if given.get("timeout") is not None:
        measurement = replace(measurement, timeout_s=given["timeout"])
    target = make_target(
        model=str(given["model"]),
        shape=dict(shape) if isinstance(shape, Mapping) else parse_shape(shape),
        device=choice.device,
        hardware=hardware,
        gpus=gpus,
        gpus_per_node=_count(given, "gpus_per_node"),
        gpus_used_per_node=_count(given, "gpus_used_per_node"),
        nic_gb_s=given.get("nic_gb_s"),
        data=given.get("data"),
        measurement=measurement,
        sanitize=bool(given.get("sanitize")),
        software=given.get("software"),
    )
    return target, choice


def single_config(options: Mapping[str, Any], given: Mapping[str, Any]) -> tuple[Config, Choice, str]:
    """Return the one configuration of `options` with the settings `given`, able to run or not; the choice of
    its device; and words on the settings that it got as none were named. Raises `UsageError`."""
    kept = given.get("implementation", "own") != "own"
    target, choice = target_of({**options, "keep_content": kept})
    usual = usual_settings(target.model, given)
    system = options.get("system") or "impl-fsdp2"
    config = make_config(target, system, Settings.of(**{**usual, **given}), target.workload())
    return config, choice, assumed_words(usual)


def gpu_counts(given: object) -> list[int]:
    """Return the world sizes in a number, a list, or a comma-separated text. Raises `UsageError`."""
    if given is None:
        return [DEFAULT_GPUS]
    items = given if isinstance(given, list | tuple) else str(given).replace(", ", ",").split(",")
    counts = list(dict.fromkeys(whole("gpus", item) for item in items))
    if not counts or min(counts) < 1:
        raise UsageError(f"--gpus must be at least 1, not {given}")
    if len(counts) > _MOST_WORLDS:
        raise UsageError(f"--gpus: {len(counts):,} numbers of ranks; a sweep takes {_MOST_WORLDS} at most")
    return counts


def whole(name: str, value: object) -> int:
    """Return the whole number in a text or a TOML value. Raises `UsageError`, which names it `name`."""
    try:
        if isinstance(value, bool | float):
            raise ValueError
        return whole_number(str(value))
    except ValueError:
        raise UsageError(f"{name}: {value!r} is not a whole number up to 2^63-1") from None


def _count(given: Mapping[str, Any], name: str) -> int | None:
    return None if given.get(name) is None else whole(name, given[name])


def _node_size(given: Mapping[str, Any], largest: Target) -> int:
    """Return the ranks of a full node, even if `largest` has fewer."""
    for name in ("gpus_used_per_node", "gpus_per_node"):
        if (stated := _count(given, name)) is not None:
            return stated
    return largest.profile.gpus_per_node if largest.device == "sim" else largest.gpus_per_node


def _rules(given: object, name: str, parse: Callable[[str], Rule]) -> tuple[Rule, ...]:
    """Return the rules in texts of the command line, or in tables of a TOML file. Raises `UsageError`."""
    items = given if isinstance(given, list | tuple) else [] if given is None else [given]
    return tuple(
        parse(item) if isinstance(item, str) else read_rule(item, f"[[{name}]]", adds=name == "when")
        for item in items
    )


def _not_named(rules: Sequence[Rule], lists: Mapping[str, object]) -> Iterator[Rule]:
    """Yield the rules of a preset without the settings in `lists`."""
    for rule in rules:
        left = {name: values for name, values in rule.lists.items() if name not in lists}
        if left:
            yield replace(rule, lists=left)


def with_fitting_batches(
    request: SweepRequest, jobs: int | None, tell: Callable[[str], None], kept: Path | None = None
) -> SweepRequest:
    """Return the request with a batch for each activation checkpointing, where the default preset varies that
    on simulated GPUs and no batch is named; found by `jobs` processes. `kept`: as for `fitting_batches`."""
    space = request.space
    wanted = request.preset == "default" and CHECKPOINTING in request.of_preset and "batch" not in space.lists
    if not wanted or request.target.device != "sim":
        return request
    from fsdpbench.sweep.prediction import fitting_batches
    from fsdpbench.sweep.trials import jobs_for

    fitting = fitting_batches(space, jobs or jobs_for("sim"), tell, kept)
    return replace(request, space=replace(space, when=(*space.when, *fitting)))


def _at_least_one(name: str, given: object) -> int | None:
    if given is None:
        return None
    number = whole(name, given)
    if number < 1:
        raise UsageError(f"{name} must be at least 1, not {number}")
    return number


def _references(given: Mapping[str, Any], lists: Mapping[str, Sequence[Value]], preset: Preset) -> list[str]:
    """Return the named reference systems; those of `preset` where nothing is named beside it."""
    if given.get("reference") is not None:
        return _names(given["reference"])
    return [] if lists or given.get("system") is not None else list(preset.references)


def _names(given: object) -> list[str]:
    if given is None:
        return []
    items = given if isinstance(given, list) else str(given).split(",")
    return list(dict.fromkeys(str(item).strip() for item in items if str(item).strip()))
