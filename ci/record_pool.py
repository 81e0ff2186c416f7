"""Records a pool of real runs of one small configuration, for the tests of the gate's statistics.

    python ci/record_pool.py ci/measured/cpu_pool.json --runs 80

Two ranks over gloo on this machine's CPU train a small GPT; every run starts its processes again, since the
run is the replicate. The file keeps each run's untraced step times in the order in which the runs took place,
with the kind of machine, how busy it was beside them, the versions, and this command. It names no host.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

from fsdpbench.base.configuration.config import Config, Measurement
from fsdpbench.base.settings import Settings
from fsdpbench.cli.terminal.progress import make_progress
from fsdpbench.engine.results.provenance import machine, versions
from fsdpbench.engine.results.records import Status
from fsdpbench.engine.results.store import Store
from fsdpbench.launch import fork_server
from fsdpbench.reports.result import Result
from fsdpbench.sweep.hf_model import parse_shape
from fsdpbench.sweep.planning import make_config, make_target, without_absent
from fsdpbench.sweep.runner import run_sweep

MODEL = "gpt"
SHAPE = "layers=2,d_model=128,heads=4,vocab=512,max_seq=64"
RANKS = 2
# Many short steps and no trace: what a run tells is its step time alone.
MEASUREMENT = Measurement(warmup_steps=5, timed_steps=60, traced_steps=0, timeout_s=120.0)


def main() -> None:
    parser = argparse.ArgumentParser(description="Record a pool of real runs.")
    parser.add_argument("file", type=Path)
    parser.add_argument("--runs", type=int, default=80)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="fsdpbench-pool-") as temporary:
        fork_server.start("cpu")
        results = measure(configuration(), Path(temporary) / "runs", arguments.runs)
    content = {
        "schema": 1,
        "command": f"python ci/record_pool.py ci/measured/{arguments.file.name} --runs {arguments.runs}",
        "model": f"{MODEL} ({SHAPE}), impl-fsdp2, {RANKS} ranks over gloo, fp32",
        "device": "cpu",
        "machine": kind_of_machine(results),
        "versions": {name: versions()[name] for name in ("python", "torch", "fsdpbench")},
        "runs": [{"step_times_s": rounded(result)} for result in results],
    }
    arguments.file.write_text(
        json.dumps(content, separators=(",", ":")).replace('},{"step', '},\n{"step') + "\n"
    )


def configuration() -> Config:
    target = make_target(
        model=MODEL,
        shape=parse_shape(SHAPE),
        device="cpu",
        hardware=None,
        gpus=RANKS,
        gpus_per_node=None,
        data=None,
        measurement=MEASUREMENT,
    )
    settings = Settings.of(batch=4, wrap="block", param_dtype="fp32", reduce_dtype="fp32")
    return without_absent(make_config(target, "impl-fsdp2", settings, target.workload()))


def measure(config: Config, folder: Path, runs: int) -> list[Result]:
    """The results of the runs that succeeded, in their order in time."""
    store = Store.open_or_create(folder)
    with store.locked():
        store.write_space({"schema": 1, "model": config.model, "system": [config.system]}, [config])
        summary = run_sweep(store, [config], make_progress(), jobs=1, repeat=runs)
    return [trial.result for trial in summary.ran if trial.status is Status.OK]


def rounded(result: Result) -> list[float]:
    """The run's step times in seconds, to 10 microseconds."""
    return [round(seconds, 5) for seconds in result.step_times_s]


def kind_of_machine(results: list[Result]) -> dict[str, Any]:
    busy = [result.stored("environment.state.before.busy_cores") for result in results]
    known = [cores for cores in busy if cores is not None]
    return {
        "processor": machine()["processor"],
        "cores": machine()["cores"],
        "busy_cores_beside": {"median": statistics.median(known), "most": max(known)} if known else None,
    }


if __name__ == "__main__":
    main()
