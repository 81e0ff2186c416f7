"""Published runs as they were found, one figure a row, in the columns that `COLUMNS` names.

`strategy` and `notes` are words of the person who found them. A row becomes one of the format of
`framework_file`; rows of other kinds are left out: figures that are not times, other parallelism beside
FSDP, LoRA, offloading, graphs that replace FSDP's own code, fp8, models that are neither GPT nor Llama.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from fsdpbench.lab.validation.runs.framework_file import Row

COLUMNS = (
    "id", "source", "model", "layers", "d_model", "d_ff", "heads", "kv_heads", "vocab", "gpu", "gpus",
    "gpus_per_node", "seq", "microbatch", "grad_accum", "strategy", "ac", "dtype", "compile", "metric", "value",
    "notes",
)  # fmt: skip
_OTHER_KINDS = re.compile(r"\b(TP|CP|EP|MoE|context parallel|offload|lora|graph|copy-engine)\b", re.IGNORECASE)
_REDUCES_BF16 = re.compile(r"\breduce( and buffer)?( dtype)? bf16\b")
_FSDP = re.compile(r"\bfsdp([12])\b")
_MONTH = re.compile(r"\b20[0-9]{2}-[01][0-9]\b")
_NEWER_KERNELS, _OLDER_SOFTWARE = "2026-02", "torch-2.8"  # torch 2.11, and the last software before it


@dataclass(frozen=True)
class _Family:
    """A family by the words of its models: the packaged model whose shape a row changes, and the fields."""

    words: str
    model: str
    fields: tuple[str, ...]


_FAMILIES = (
    _Family("gpt", "gpt-2.8b", ("layers", "d_model", "heads", "vocab")),
    _Family("llama", "llama2-7b", ("layers", "d_model", "d_ff", "heads", "kv_heads", "vocab")),
)
# A machine in the name of a chip: the profile and the data sheet's network of MareNostrum 5 and Leonardo.
_MACHINES = {
    "h100-64gb-mn5": ("h100-64gb", "800 Gb/s a node"),
    "a100-64gb-leonardo": ("a100-64gb", "400 Gb/s a node"),
}


def framework_row(path: Path, line: int, given: Mapping[str, str | None]) -> Row | None:
    """Return the row of a run in the columns of `framework_file`; None for one of another kind.

    Raises `UsageError` that names file, line and column.
    """
    row = Row(path, line, given)
    family = next((each for each in _FAMILIES if each.words in row.text("model").lower()), None)
    fsdp = _FSDP.search(row.text("strategy"))
    if family is None or fsdp is None or row.text("dtype") != "bf16" or row.text("grad_accum") != "1":
        return None
    tokens = _tokens_per_s_per_gpu(row)
    if tokens is None or any(_OTHER_KINDS.search(row.text(name)) for name in ("strategy", "model", "notes")):
        return None
    chip, network = _MACHINES.get(row.text("gpu"), (row.text("gpu"), "not stated"))
    several = row.count("gpus") > row.count("gpus_per_node")
    hybrid, zero2 = (word in row.text("strategy") for word in ("hybrid", "zero2"))
    values = {
        "source": row.text("source").partition(":")[0],
        "run": row.text("id"),
        "gpu": chip,
        "gpus": row.text("gpus"),
        "gpus_per_node": row.text("gpus_per_node"),
        "network": network if several else "one node",
        "system": f"torch-fsdp{fsdp[1]}",
        "model": family.model,
        "shape": ",".join(f"{name}={row.text(name)}" for name in family.fields),
        "seq": row.text("seq"),
        "batch": row.text("microbatch"),
        "strategy": "HYBRID_SHARD" if hybrid else "SHARD_GRAD_OP" if zero2 else "FULL_SHARD",
        "activation_checkpointing": row.text("ac"),
        "reduce_dtype": "bf16" if _REDUCES_BF16.search(row.text("notes")) else "fp32",
        "compiled": "yes" if row.text("compile") == "1" else "no",
        "tokens_per_s_per_gpu": f"{tokens:.7g}",
        "status": "ok",
        "software": _OLDER_SOFTWARE if _is_older(row) else "",
    }
    return Row(path, line, values)


def _is_older(row: Row) -> bool:
    months = _MONTH.findall(row.text("source"))
    return bool(months) and max(months) < _NEWER_KERNELS


def _tokens_per_s_per_gpu(row: Row) -> float | None:
    """Return the speed that a row publishes; None if its figure is another."""
    match row.text("metric"):
        case "tokens_per_s_per_gpu":
            return row.number("value")
        case "tokens_per_s_total":
            return row.number("value") / row.count("gpus")
        case "step_s":
            return row.count("seq") * row.count("microbatch") / row.number("value")
    return None
