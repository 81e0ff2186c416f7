"""Points as Slurm jobs, through submitit: one job per real configuration, an array for simulated ones.

    sweep (login node) ── sbatch ──> job: the same `run_point` as on one machine ──> work folder (shared)
         ^                            several nodes: one torchrun agent each, node 0 judges
         └── looks for result.json and asks Slurm for the job's state

The sweep has no connection to its jobs. Their folders and Slurm's queue have all state, so the sweep can be
killed and started again. Jobs of an earlier start are cancelled first.
"""

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsdpbench.base.configuration.config import Config
from fsdpbench.base.errors import BenchError, UsageError
from fsdpbench.base.reading import MIB, JsonObject, printable, read_tail
from fsdpbench.base.writing import append_to, remove, write_whole
from fsdpbench.engine.results.records import Status
from fsdpbench.engine.results.result import Outcome, record_result
from fsdpbench.engine.results.store import result_in
from fsdpbench.launch.nodes import Nodes, lead, run_agent
from fsdpbench.launch.point import run_point, timestamp
from fsdpbench.launch.pool import PointState
from fsdpbench.reports.result import Result

_START_GRACE_S = 120.0
"""Seconds that a job may take in addition to the configuration's timeout (imports, the file system)."""
_RENDEZVOUS_PORT = 29400
_UNDER_WAY = frozenset(
    ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "SUSPENDED", "REQUEUED", "STOPPED", "UNKNOWN")
)
_SEEN_GRACE_S = 20.0
"""Maximum seconds until a result is visible after its job has ended."""


@dataclass(frozen=True)
class SlurmSettings:
    """The resources to request from Slurm. `time_minutes` None: derived from the configurations' timeouts."""

    partition: str | None = None
    account: str | None = None
    time_minutes: int | None = None
    most_jobs: int = 64

    def __post_init__(self) -> None:
        for name in ("partition", "account"):
            value = getattr(self, name)
            if value is not None and (printable(value) != value or not value.strip()):
                # The value becomes a line of the job's script.
                raise UsageError(f"--{name} {printable(value)!r}: holds what no name of Slurm's does")


@dataclass
class _Job:
    config: Config
    folder: Path
    job: Any
    began: float
    started: str
    ended: float | None = None


class SlurmPool:
    """A `Pool` that runs points as Slurm jobs. Leaving its context cancels jobs that have not ended."""

    def __init__(self, folder: Path, settings: SlurmSettings) -> None:
        """Raise `UsageError` if submitit or Slurm is not installed."""
        try:
            import submitit
        except ImportError:
            raise UsageError("--launcher slurm needs submitit: pip install 'fsdpbench[slurm]'") from None
        if shutil.which("sbatch") is None:
            raise UsageError("--launcher slurm: no sbatch on the path; start it on a Slurm login node")
        self._submitit = submitit
        self._folder = folder.resolve() / ".slurm"
        self._settings = settings
        self._waiting: list[tuple[Config, Path]] = []
        self._jobs: list[_Job] = []

    def __enter__(self) -> "SlurmPool":
        if self._folder.is_symlink():
            remove(self._folder)
        self._folder.mkdir(exist_ok=True)
        self._cancel(self._remembered())
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._cancel([entry.job.job_id for entry in self._jobs])
        remove(self._folder)

    @property
    def running(self) -> list[Config]:
        return [config for config, _ in self._waiting] + [entry.config for entry in self._jobs]

    @property
    def has_room(self) -> bool:
        return len(self._waiting) + len(self._jobs) < self._settings.most_jobs

    def start(self, config: Config, folder: Path) -> None:
        """Queue `config`; jobs are submitted together, so that simulated ones become one array."""
        self._waiting.append((config, folder))

    def states(self) -> list[PointState]:
        """Return an empty list, because the queue does not report a job's progress."""
        return []

    def finished(self, wait_s: float) -> Iterator[tuple[Config, Path, Result]]:
        """Yield points whose jobs have ended, each with its folder and result."""
        self._submit()
        time.sleep(wait_s)
        states = self._states()
        for entry in list(self._jobs):
            result = self._result_of(entry, states.get(entry.job.job_id))
            if result is not None:
                self._jobs.remove(entry)
                yield entry.config, entry.folder, result

    def _submit(self) -> None:
        try:
            self._submit_waiting()
        except self._submitit.core.utils.FailedJobError as error:
            lines = [line for line in str(error).splitlines() if line.strip()]
            raise BenchError(f"Slurm does not take the job: {lines[-1] if lines else error}") from None

    def _submit_waiting(self) -> None:
        waiting, self._waiting = self._waiting, []
        simulated = [pair for pair in waiting if pair[0].device == "sim"]
        arrays = [simulated] if simulated else []
        for pairs in (*arrays, *([pair] for pair in waiting if pair[0].device != "sim")):
            executor = self._executor(pairs[0][0])
            with executor.batch() if pairs is simulated else contextlib.nullcontext():
                jobs = [
                    executor.submit(run_job, config.to_dict(), str(folder.resolve()))
                    for config, folder in pairs
                ]
            self._keep(pairs, jobs)

    def _keep(self, pairs: list[tuple[Config, Path]], jobs: list[Any]) -> None:
        for (config, folder), job in zip(pairs, jobs, strict=True):
            self._jobs.append(_Job(config, folder, job, time.monotonic(), timestamp()))
        ids = {job.job_id.split("_")[0] for job in jobs}
        with os.fdopen(append_to(self._folder / "jobs"), "a") as file:
            file.writelines(f"{job_id}\n" for job_id in sorted(ids))

    def _executor(self, config: Config) -> Any:
        settings = self._settings
        nodes = max(1, config.gpus // config.gpus_per_node) if not config.in_one_process else 1
        minutes = settings.time_minutes
        if minutes is None:
            minutes = int((config.measurement.timeout_s + _START_GRACE_S) // 60) + 1
        executor = self._submitit.SlurmExecutor(folder=self._folder / "%j")
        asked = {
            "job_name": "fsdpbench",
            "nodes": nodes,
            "ntasks_per_node": 1,
            "time": minutes,
            "array_parallelism": settings.most_jobs,
        }
        if config.device == "cuda":
            asked["gpus_per_node"] = config.gpus // nodes
        asked |= {name: value for name in ("partition", "account") if (value := getattr(settings, name))}
        executor.update_parameters(**asked)
        return executor

    def _states(self) -> dict[str, str]:
        """Return the state of each job from squeue, because accounting, which submitit uses, may be off."""
        if not self._jobs:
            return {}
        ids = ",".join(sorted({entry.job.job_id.split("_")[0] for entry in self._jobs}))
        asked = ["squeue", "--noheader", "--array", "--states=all", f"--jobs={ids}", "--format=%i %T"]
        try:
            done = subprocess.run(asked, capture_output=True, text=True, timeout=30, check=False)
        except (OSError, subprocess.SubprocessError):
            return {entry.job.job_id: "UNKNOWN" for entry in self._jobs}
        words = (line.split() for line in done.stdout.splitlines())
        return {pair[0]: pair[1] for pair in words if len(pair) == 2}

    def _result_of(self, entry: _Job, state: str | None) -> Result | None:
        if (result := result_in(entry.folder)) is not None:
            return result
        if state in _UNDER_WAY:
            return None
        entry.ended = entry.ended or time.monotonic()
        if time.monotonic() - entry.ended < _SEEN_GRACE_S and state in ("COMPLETED", None):
            return None
        outcome = _outcome_of_state(entry.job.job_id, state or "forgotten by Slurm")
        with contextlib.suppress(OSError):
            write_whole(entry.folder / "stderr.log", read_tail(Path(entry.job.paths.stderr), MIB))
        took = time.monotonic() - entry.began
        return record_result(entry.config, entry.folder, outcome, took, entry.started)

    def _remembered(self) -> list[str]:
        try:
            return (self._folder / "jobs").read_text().split()
        except OSError:
            return []

    @staticmethod
    def _cancel(job_ids: list[str]) -> None:
        if job_ids:
            with contextlib.suppress(OSError, subprocess.SubprocessError):
                subprocess.run(["scancel", *job_ids], capture_output=True, timeout=30, check=False)


def run_job(config_record: JsonObject, folder: str) -> None:
    """Run this node's part of a job. Writes `result.json` to `folder`."""
    import fsdpbench.launch.preload  # noqa: F401 - registers the simulated device

    config, path = Config.from_dict(config_record), Path(folder)
    nodes = int(os.environ.get("SLURM_JOB_NUM_NODES", "1"))
    if nodes == 1:
        run_point(config_record, folder)  # ends the process
    port = _RENDEZVOUS_PORT + int(os.environ["SLURM_JOB_ID"]) % 4096  # a different one for each job
    place = Nodes(nodes, int(os.environ["SLURM_NODEID"]), f"{_first_node()}:{port}")
    if place.rank > 0:
        run_agent(config, path, place, os.environ["SLURM_JOB_ID"])
        return
    began, started = time.monotonic(), timestamp()
    outcome = lead(config, path, place, run_id=os.environ["SLURM_JOB_ID"])
    record_result(config, path, outcome, time.monotonic() - began, started)


def _first_node() -> str:
    """Return the address of the job's first node in Slurm's configuration, or its name if it has none."""
    names = _scontrol("show", "hostnames", os.environ["SLURM_JOB_NODELIST"]).split()
    fields = _scontrol("--oneliner", "show", "node", names[0]).split()
    addresses = (word.partition("=")[2] for word in fields if word.startswith("NodeAddr="))
    return next(addresses, names[0])


def _scontrol(*words: str) -> str:
    try:
        done = subprocess.run(["scontrol", *words], capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise BenchError(f"Slurm does not tell the nodes of this job: {error}") from None
    return done.stdout


def _outcome_of_state(job_id: str, state: str) -> Outcome:
    if "TIMEOUT" in state:
        return Outcome(Status.TIMEOUT, "Slurm ended the job at its time limit (--time)", "stderr.log")
    if "OUT_OF_ME" in state:
        return Outcome(Status.OOM, "Slurm ended the job: out of memory", "stderr.log")
    return Outcome(Status.CRASH, f"the Slurm job {job_id} ended without a result ({state})", "stderr.log")
