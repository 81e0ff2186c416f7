"""What the tests of software profiles share: a rank of a configuration, run in this process or in a fork."""

from __future__ import annotations

import gc
import json
import os
import tempfile
from pathlib import Path
from typing import Any

from fsdpbench.base.configuration.config import Measurement
from fsdpbench.base.settings import Settings
from fsdpbench.engine.devices.base import Placement
from fsdpbench.engine.results.records import record_path
from fsdpbench.engine.worker import run_rank
from fsdpbench.sweep.planning import make_config, make_target, without_absent

STEPS = Measurement(1, 2, 0, timeout_s=60.0)


def run(
    system: str,
    software: str | None = None,
    gpus: int = 8,
    model: str = "gpt-tiny",
    hardware: str | None = None,
    **settings: Any,
) -> dict[str, Any]:
    """The record of rank 0."""
    target = make_target(
        model=model,
        shape={},
        device="sim",
        hardware=hardware,
        gpus=gpus,
        gpus_per_node=None,
        data=None,
        measurement=STEPS,
        software=software,
    )
    config = without_absent(make_config(target, system, Settings.of(**settings), target.workload()))
    with tempfile.TemporaryDirectory() as folder:
        run_rank(config, Placement(0, gpus, 0), Path(folder))
        gc.enable()
        record: dict[str, Any] = json.loads(record_path(Path(folder), 0).read_text())
    assert record["status"] == "ok", record["cause"]
    return record


def run_in_fork(*args: Any, **kwargs: Any) -> dict[str, Any]:
    """The same in a process that has simulated nothing before."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        with os.fdopen(writer, "w") as pipe:
            json.dump(run(*args, **kwargs), pipe)
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        content = pipe.read()
    os.waitpid(child, 0)
    record: dict[str, Any] = json.loads(content)
    return record
