"""Published runs of any model and framework from a CSV file, in the columns that `COLUMNS` names.

A row names a model and its settings as the bench has them. `status` is `ok` or `oom`; `network` is
`N Gb/s a node`, `one node` or `not stated`; an optional `gpus_per_node` overrides the chip's usual number;
memory is in GiB. What a publication leaves open is in
`confidence`; where that is not `stated...`, it counts as assumed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from fsdpbench.base.configuration.config import ShapeValue
from fsdpbench.base.errors import UsageError
from fsdpbench.base.numbers import finite_number, whole_number
from fsdpbench.base.settings import Settings, Value
from fsdpbench.lab.validation.runs.case import Case, Figure, Network
from fsdpbench.sim.model.profile import ProfileError, profile_names, stated_machine
from fsdpbench.sim.model.software import software_names
from fsdpbench.sweep.planning import check_systems, make_target

COLUMNS = (
    "source", "run", "gpu", "gpus", "network", "system", "model", "shape", "seq", "batch", "strategy",
    "activation_checkpointing", "reduce_dtype", "compiled", "tokens_per_s_per_gpu", "status",
    "allocated_gib", "reserved_gib",
)  # fmt: skip
_GIB_IN_GB = 2**30 / 1e9
_COMPILED = {"yes": True, "no": False}
_BITS_OF_A_NODE = re.compile(r"(?<![0-9.])([0-9.]++) Gb/s a node")


@dataclass(frozen=True)
class _Epoch:
    """A source's software beyond its rows: profile (`None`: today's) and settings of the training loop."""

    software: str | None = None
    settings: Mapping[str, Value] = field(default_factory=dict)


# TorchTitan's train.py and parallelize_llama.py of 2024: max_norm = 1.0, the last block is not resharded.
_TORCHTITAN: dict[str, Value] = {"clip": 1.0, "keep_last_unsharded": True}
# fms-fsdp: grad_clip_thresh = 1.0; transformers' Trainer: max_grad_norm = 1.0. AdamW with torch's defaults.
_DEFAULT_ADAMW: dict[str, Value] = {"clip": 1.0, "optimizer": "adamw-foreach"}
_SOURCES: dict[str, _Epoch] = {
    "torchtitan-A100": _Epoch("torchtitan-2024-summer", _TORCHTITAN),
    "torchtitan-H100": _Epoch("torchtitan-2024-winter", _TORCHTITAN),
    "IBM-fms": _Epoch("fms-fsdp-2024", _DEFAULT_ADAMW),
    "fms-accel": _Epoch("fms-acceleration-2024", _DEFAULT_ADAMW),
}
_OF_TODAY = _Epoch()


class Row:
    """One row with the place that errors name."""

    def __init__(self, path: Path, line: int, given: Mapping[str, str | None]) -> None:
        self._where = f"{path}, line {line}"
        self._values = {name: (value or "").strip() for name, value in given.items() if name is not None}

    def text(self, column: str) -> str:
        """The value as it stands, empty where there is none."""
        return self._values.get(column, "")

    def wrong(self, column: str, rule: str) -> UsageError:
        """The error that `column` breaks `rule`."""
        return UsageError(f"{self._where}: {column} is {self.text(column)!r}, {rule}")

    def number(self, column: str) -> float:
        """A number above 0. Raises `UsageError`."""
        try:
            value = finite_number(self.text(column))
        except ValueError:
            value = 0.0
        if value <= 0:
            raise self.wrong(column, "not a number above 0")
        return value

    def count(self, column: str) -> int:
        """A whole number from 1. Raises `UsageError`."""
        try:
            return whole_number(self.text(column), 1)
        except ValueError:
            raise self.wrong(column, "not a whole number above 0") from None

    def choice(self, column: str, choices: Mapping[str, bool]) -> bool:
        """One of `choices`. Raises `UsageError`."""
        if self.text(column) not in choices:
            raise self.wrong(column, f"not one of {', '.join(choices)}")
        return choices[self.text(column)]


def chip_of_row(row: Row) -> str:
    """The packaged profile of the row's chip. Raises `UsageError`."""
    chip = row.text("gpu").replace("_", "-")
    if chip not in profile_names():
        raise row.wrong("gpu", f"none of {', '.join(profile_names())}")
    return chip


def case_of_row(row: Row) -> Case:
    """The row as a case, on its network where it states one.

    Raises `UsageError` that names file, line and column.
    """
    chip = chip_of_row(row)
    shape = _shape(row)
    try:
        make_target(model=row.text("model"), gpus=1, shape=shape)
    except UsageError as error:
        raise row.wrong("model", str(error)) from None
    try:
        check_systems([row.text("system")], installed=False)
    except UsageError as error:
        raise row.wrong("system", str(error)) from None
    gpus, network = row.count("gpus"), _network(row)
    per_node = row.count("gpus_per_node") if row.text("gpus_per_node") else None
    try:
        hardware = stated_machine(chip, per_node, network if isinstance(network, float) else None)
    except ProfileError as error:
        raise row.wrong("network", str(error)) from None
    confidence = row.text("confidence")
    source = row.text("source")
    epoch = _SOURCES.get(source, _OF_TODAY)
    if row.text("software") not in ("", *software_names()):
        raise row.wrong("software", f"none of {', '.join(software_names())}")
    return Case(
        name=row.text("run"),
        group=f"{source}, {chip}",
        source=source,
        model=row.text("model"),
        shape=shape,
        hardware=hardware,
        chip=chip,
        gpus=gpus,
        network=Network.STATED if isinstance(network, float) else network,
        settings=_settings(row, epoch),
        published=_published(row),
        system=row.text("system"),
        software=row.text("software") or epoch.software,
        assumed="" if not confidence or confidence.startswith("stated") else confidence,
        ran_out=row.text("status") == "oom",
    )


def _settings(row: Row, epoch: _Epoch) -> dict[str, Value]:
    settings: dict[str, Value] = {
        "seq": row.count("seq"),
        "batch": row.count("batch"),
        "limit_all_gathers": 2,
        "param_dtype": "bf16",
        "compile": row.choice("compiled", _COMPILED),
        **epoch.settings,
    }
    for name in ("strategy", "activation_checkpointing", "reduce_dtype"):
        settings[name] = row.text(name)
        try:
            Settings.of(**{name: row.text(name)})
        except UsageError as error:
            raise row.wrong(name, str(error)) from None
    return settings


def _shape(row: Row) -> dict[str, ShapeValue]:
    shape: dict[str, ShapeValue] = {}
    for part in filter(None, row.text("shape").split(",")):
        name, equals, value = part.partition("=")
        try:
            if not equals:
                raise ValueError
            shape[name.strip()] = whole_number(value.strip())
        except ValueError:
            raise row.wrong("shape", "write it as layers=32,d_model=4096") from None
    return shape


def _network(row: Row) -> float | Network:
    """GB/s a node where the row states it."""
    if (found := _BITS_OF_A_NODE.fullmatch(row.text("network"))) is not None:
        try:
            return finite_number(found[1]) / 8
        except ValueError:
            pass
    known = {"one node": Network.ONE_NODE, "not stated": Network.NOT_STATED}
    if row.text("network") not in known:
        raise row.wrong("network", "write `one node`, `not stated` or `400 Gb/s a node`")
    return known[row.text("network")]


def _published(row: Row) -> dict[Figure, float]:
    if row.text("status") == "oom":
        return {}
    if row.text("status") != "ok":
        raise row.wrong("status", "not ok or oom")
    published = {Figure.TOKENS: row.number("tokens_per_s_per_gpu")}
    for column, figure in (("allocated_gib", Figure.ALLOCATED), ("reserved_gib", Figure.RESERVED)):
        if row.text(column):
            published[figure] = row.number(column) * _GIB_IN_GB
    return published
