"""What the user asked of a sweep, checked and completed

Target, systems, and the values of every swept setting.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from fsdpbench.cli.options import read_list
from fsdpbench.config import Measurement
from fsdpbench.devices.detection import Choice, choose_device
from fsdpbench.errors import UsageError
from fsdpbench.planning import (
    DEFAULT_SYSTEMS,
    Plan,
    Target,
    check_device,
    check_systems,
    default_lists,
    expand,
    make_target,
    parse_shape,
)
from fsdpbench.settings import Value

DEFAULT_GPUS = 8


@dataclass(frozen=True)
class SweepRequest:
    """A sweep to run. `is_default`: nothing but model and place was named."""

    target: Target
    choice: Choice
    systems: tuple[str, ...]
    lists: Mapping[str, list[Value]]
    is_default: bool

    def plan(self) -> Plan:
        return expand(self.target, self.systems, self.lists)

    def to_space(self) -> dict[str, Any]:
        """The space as its TOML file says it; `fsdpbench sweep FILE` asks for the same again."""
        target = self.target
        return {
            "schema": 1,
            "model": target.model,
            "shape": ",".join(f"{name}={value}" for name, value in target.shape.items()) or None,
            "system": list(self.systems),
            "device": target.device,
            "hardware": target.hardware,
            "gpus": target.gpus,
            "gpus_per_node": target.gpus_per_node,
            "data": target.data,
            "settings": {
                name: ["none" if value is None else value for value in values]
                for name, values in self.lists.items()
            },
        }

    def announcement(self, points: int) -> str:
        """The first line of a sweep: what runs where, and why there."""
        target = self.target
        if target.device == "sim":
            from fsdpbench.sim.hardware import load_profile

            title = load_profile(target.hardware or "").title
            where = f"simulating {target.gpus} x {title} ({self.choice.reason})"
        else:
            where = f"running on {target.gpus} x {target.device} ({self.choice.reason})"
        noun = "configuration" if points == 1 else "configurations"
        return f"{target.model}: {points} {noun}, {where}"


def make_request(
    given: Mapping[str, Any], lists: Mapping[str, list[Value]], *, whole_space: bool
) -> SweepRequest:
    """`given` holds the target's keys; `lists` what was named of the settings. With `whole_space` (a TOML
    file) the
    default lists are not added. Raises `UsageError`."""
    target, choice = target_of(given)
    systems = _names(given.get("system")) or list(DEFAULT_SYSTEMS)
    swept = {} if whole_space else default_lists(target.device)
    return SweepRequest(
        target=target,
        choice=choice,
        systems=tuple(check_systems(systems)),
        lists={**swept, **lists},
        is_default=not (lists or given.get("system") or given.get("shape") or whole_space),
    )


def request_of_space(space: Mapping[str, Any]) -> SweepRequest:
    """The request that `SweepRequest.to_space` wrote down. Raises `UsageError`."""
    lists = {name: read_list(name, values) for name, values in space.get("settings", {}).items()}
    return make_request(space, lists, whole_space=True)


def target_of(given: Mapping[str, Any]) -> tuple[Target, Choice]:
    """The target in `given`, its device resolved, and why it is that one."""
    gpus = DEFAULT_GPUS if given.get("gpus") is None else _whole("gpus", given["gpus"])
    if gpus < 1:
        raise UsageError(f"--gpus must be at least 1, not {gpus}")
    hardware = given.get("hardware")
    choice = choose_device(check_device(given.get("device") or "auto"), gpus, hardware)
    if hardware is not None and choice.device != "sim":
        raise UsageError(
            f"--hardware {hardware} is for simulated GPUs; leave it out with --device {choice.device}"
        )
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
        gpus_per_node=None
        if given.get("gpus_per_node") is None
        else _whole("gpus_per_node", given["gpus_per_node"]),
        data=given.get("data"),
        measurement=measurement,
    )
    return target, choice


def _whole(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise UsageError(f"{name}: {value!r} is not a whole number")
    return value


def _names(given: object) -> list[str]:
    if given is None:
        return []
    items = given if isinstance(given, list) else str(given).split(",")
    return list(dict.fromkeys(str(item).strip() for item in items if str(item).strip()))
