"""Dumps as torch writes them: the fields of version 2.10, of NCCL."""

from __future__ import annotations

from typing import Any


def entry(number: int, kind: str = "all_reduce", **given: Any) -> dict[str, Any]:
    """One call, the `number`-th of the default group."""
    return {
        "frames": [
            {"name": "all_reduce", "filename": "/venv/site-packages/torch/distributed/c10d.py", "line": 1},
            {"name": "main", "filename": "/home/me/train.py", "line": 10 + number},
        ],
        "record_id": number - 1,
        "pg_id": 0,
        "process_group": ("0", "default_pg"),
        "collective_seq_id": number,
        "p2p_seq_id": 0,
        "op_id": number,
        "profiling_name": f"nccl:{kind}",
        "time_created_ns": 1_000 + number,
        "input_sizes": [[4, 8]],
        "input_dtypes": ["Float"],
        "output_sizes": [[4, 8]],
        "output_dtypes": ["Float"],
        "state": "completed",
        "is_p2p": False,
        **given,
    }


def dump(entries: list[dict[str, Any]], world: int = 3, **given: Any) -> dict[str, Any]:
    """A rank's dump."""
    config = {"0": {"name": "0", "desc": "default_pg", "ranks": str(list(range(world)))}}
    return {"version": "2.10", "pg_config": config, "pg_status": {}, "entries": entries, **given}
