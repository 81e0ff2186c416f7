"""Convert published runs as they were found, one figure a row, to a file that `validate --runs` reads.

    python ci/found_runs.py FOUND.csv RUNS.csv

FOUND.csv has the columns `COLUMNS`; its `strategy` and `notes` are words of the person who found the runs.
Rows of other kinds are left out, and counted: figures that are not times, other parallelism beside FSDP,
LoRA, offloading, graphs that replace FSDP's own code, fp8, models that are neither GPT nor Llama, and runs
that may have been compiled or not.
"""

from __future__ import annotations

import argparse
import csv
import io
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from fsdpbench.base.writing import write_whole
from fsdpbench.lab.validation.runs.runs_file import GENERAL_COLUMNS, Row

COLUMNS = (
    "id", "source", "model", "layers", "d_model", "d_ff", "heads", "kv_heads", "vocab", "gpu", "gpus",
    "gpus_per_node", "seq", "microbatch", "grad_accum", "strategy", "ac", "dtype", "compile", "metric",
    "value", "notes",
)  # fmt: skip
_WRITTEN = (*GENERAL_COLUMNS, "gpus_per_node", "software")
_OTHER_KINDS = re.compile(
    r"\b(TP|CP|EP|MoE|context parallel|offload|lora|graph|copy-engine|compile assumed)\b", re.IGNORECASE
)
_REDUCES_BF16 = re.compile(r"\breduce( and buffer)?( dtype)? bf16\b")
_FSDP = re.compile(r"\bfsdp([12])\b")
_MONTH = re.compile(r"\b20[0-9]{2}-[01][0-9]\b")
_CONTAINERS = {"pjnl-2024": "thunder-2024"}
_NEWER_KERNELS, _OLDER_SOFTWARE = "2026-02", "torch-2.10"  # torch 2.11, and the last software before it


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("found", type=Path)
    parser.add_argument("runs", type=Path)
    options = parser.parse_args()
    left_out = convert(options.found, options.runs)
    print(f"{options.runs}: written; {left_out} rows of other kinds left out")


def convert(found: Path, runs: Path) -> int:
    """Write the runs of `found`; return the number of rows left out. Raises `UsageError` that names a
    wrong value's line and column, `KeyError` for a column that is missing."""
    with found.open(newline="") as file:
        given = [{name: row[name] for name in COLUMNS} for row in csv.DictReader(file)]
    rows = [run_of_row(Row(found, line, row)) for line, row in enumerate(given, start=2)]
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, _WRITTEN, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(row for row in rows if row is not None)
    write_whole(runs, text.getvalue())
    return rows.count(None)


def run_of_row(row: Row) -> Mapping[str, str] | None:
    """Return the values of a run in the columns of `GENERAL_COLUMNS`; None for one of another kind."""
    family = next((each for each in _FAMILIES if each.words in row.text("model").lower()), None)
    fsdp = _FSDP.search(row.text("strategy"))
    if family is None or fsdp is None or row.text("dtype") != "bf16" or row.text("grad_accum") != "1":
        return None
    if any(_OTHER_KINDS.search(row.text(name)) for name in ("strategy", "model", "notes")):
        return None
    tokens = _tokens_per_s_per_gpu(row)
    if tokens is None:
        return None
    chip, network = _MACHINES.get(row.text("gpu"), (row.text("gpu"), "not stated"))
    several = row.count("gpus") > row.count("gpus_per_node")
    hybrid, zero2 = (word in row.text("strategy") for word in ("hybrid", "zero2"))
    return {
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
        "software": _software(row),
    }


def _software(row: Row) -> str:
    """Return the profile of a run's software, by the date and the container in its source."""
    months = _MONTH.findall(row.text("source"))
    if not months or max(months) >= _NEWER_KERNELS:
        return ""
    return next((name for words, name in _CONTAINERS.items() if words in row.text("source")), _OLDER_SOFTWARE)


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


if __name__ == "__main__":
    main()
