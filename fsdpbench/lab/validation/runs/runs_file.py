"""Published runs from a CSV file, one a row, in the columns that `COLUMNS` names.

A row is a GPT with learned positions and a tied embedding under PyTorch's FSDP1 of today, one unit a block
and two all-gathers in flight, unless its source is one whose software is known.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from fsdpbench.base.configuration.config import ShapeValue
from fsdpbench.base.errors import UsageError
from fsdpbench.base.files.documents import read_text
from fsdpbench.base.numbers import finite_number, whole_number
from fsdpbench.base.settings import Value
from fsdpbench.lab.validation.runs import framework_file
from fsdpbench.lab.validation.runs.case import Case, Figure
from fsdpbench.sim.model.profile import profile_names, stated_machine

COLUMNS = (
    "source", "layers", "d_model", "heads", "vocab", "seq", "gpu", "gpus", "microbatch", "grad_accum",
    "param_dtype", "reduce_dtype", "strategy", "activation_checkpointing", "tokens_per_s_per_gpu",
)  # fmt: skip
_AS_SETTINGS = ("strategy", "param_dtype", "reduce_dtype", "activation_checkpointing")

# What llm-foundry's published runs were made with (its benchmark table of MPT-shaped GPTs under FSDP1).
# All: no bias, learned positions, tied embedding, one unit a block, two all-gathers in flight, gradients
# reduced in every microbatch, Composer's AdamW (`DecoupledAdamW`, a loop over parameters) and the backward
# prefetch that Composer has by default (`set_fsdp_default` in `composer/trainer/dist_strategy.py`, 0.17.0).
# * Its mode `DEFAULT`, documented as reduction in fp32, hands FSDP no `reduce_dtype` (`get_mixed_precision` in
#   `composer/trainer/mosaic_fsdp.py` since 0.13.5). FSDP then reduces gradients as they are, in the parameters'
#   dtype (torch 1.13.1: `_post_backward_hook`; later: `_init_param_reduce_dtypes` in `flat_param.py`). So
#   `DEFAULT` and `PURE` reduce alike.
# * Versions are of the time of each table: A100 in spring 2023 (llm-foundry 0.1 requires torch 1.13.1), H100 in
#   autumn 2023 (0.4, torch 2.1, flash attention 2).

_SOURCE = "llm-foundry"
_SYSTEMS = {"a100-40gb": "llm-foundry-0.1", "a100-80gb": "llm-foundry-0.1"}
_LATER = "llm-foundry-0.4"
_SHAPE = {"bias": False, "fp32_loss": False}
_COMPOSER = {"backward_prefetch": "post", "optimizer": "adamw-loop"}


def cases_of_file(path: Path) -> list[Case]:
    """Every row as a case. Raises `UsageError` that names file, line and column."""
    reader = csv.DictReader(io.StringIO(read_text(path), newline=""))
    try:
        columns = tuple(reader.fieldnames or ())
        general = "model" in columns and "layers" not in columns
        wanted = framework_file.COLUMNS if general else COLUMNS
        missing = [name for name in wanted if name not in columns]
        if missing:
            raise UsageError(f"{path}: lacks the columns {', '.join(missing)}")
        case_of_row = framework_file.case_of_row if general else _case
        return [case_of_row(framework_file.Row(path, line, row)) for line, row in enumerate(reader, start=2)]
    except csv.Error as error:
        raise UsageError(f"{path}: is not a CSV file ({error})") from None


def _case(row: framework_file.Row) -> Case:
    hardware, source = framework_file.chip_of_row(row), row.text("source")
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
    """The software of the table that has runs on `hardware`."""
    return _SYSTEMS.get(hardware, _LATER)
