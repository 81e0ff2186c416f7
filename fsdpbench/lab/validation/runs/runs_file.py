"""Published runs from a CSV file, one run per row, with the columns in `COLUMNS`.

A row is a GPT with learned positions and a tied embedding under today's PyTorch FSDP1, with one unit per
block and two all-gathers in flight, unless the software of its source is known.

A file with `GENERAL_COLUMNS` has runs of any model and framework. A row names model and settings as in the
bench. `status` is `ok` or `oom`; `network` is `N Gb/s a node`, `one node` or `not stated`; an optional
`gpus_per_node` overrides the chip's usual number; memory is in GiB. `confidence` names what a publication
leaves open; unless it begins with `stated`, these values count as assumed.
"""

import contextlib
import csv
import io
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from fsdpbench.base.configuration.config import ShapeValue
from fsdpbench.base.errors import UsageError
from fsdpbench.base.files.documents import read_text
from fsdpbench.base.numbers import finite_number, whole_number
from fsdpbench.base.settings import Settings, Value
from fsdpbench.lab.validation.runs.case import Case, Figure, Network
from fsdpbench.sim.model.profile import ProfileError, profile_names, stated_machine
from fsdpbench.sim.model.software import software_names
from fsdpbench.sweep.planning import check_systems, make_target

COLUMNS = (
    "source", "layers", "d_model", "heads", "vocab", "seq", "gpu", "gpus", "microbatch", "grad_accum",
    "param_dtype", "reduce_dtype", "strategy", "activation_checkpointing", "tokens_per_s_per_gpu",
)  # fmt: skip
_AS_SETTINGS = ("strategy", "param_dtype", "reduce_dtype", "activation_checkpointing")

# How llm-foundry's published runs were made (its benchmark table of MPT-shaped GPTs under FSDP1).
# All: no bias, learned positions, tied embedding, one unit per block, two all-gathers in flight, gradients
# reduced in every microbatch, Composer's AdamW (`DecoupledAdamW`, a loop over parameters) and the backward
# prefetch that is Composer's default (`set_fsdp_default` in `composer/trainer/dist_strategy.py`, 0.17.0).
# * Its mode `DEFAULT`, documented as reduction in fp32, sets no `reduce_dtype` (`get_mixed_precision` in
#   `composer/trainer/mosaic_fsdp.py` since 0.13.5). FSDP then reduces gradients unchanged, in the parameters'
#   dtype (torch 1.13.1: `_post_backward_hook`; later: `_init_param_reduce_dtypes` in `flat_param.py`). So
#   `DEFAULT` and `PURE` reduce alike.
# * Versions are from the date of each table: A100 in spring 2023 (llm-foundry 0.1 requires torch 1.13.1),
#   H100 in autumn 2023 (0.4, torch 2.1, flash attention 2).

_SOURCE = "llm-foundry"
_SYSTEMS = {"a100-40gb": "llm-foundry-0.1", "a100-80gb": "llm-foundry-0.1"}
_LATER = "llm-foundry-0.4"
_SHAPE = {"bias": False, "fp32_loss": False}
_COMPOSER = {"backward_prefetch": "post", "optimizer": "adamw-loop"}
GENERAL_COLUMNS = (
    "source", "run", "gpu", "gpus", "network", "system", "model", "shape", "seq", "batch", "strategy",
    "activation_checkpointing", "reduce_dtype", "compiled", "tokens_per_s_per_gpu", "status",
    "allocated_gib", "reserved_gib",
)  # fmt: skip
_GIB_IN_GB = 2**30 / 1e9
_COMPILED = {"yes": True, "no": False}
_BITS_OF_A_NODE = re.compile(r"(?<![0-9.])([0-9.]++) Gb/s a node")


@dataclass(frozen=True)
class _Epoch:
    """A source's software: profile (`None`: today's), and settings of its training loop that rows lack."""

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
    """One row, with its file and line for error messages."""

    def __init__(self, path: Path, line: int, given: Mapping[str, str | None]) -> None:
        self._where = f"{path}, line {line}"
        self._values = {name: (value or "").strip() for name, value in given.items() if name is not None}

    def text(self, column: str) -> str:
        """Return the value as text, empty if there is none."""
        return self._values.get(column, "")

    def wrong(self, column: str, rule: str) -> UsageError:
        """Return the error for a `column` that breaks `rule`."""
        return UsageError(f"{self._where}: {column} is {self.text(column)!r}, {rule}")

    def number(self, column: str) -> float:
        """Return a number above 0. Raises `UsageError`."""
        try:
            value = finite_number(self.text(column))
        except ValueError:
            value = 0.0
        if value <= 0:
            raise self.wrong(column, "not a number above 0")
        return value

    def count(self, column: str) -> int:
        """Return a whole number above 0. Raises `UsageError`."""
        try:
            return whole_number(self.text(column), 1)
        except ValueError:
            raise self.wrong(column, "not a whole number above 0") from None

    def choice(self, column: str, choices: Mapping[str, bool]) -> bool:
        """Return one of `choices`. Raises `UsageError`."""
        if self.text(column) not in choices:
            raise self.wrong(column, f"not one of {', '.join(choices)}")
        return choices[self.text(column)]


def chip_of_row(row: Row) -> str:
    """Return the packaged profile of the row's chip. Raises `UsageError`."""
    chip = row.text("gpu").replace("_", "-")
    if chip not in profile_names():
        raise row.wrong("gpu", f"none of {', '.join(profile_names())}")
    return chip


def case_of_row(row: Row) -> Case:
    """Return the row as a case, with its network if it states one.

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
    """Return the bandwidth in GB/s per node if the row states it, else the kind of statement."""
    if (found := _BITS_OF_A_NODE.fullmatch(row.text("network"))) is not None:
        with contextlib.suppress(ValueError):
            return finite_number(found[1]) / 8
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


def cases_of_file(path: Path) -> list[Case]:
    """Return every row as a case. Raises `UsageError` that names file, line and column."""
    reader = csv.DictReader(io.StringIO(read_text(path), newline=""))
    try:
        columns = tuple(reader.fieldnames or ())
        general = "model" in columns and "layers" not in columns
        wanted = GENERAL_COLUMNS if general else COLUMNS
        missing = [name for name in wanted if name not in columns]
        if missing:
            raise UsageError(f"{path}: lacks the columns {', '.join(missing)}")
        case_of = case_of_row if general else _case
        return [case_of(Row(path, line, row)) for line, row in enumerate(reader, start=2)]
    except csv.Error as error:
        raise UsageError(f"{path}: is not a CSV file ({error})") from None


def _case(row: Row) -> Case:
    hardware, source = chip_of_row(row), row.text("source")
    layers, width, gpus, seq, batch = map(row.count, ("layers", "d_model", "gpus", "seq", "microbatch"))
    shape: dict[str, ShapeValue] = {
        "layers": layers,
        "d_model": width,
        "heads": row.count("heads"),
        "vocab": row.count("vocab"),
        "tied": True,
    }
    settings: dict[str, Value] = {
        "seq": seq,
        "batch": batch,
        "grad_accum": row.count("grad_accum"),
        "limit_all_gathers": 2,
        **{name: row.text(name) for name in _AS_SETTINGS},
    }
    known = source == _SOURCE
    if known:
        shape |= _SHAPE
        settings |= {**_COMPOSER, "reduce_dtype": row.text("param_dtype")}
    per_node = row.text("gpus_per_node")
    return Case(
        name=f"GPT {layers}x{width}, seq {seq}, {gpus} GPUs, batch {batch} x {row.text('grad_accum')}, "
        f"{'recompute' if row.text('activation_checkpointing') == 'full' else 'no recompute'}",
        group=f"{source}, {hardware}",
        source=source,
        model="gpt",
        shape=shape,
        hardware=stated_machine(hardware, row.count("gpus_per_node")) if per_node else hardware,
        chip=hardware if per_node else "",
        gpus=gpus,
        settings=settings,
        published={Figure.TOKENS: row.number("tokens_per_s_per_gpu")},
        system=system_of(hardware) if known else "torch-fsdp1",
    )


def system_of(hardware: str) -> str:
    """Return the system of the table that has runs on `hardware`."""
    return _SYSTEMS.get(hardware, _LATER)
