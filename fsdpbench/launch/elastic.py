"""The ranks of one configuration as processes of torch's elastic launcher.

    this process ── elastic agent (here) ──┬── rank 0      forked: torch is imported already
         │                                 └── rank 1      spawned for cuda, which cannot be used after a fork
         ├── a thread per rank waits for its exit code
         └── a watchdog thread: after the timeout, asks every rank to dump its stacks and end, then kills

Ranks end by SIGTERM's default action, because Python may be stuck in a collective; faulthandler first writes
their stacks. They are also killed with their parent, so none is left running.
"""

import faulthandler
import os
import signal
import sys
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing.sharedctypes import RawArray
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs, Std
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from fsdpbench.base.configuration.config import Config
from fsdpbench.base.configuration.simulated_cuda import simulated_cuda
from fsdpbench.base.errors import BenchError, error_text
from fsdpbench.base.interruption import die_with_parent

# torch imports it in an optimizer's first step: import it here once for all ranks.
from fsdpbench.base.torch_internals import dynamo  # noqa: F401
from fsdpbench.base.writing import append_to
from fsdpbench.engine.devices.base import Placement
from fsdpbench.engine.devices.detection import number_of_launcher
from fsdpbench.engine.results.records import Status, read_records
from fsdpbench.engine.results.result import Outcome
from fsdpbench.engine.worker import run_rank
from fsdpbench.launch.verdict import LOG_FOLDER, RankFiles, judge

RankFunction = Callable[[Config, Placement, Path], Status]

_STOP_GRACE_S = 2.0
"""Seconds between asking a rank to end and killing it."""
_POLL_S = 0.02
_EXIT_NOT_OK = 3
"""Exit code of a rank whose record has the reason; it makes the launcher stop the other ranks."""


def run_elastic(config: Config, folder: Path, rank_function: RankFunction = run_rank) -> Outcome:
    """Run all ranks of `config` on this machine and wait for them, up to the configuration's timeout.

    `rank_function` writes into `folder`. Each rank's output is written to `logs/` and also printed, each line
    with its rank. Never raises for what a rank does. Call it in the main thread (because of signals).

    Raises:
        BenchError: the configuration spans several machines.
    """
    if config.gpus > config.gpus_per_node:
        raise BenchError(error_text("elastic.machines", config.gpus, config.gpus // config.gpus_per_node))
    (folder / LOG_FOLDER).mkdir(parents=True, exist_ok=True)
    pids = RawArray("i", config.gpus)
    watch = _Watch(config, folder, pids)
    launcher_error = ""
    with _signal_handlers_restored(), watch:
        try:
            launch = elastic_launch(_launch_config(config, folder), _rank_main)
            launch(config.to_dict(), str(folder), pids, rank_function, os.getpid())
        except ChildFailedError as error:
            for rank, failure in error.failures.items():
                watch.exit_codes.setdefault(rank, failure.exitcode)
        except Exception as error:
            launcher_error = f"the launcher failed: {type(error).__name__}: {error}".splitlines()[0]
    files = [RankFiles(folder, rank) for rank in range(config.gpus)]
    timed_out = config.measurement.timeout_s if watch.timed_out else None
    outcome = judge(folder, config.gpus, read_records(folder), watch.exit_codes, timed_out)
    for rank_files in files:
        rank_files.remove_empty()
    if launcher_error and outcome.status in (Status.OK, Status.CRASH) and not watch.exit_codes:
        return Outcome(Status.ERROR, launcher_error, "stderr.log")
    return outcome


def _launch_config(config: Config, folder: Path) -> LaunchConfig:
    return LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=config.gpus,
        logs_specs=_RankLogs(folder),
        run_id=uuid.uuid4().hex,
        role="rank",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",  # 0: any free port
        rdzv_configs={"timeout": max(30, int(config.measurement.timeout_s))},
        local_addr="localhost",
        max_restarts=0,
        monitor_interval=0.1,
        start_method="spawn" if config.device == "cuda" else "fork",
        log_line_prefix_template="[rank${rank}] ",
    )


def _rank_main(
    config_record: Mapping[str, Any], folder: str, pids: Any, rank_function: RankFunction, parent: int
) -> None:
    """Run one rank in its process; the launcher passes its rank in the environment."""
    placement = Placement(
        int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_RANK"])
    )
    die_with_parent(parent)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)
    faulthandler.enable(file=sys.stderr)
    stacks = os.fdopen(append_to(RankFiles(Path(folder), placement.rank).stopped), "w")
    faulthandler.register(signal.SIGTERM, file=stacks, all_threads=True, chain=True)
    pids[placement.local_rank] = os.getpid()
    try:
        config = Config.from_dict(config_record)
        rehearse(config, placement)
        status = rank_function(config, placement, Path(folder))
    except Exception:
        traceback.print_exc()  # into the rank's own log; the launcher would not print it
        sys.exit(1)
    if status is not Status.OK:
        sys.exit(_EXIT_NOT_OK)


def rehearse(config: Config, placement: Placement) -> None:
    """Map "cuda" to the simulated device if the environment asks for it (`script/rehearsal.py`)."""
    if config.device == "cuda" and simulated_cuda() is not None:
        from fsdpbench.script.rehearsal import rehearse_where_asked

        rehearse_where_asked(placement, config.ranks_per_node)


def rehearse_launched() -> None:
    """Do the same as `rehearse` for a process started by torchrun, if any, with the host's clock."""
    from fsdpbench.script.rehearsal import rehearse_where_asked

    world = number_of_launcher("WORLD_SIZE", 1)
    rank, local = number_of_launcher("RANK", 0), number_of_launcher("LOCAL_RANK", 0)
    per_node = number_of_launcher("LOCAL_WORLD_SIZE", world)
    rehearse_where_asked(Placement(rank, world, local), per_node, host_clock=True)


class _RankLogs(LogsSpecs):
    """Write each rank's output to its own file and, by tee, to this process's output."""

    def __init__(self, folder: Path) -> None:
        super().__init__(str(folder / LOG_FOLDER), redirects=Std.ALL, tee=Std.ALL)
        self._folder = folder

    @property
    def root_log_dir(self) -> str:
        return str(self._folder / LOG_FOLDER)

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        files = {rank: RankFiles(self._folder, rank) for rank in envs}
        for rank, env in envs.items():
            env["TORCHELASTIC_ERROR_FILE"] = str(files[rank].error)
        stdouts = {rank: str(file.stdout) for rank, file in files.items()}
        stderrs = {rank: str(file.stderr) for rank, file in files.items()}
        errors = {rank: str(file.error) for rank, file in files.items()}
        return LogsDest(stdouts, stderrs, dict(stdouts), dict(stderrs), errors)


class _Watch:
    """Threads that collect exit codes and enforce the timeout; on exit all remaining ranks are killed."""

    def __init__(self, config: Config, folder: Path, pids: Any) -> None:
        self.exit_codes: dict[int, int] = {}
        self.timed_out = False
        self._pids = pids
        self._deadline = time.monotonic() + config.measurement.timeout_s
        self._over = threading.Event()
        # The launcher reports the exit code of only the first failed rank.
        tasks = [("timeout", self._guard)]
        tasks += [(f"exit of rank {rank}", partial(self._learn_exit, rank)) for rank in range(config.gpus)]
        self._threads = [threading.Thread(target=task, name=name, daemon=True) for name, task in tasks]

    def __enter__(self) -> "_Watch":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._over.set()
        self._signal_all(signal.SIGKILL)
        for thread in self._threads:
            thread.join(timeout=_STOP_GRACE_S)

    def _guard(self) -> None:
        if self._over.wait(max(0.0, self._deadline - time.monotonic())):
            return
        self.timed_out = True
        self._signal_all(signal.SIGTERM)
        self._over.wait(_STOP_GRACE_S)
        self._signal_all(signal.SIGKILL)

    def _learn_exit(self, rank: int) -> None:
        while not self._pids[rank]:
            if self._over.wait(_POLL_S):
                return
        with suppress(ChildProcessError):  # the launcher has reaped it, and has the exit code
            ended = os.waitid(os.P_PID, self._pids[rank], os.WEXITED | os.WNOWAIT)
            if ended is not None:
                by_exit = ended.si_code == os.CLD_EXITED
                self.exit_codes[rank] = ended.si_status if by_exit else -ended.si_status

    def _signal_all(self, number: signal.Signals) -> None:
        """Signal all ranks that are not known to have ended; another process may have an ended rank's pid."""
        for rank, pid in enumerate(self._pids):
            if pid and rank not in self.exit_codes and _is_child(pid):
                with suppress(ProcessLookupError):
                    os.kill(pid, number)


def _is_child(pid: int) -> bool:
    """Return whether `pid` is a child of this process that was not reaped yet."""
    try:
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)
    except ChildProcessError:
        return False
    return True


@contextmanager
def _signal_handlers_restored() -> Iterator[None]:
    """Restore signal handlers, because the launcher installs its own and does not restore them."""
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
    before = {number: signal.getsignal(number) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
