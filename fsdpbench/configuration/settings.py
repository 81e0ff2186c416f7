"""The settings of a configuration: one name each, everywhere.

The same name is the flag (`--backward-prefetch`), the key in TOML and `--set key=value`, the key in JSON
and the column of the store. A setting's row in `SETTINGS` says what it means, which values it takes, and why
its default is what it is; `fsdpbench list settings` prints the table.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_args

from fsdpbench.configuration.setting import Setting, plain_text
from fsdpbench.configuration.setting_table import TABLE
from fsdpbench.configuration.setting_values import Value
from fsdpbench.errors import UsageError, unknown

SETTINGS: dict[str, Setting] = {setting.name: setting for setting in TABLE}
_NEWER = frozenset(
    {
        "activation_offload",
        "checkpoint_first",
        "clip",
        "compile_loss",
        "graph",
        "implementation",
        "keep_last_unsharded",
        "layout",
        "lora",
        "lora_base",
        "lora_targets",
    }
    | {"symmetric_memory", "optimizer_dtype", "linear_dtype", "tp", "cp", "ep", "norm", "rotary", "loss"}
)
"""Settings that older records lack; what they ran is the default."""


@dataclass(frozen=True)
class Settings:
    """One value of every setting. Build it with `Settings.of(...)`, which checks names and values."""

    seq: int | None
    batch: int
    grad_accum: int
    grad_sync: str
    strategy: str
    shard_size: int | None
    wrap: str
    reshard_after_forward: bool | int | None
    keep_last_unsharded: bool
    backward_prefetch: str | None
    backward_prefetch_depth: int | None
    forward_prefetch: int | None
    limit_all_gathers: int | str | None
    memory_handover: str | None
    layout: str | None
    symmetric_memory: bool
    param_dtype: str
    reduce_dtype: str | None
    buffer_dtype: str | None
    activation_checkpointing: str
    checkpoint_first: int | None
    activation_offload: bool
    cpu_offload: bool
    optimizer: str
    optimizer_dtype: str | None
    linear_dtype: str
    clip: float | None
    zero_grad: str
    lora: int
    lora_targets: str
    lora_base: str
    tp: int
    cp: int
    ep: int
    norm: str
    rotary: str
    loss: str
    implementation: str
    compile: bool
    compile_loss: bool
    graph: str
    seed: int

    @classmethod
    def of(cls, **values: Any) -> Settings:
        """Defaults, overridden by `values` (texts or typed values). Raises `UsageError`."""
        read = {name: setting.default for name, setting in SETTINGS.items()}
        for name, value in values.items():
            read[name] = setting_named(name).read(value)
        return cls(**read)  # type: ignore[arg-type]

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Settings:
        """Settings as `to_dict` wrote them; `None` stays `None` (a setting that the system does not have)."""
        missing = SETTINGS.keys() - record.keys() - _NEWER
        if missing:
            raise UsageError(f"a recorded configuration lacks the settings {', '.join(sorted(missing))}")
        values: dict[str, Any] = {name: SETTINGS[name].default for name in _NEWER} | {**record}
        return cls(**{name: values[name] for name in SETTINGS})

    def to_dict(self) -> dict[str, Value]:
        return {name: getattr(self, name) for name in SETTINGS}  # `asdict` copies what needs no copy

    @property
    def recomputed(self) -> str:
        """What backward computes again, as workloads take it: `full`, `full:8` (of 8 blocks), `none+head`."""
        first = "" if self.checkpoint_first is None else f":{self.checkpoint_first}"
        return f"{self.activation_checkpointing}{first}{'+head' if self.loss == 'chunked' else ''}"

    def changed(self, **values: Value) -> Settings:
        return dataclasses.replace(self, **values)  # type: ignore[arg-type]


def setting_named(name: str) -> Setting:
    """The setting of that name (dashes count as underscores). Raises `UsageError` with the nearest names."""
    setting = SETTINGS.get(name.replace("-", "_"))
    if setting is None:
        raise unknown("setting", name, SETTINGS, "fsdpbench list settings")
    return setting


def read_list(name: str, given: object) -> list[Value]:
    """One setting's values from a comma-separated text or a TOML value or list, without repeats."""
    setting = setting_named(name)
    items = given if isinstance(given, list) else str(given).split(",") if isinstance(given, str) else [given]
    values = (setting.read(item) for item in items)
    return list({(type(value), value): value for value in values}.values())


def show_value(value: Value | float) -> str:
    """A setting's value as people type it."""
    return plain_text(value) if value is not None else "-"


def _check_table() -> None:
    fields = [field.name for field in dataclasses.fields(Settings)]
    assert fields == list(SETTINGS), "Settings and SETTINGS must list the same names in the same order"
    assert all(isinstance(setting.default, get_args(Value)) for setting in TABLE)


_check_table()
