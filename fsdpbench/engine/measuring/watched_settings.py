"""Which settings a system reads: a value that nothing read had no effect, and the result says so.

Systems of other packages are written against the settings of their time. `Settings` grows, and a new setting
is not in their `absent`; without this a sweep over it would show equal configurations under different names.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from fsdpbench.base.configuration.config import Config
from fsdpbench.base.settings import SETTINGS, Settings
from fsdpbench.systems import System

_OF_THE_BENCH = frozenset(
    {"batch", "graph", "grad_accum", "implementation", "lora", "lora_base", "lora_targets", "seed", "seq"}
    | {"clip", "linear_dtype", "norm", "rotary", "loss", "tp", "cp", "ep", "zero_grad"}
)
"""Settings that the bench carries out for every system, or refuses where the system cannot do them."""


class WatchedSettings(Settings):
    """Settings that remember which of them were asked for."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(**{each.name: getattr(settings, each.name) for each in fields(settings)})
        object.__setattr__(self, "asked_for", set())

    def __getattribute__(self, name: str) -> Any:
        if name in SETTINGS:
            asked_for = object.__getattribute__(self, "__dict__").get("asked_for")
            if asked_for is not None:
                asked_for.add(name)
        return object.__getattribute__(self, name)


def watched(config: Config) -> Config:
    """`config`, for a system whose reading of settings is watched."""
    return replace(config, settings=WatchedSettings(config.settings))


def unread_settings(system: System, config: Config) -> list[str]:
    """Settings of a `watched` configuration that were given, and that nothing in the system read.

    Settings that are at their default or `absent` do not count: no effect is expected of them.
    """
    settings = config.settings
    assert isinstance(settings, WatchedSettings)
    asked_for = frozenset(object.__getattribute__(settings, "asked_for"))
    given = {name: settings.__dict__[name] for name in SETTINGS}
    expected = {
        name for name, value in given.items() if value is not None and value != SETTINGS[name].default
    }
    unread = expected - asked_for - _OF_THE_BENCH - system.absent_settings(config).keys()
    if "grad_sync" in expected and config.gpus > 1 and type(system).microbatch is System.microbatch:
        unread.add("grad_sync")  # the loop reads it, but nothing holds the reduction back
    return sorted(unread)
