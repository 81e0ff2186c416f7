"""The ranks of one configuration on several machines: one torchrun agent per machine, and a shared folder.

    node 0 (leads)   writes launch.json into the work folder, runs its agent, judges, writes the result
    node 1, 2, …     find launch.json and run their agents           (`follow`, or a scheduler's own tasks)

Agents connect to `endpoint`. All files of ranks are in the configuration's folder, which all nodes can see.
There is no database, and no lock across nodes.
"""

import functools
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsdpbench.base.configuration.config import Config
from fsdpbench.base.errors import BenchError, error_text
from fsdpbench.base.files.documents import read_json_object
from fsdpbench.base.interruption import PARENT, die_with_parent
from fsdpbench.base.reading import MIB, UnreadableError, read_tail
from fsdpbench.base.writing import append_to, write_whole
from fsdpbench.engine.results.records import Status, read_records
from fsdpbench.engine.results.result import Outcome, outcome_of_records
from fsdpbench.launch.verdict import LOG_FOLDER

LAUNCH_FILE = "launch.json"
_STOP_GRACE_S = 5.0
_RECORDS_GRACE_S = 10.0
"""Maximum seconds until records from other nodes are visible here (caches of network file systems)."""
_POLL_S = 0.2


@dataclass(frozen=True)
class Nodes:
    """This machine's `rank` among `count` nodes, which all connect to `endpoint` (host:port)."""

    count: int
    rank: int
    endpoint: str

    def __post_init__(self) -> None:
        if self.count < 1 or not 0 <= self.rank < self.count:
            raise ValueError(f"node {self.rank} of {self.count}: ranks go from 0 to the count less one")


def lead(config: Config, folder: Path, nodes: Nodes, run_id: str | None = None) -> Outcome:
    """Run `config` on all nodes, led by this one, and judge the outcome. Never raises for what a rank does.

    With `run_id` the other nodes already know about the run; without, it is announced to nodes that `follow`.
    """
    if run_id is None:
        run_id = uuid.uuid4().hex
        announce(folder, run_id)
    code, timed_out = run_agent(config, folder, nodes, run_id)
    (folder / LAUNCH_FILE).unlink(missing_ok=True)
    deadline = time.monotonic() + _RECORDS_GRACE_S
    records = read_records(folder)
    while code == 0 and len(records) < config.gpus and time.monotonic() < deadline:
        time.sleep(_POLL_S)
        records = read_records(folder)
    if timed_out:
        return Outcome(Status.TIMEOUT, f"ran past {config.measurement.timeout_s:g} s", _log(nodes))
    outcome = outcome_of_records(records, config.gpus)
    if outcome.status is Status.CRASH and code:
        last = _last_error(folder)
        return Outcome(Status.CRASH, f"{outcome.cause}" + (f": {last}" if last else ""), _log(nodes))
    return outcome


def announce(folder: Path, run_id: str) -> None:
    """Announce atomically to the other nodes that `folder` is to be run."""
    write_whole(folder / LAUNCH_FILE, json.dumps({"run_id": run_id}))


def follow(folder: Path, nodes: Nodes, is_over: Callable[[], bool], patience_s: float) -> int:
    """Run this node's part of the sweep in `folder` until `is_over`. Return the number of runs.

    Raises `BenchError` if the leading node starts nothing for `patience_s` seconds.
    """
    served: set[str] = set()
    last = time.monotonic()
    while True:
        for path in sorted(folder.glob(f".work-*/{LAUNCH_FILE}")):
            try:
                run_id = read_json_object(path)["run_id"]
                config = Config.from_dict(read_json_object(path.parent / "config.json"))
            except (UnreadableError, KeyError):
                continue  # the run has just ended
            if run_id not in served:
                served.add(run_id)
                run_agent(config, path.parent, nodes, run_id)
                last = time.monotonic()
        if is_over():
            return len(served)
        if time.monotonic() - last > patience_s:
            raise BenchError(error_text("nodes.leader_missing", folder, patience_s))
        time.sleep(_POLL_S)


def run_agent(config: Config, folder: Path, nodes: Nodes, run_id: str) -> tuple[int, bool]:
    """Run this node's ranks of `config` with torchrun; all nodes use the same `run_id`. Return the exit code
    and whether the timeout was exceeded."""
    (folder / LOG_FOLDER).mkdir(parents=True, exist_ok=True)
    with (
        os.fdopen(append_to(folder / LOG_FOLDER / f"node{nodes.rank}_stdout.log"), "ab") as stdout,
        os.fdopen(append_to(folder / _log(nodes)), "ab") as stderr,
    ):
        process = subprocess.Popen(
            _command(config, folder, nodes, run_id),
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
            preexec_fn=functools.partial(_follow_parent, os.getpid()),
        )
        try:
            return process.wait(timeout=config.measurement.timeout_s), False
        except subprocess.TimeoutExpired:
            return 1, True
        finally:
            _end(process)


def _command(config: Config, folder: Path, nodes: Nodes, run_id: str) -> list[str]:
    here = config.gpus // nodes.count
    return [
        sys.executable, "-m", "torch.distributed.run",
        f"--nnodes={nodes.count}", f"--nproc-per-node={here}", f"--node-rank={nodes.rank}",
        "--rdzv-backend=c10d", f"--rdzv-endpoint={nodes.endpoint}", f"--rdzv-id={run_id}",
        f"--rdzv-conf=timeout={max(30, int(config.measurement.timeout_s))},is_host={int(nodes.rank == 0)}",
        "--max-restarts=0", "-m", "fsdpbench.engine.worker", str(folder / "config.json"), str(folder),
    ]  # fmt: skip


def _follow_parent(parent: int) -> None:
    """Prepare the agent's process before exec: it dies with its parent, and passes its pid to its ranks."""
    die_with_parent(parent)
    os.environ[PARENT] = str(os.getpid())


def _end(process: subprocess.Popen[Any]) -> None:
    """Ask the agent to end, so that it can end its ranks, then kill its whole session."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is None or number is signal.SIGKILL:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=_STOP_GRACE_S)


def _log(nodes: Nodes) -> str:
    return f"{LOG_FOLDER}/node{nodes.rank}_stderr.log"


def _last_error(folder: Path) -> str:
    """Return the last line that names an error, from the first node's log that has one."""
    for path in sorted((folder / LOG_FOLDER).glob("node*_stderr.log")):
        lines = [line.strip() for line in read_tail(path, MIB).splitlines()]
        named = [line for line in lines if "Error" in line.split(":")[0]]
        if named:
            return named[-1]
    return ""
