"""One configuration in its own process: run its ranks, then build its result from their files.

    sweep ── fork server ──> point process ──┬── sim: rank 0 in this process (for scripts with checked ranks:
                                             │   each rank forked from here)
                                             └── cpu, cuda: torch's elastic launcher, one process per rank

The process leads a process group, so killing the group kills all its processes, and it dies with its parent.
"""

import contextlib
import datetime
import faulthandler
import os
import signal
import sys
import time
import traceback
from collections.abc import Mapping
from pathlib import Path

from fsdpbench.base.configuration.config import Config
from fsdpbench.base.files.shared_log import add_record
from fsdpbench.base.interruption import die_with_parent
from fsdpbench.base.reading import JsonObject
from fsdpbench.engine.devices.base import Placement
from fsdpbench.engine.results.machine_state import environment_of, observe
from fsdpbench.engine.results.records import Status, read_records
from fsdpbench.engine.results.result import Outcome, outcome_of_records, record_result
from fsdpbench.launch.nodes import Nodes, lead
from fsdpbench.launch.verdict import log_to
from fsdpbench.reports.analysis.processes import pack

ASK = signal.SIGUSR1
"""The signal that makes a configuration's process write its stacks to `stderr.log`."""


def run_point(
    config_record: JsonObject,
    folder: str,
    nodes: Nodes | None = None,
    parent: int | None = None,
    shared: str | None = None,
    analysed: str | None = None,
    environment: Mapping[str, str] | None = None,
) -> None:
    """Run one point in this process, which ends with its `parent`. Writes `result.json` to `folder`.

    With `nodes`, this machine leads several. `shared`: log through which configurations share records;
    `analysed`: log of analysed traces, for the page. `environment`: replaces the fork server's.
    """
    die_with_parent(parent)
    if environment is not None:
        os.environ.clear()
        os.environ.update(environment)
    config, path = Config.from_dict(config_record), Path(folder).absolute()  # a script may change directory
    with contextlib.suppress(PermissionError):  # it already leads a session, and so a process group
        os.setpgid(0, 0)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    try:
        log_to(path)
    except FileNotFoundError:
        os._exit(1)  # the sweep was interrupted and has removed the folder
    faulthandler.register(ASK, file=2)
    began, started = time.monotonic(), timestamp()
    before = None if config.device == "sim" else observe(config.device)
    outcome = _run(config, path, nodes, shared)
    observed = environment_of(config, before, observe(config.device)) if before else None
    cpu_s = sum(os.times()[:4])  # of this process and its reaped children
    is_kept = analysed is not None and config.in_one_process  # otherwise the page reads the trace again
    draw = (lambda trace, rank: add_record(str(analysed), pack(trace, rank))) if is_kept else None
    record_result(config, path, outcome, time.monotonic() - began, started, observed, cpu_s, draw)
    sys.stdout.flush()
    sys.stderr.flush()
    # The simulated device leaves patches and frozen garbage behind; tearing it down would gain nothing.
    os._exit(0)


def _run(config: Config, folder: Path, nodes: Nodes | None, shared: str | None) -> Outcome:
    if nodes is not None and not config.in_one_process:
        return lead(config, folder, nodes)
    if not config.in_one_process:
        from fsdpbench.launch.elastic import run_elastic

        if config.script is not None:
            from fsdpbench.script.real_ranks.rank import run_real_rank

            return run_elastic(config, folder, run_real_rank)
        return run_elastic(config, folder)
    if config.script is not None and config.script.check_ranks:
        from fsdpbench.launch.rank_check import run_checked

        return run_checked(config, folder)
    placement = Placement(rank=0, world_size=config.gpus, local_rank=0)
    try:
        if config.script is not None:
            return _run_script(config, placement, folder)
        from fsdpbench.engine.devices.sim import sharing_plans
        from fsdpbench.engine.worker import run_rank

        with sharing_plans(shared):
            run_rank(config, placement, folder)
    except Exception as error:
        traceback.print_exc()
        return Outcome(Status.ERROR, f"{type(error).__name__}: {error}".splitlines()[0], "stderr.log")
    return outcome_of_records(read_records(folder), world_recorded=1)


def _run_script(config: Config, placement: Placement, folder: Path) -> Outcome:
    """Run a script as rank 0; if it has pipeline stages, run it again as one rank of each stage."""
    from fsdpbench.launch.stages import Standby
    from fsdpbench.script.rank import NeedsRanksError, may_have_stages, run_script

    standby = Standby(config, folder) if config.gpus > 1 and may_have_stages(config) else None
    try:
        run_script(config, placement, folder)
    except NeedsRanksError as error:
        assert standby is not None
        return standby.run({0, *error.ranks})
    if standby is not None:
        standby.dismiss()
    return outcome_of_records(read_records(folder), world_recorded=1)


def timestamp() -> str:
    """Return the current time in UTC, to the second."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
