"""The settings of a configuration, one row each: default, parser and code.

A row's name is the flag (`--backward-prefetch`), the key in TOML, JSON and `--set key=value`, and the column
of the store. Its table in `settings.toml` explains the setting, its default and the trade-offs of its values,
and lists the presets that sweep it. Flags, `list settings`, spaces, `explain`, `--advise`, verdicts and code
to paste are all derived from these two.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from fsdpbench.base.errors import UsageError, unknown
from fsdpbench.base.files.documents import table_beside
from fsdpbench.base.numbers import LARGEST_INTEGER
from fsdpbench.base.settings import code
from fsdpbench.base.settings.setting import Setting, Trade, described, plain_text, row
from fsdpbench.base.settings.values import (
    Value,
    checkpointing,
    dtype,
    flag,
    for_each,
    joined_names,
    none_or,
    one_of,
    positive,
    whole,
    words_or,
    wrap,
)

_STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2")


@dataclass(frozen=True)
class Settings:
    """One value of every setting. Build it with `Settings.of(...)`, which checks names and values."""

    # fmt: off
    seq: int | None = row(None, none_or("model", whole(1)))
    batch: int = row(10, whole(1))
    grad_accum: int = row(1, whole(1))
    grad_sync: str = row("every", one_of("every", "last"))
    strategy: str = row("FULL_SHARD", one_of(*_STRATEGIES), dict.fromkeys(code.FLAT, code.strategy))
    shard_size: int | None = row(None, none_or("node", whole(1)))
    wrap: str = row("block", wrap)
    reshard_after_forward: bool | int | str | None = row(None,
        words_or({"auto": None, "none": None, "true": True, "false": False},
            lambda text: for_each(flag)(text) if ":" in text else whole(2)(text)))
    keep_last_unsharded: bool = row(False, flag)
    backward_prefetch: str | None = row("pre", one_of("pre", "post", "none"),
        dict.fromkeys(code.FLAT, code.prefetch_time) | {"impl-fsdp2": code.argument("backward_prefetch")})
    backward_prefetch_depth: int | str | None = row(1, for_each(whole(1)),
        dict.fromkeys(code.OURS, code.argument("backward_prefetch_depth")))
    forward_prefetch: int | str | None = row(0, words_or({"off": 0, "none": 0}, for_each(whole(0))),
        dict.fromkeys(code.OURS, code.argument("forward_prefetch", "forward_prefetch_depth"))
        | {"torch-fsdp1": code.forward_prefetch})
    limit_all_gathers: int | str | None = row(2,
        words_or({"off": "off", "false": "off", "0": "off", "auto": "auto"}, whole(1)),
        dict.fromkeys(code.OURS, code.argument("limit_all_gathers")) | {"torch-fsdp1": code.limiter})
    memory_handover: str | None = row(None, none_or("auto", one_of("record_stream", "events")),
        dict.fromkeys(code.OURS, code.argument("memory_handover")))
    layout: str | None = row(None, none_or("auto", one_of("grouped", "packed")),
        {"impl-fsdp2": code.argument("layout")})
    symmetric_memory: bool = row(False, flag)
    param_dtype: str = row("bf16", dtype, dict.fromkeys(code.FLAT, code.mixed_precision)
        | dict.fromkeys(("impl-fsdp2", "torch-fsdp2"), code.policy))
    reduce_dtype: str | None = row("fp32", dtype)
    buffer_dtype: str | None = row(None, none_or("auto", dtype))
    activation_checkpointing: str = row("none", checkpointing)
    checkpoint_first: int | None = row(None, none_or("all", whole(1)))
    activation_offload: bool | str = row(False, for_each(flag))
    cpu_offload: bool = row(False, flag,
        dict.fromkeys(code.FLAT, code.offload("cpu_offload=CPUOffload(offload_params=True)"))
        | {"impl-fsdp2": code.offload("offload_policy=CPUOffloadPolicy()"),
            "torch-fsdp2": code.offload('offload_policy=CPUOffloadPolicy(pin_memory=DEVICE != "cpu")')})
    optimizer: str = row("adamw", one_of("adamw", "adamw-foreach", "adamw-loop", "sgd", "muon"))
    optimizer_dtype: str | None = row(None, none_or("auto", one_of("bf16")))
    linear_dtype: str = row("bf16", one_of("bf16", "fp8", "mxfp8", "nvfp4"))
    clip: float | None = row(None, none_or("off", positive))
    zero_grad: str = row("release", one_of("release", "fill"))
    lora: int = row(0, words_or({"off": 0, "none": 0}, whole(0)))
    lora_targets: str = row("all", joined_names)
    lora_base: str = row("param", one_of("param", "4bit"))
    tp: int = row(1, whole(1))
    cp: int = row(1, whole(1))
    ep: int = row(1, whole(1))
    attention: str = row("auto", one_of("auto", "flash2", "flash3", "cudnn", "efficient", "flex", "math"))
    norm: str = row("model", one_of("model", "fused", "composed"))
    rotary: str = row("model", one_of("model", "halves", "complex", "matrices"))
    loss: str = row("model", one_of("model", "fp32", "lean", "chunked", "fused"))
    implementation: str = row("own", one_of("own", "transformers"))
    compile: bool = row(False, flag)
    compile_loss: bool = row(False, flag)
    graph: str = row("none", one_of("none", "step"))
    seed: int = row(0, whole(0, LARGEST_INTEGER))
    # fmt: on

    @classmethod
    def of(cls, **values: Any) -> "Settings":
        """Return defaults, overridden by `values` (texts or typed values). Raises `UsageError`."""
        read: dict[str, Any] = {name: setting_named(name).read(value) for name, value in values.items()}
        return cls(**read)

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> "Settings":
        """Read settings that `to_dict` wrote; `None` stays `None` (a setting that the system lacks).

        A setting that is newer than the record gets its default. Raises `UsageError`.
        """
        missing = _FIRST - record.keys()
        if missing:
            raise UsageError(f"a recorded configuration lacks the settings {', '.join(sorted(missing))}")
        return cls(**{name: record[name] for name in SETTINGS if name in record})

    def to_dict(self) -> dict[str, Value]:
        """Return all values by name."""
        return {name: getattr(self, name) for name in SETTINGS}  # `asdict` would copy each value

    @property
    def recomputed(self) -> str:
        """Return what backward recomputes, as workloads expect it: `full`, `full:8` (blocks), `none+head`."""
        first = "" if self.checkpoint_first is None else f":{self.checkpoint_first}"
        return f"{self.activation_checkpointing}{first}{'+head' if self.loss == 'chunked' else ''}"

    def changed(self, **values: Value) -> "Settings":
        """Return a copy with these values."""
        return dataclasses.replace(self, **values)  # type: ignore[arg-type]


_TABLES = table_beside(__file__, "settings.toml")
SETTINGS = described({field.name: field.metadata["row"] for field in dataclasses.fields(Settings)}, _TABLES)
_FIRST = frozenset(_TABLES["oldest"])
"""The settings of the first release, which every record has."""


def setting_named(name: str) -> Setting:
    """Return the setting of that name (dashes count as underscores). Raises `UsageError` with near names."""
    setting = SETTINGS.get(name.replace("-", "_"))
    if setting is None:
        raise unknown("setting", name, SETTINGS, "fsdpbench list settings")
    return setting


def all_trades() -> Iterator[tuple[Setting, Trade]]:
    """Yield every trade with its setting, in the table's order."""
    for setting in SETTINGS.values():
        for trade in setting.trades:
            yield setting, trade


def varied(variation: str) -> Trade:
    """Return the trade that corresponds to a variation of a script. Raises `KeyError`."""
    return {trade.variation: trade for _, trade in all_trades()}[variation]


def read_list(name: str, given: object) -> list[Value]:
    """Parse the values of a setting from comma-separated text, a TOML value or a list; drop repeats."""
    setting = setting_named(name)
    items = given if isinstance(given, list) else str(given).split(",") if isinstance(given, str) else [given]
    values = (setting.read(item) for item in items)
    return list({(type(value), value): value for value in values}.values())


def show_value(value: Value | float) -> str:
    """Return a setting's value as users type it, `-` for None."""
    return plain_text(value) if value is not None else "-"
