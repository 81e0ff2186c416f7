"""The fork server: a process that has imported torch and forks a process for each point.

This module is light to import, so that a command can start the server before it imports its own modules.
"""

import contextlib
import multiprocessing
import os
import signal
import sys
from collections.abc import Iterator
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from typing import TYPE_CHECKING

from fsdpbench.base.interruption import PARENT

if TYPE_CHECKING:
    from concurrent.futures import ProcessPoolExecutor

_PRELOAD = ["fsdpbench.launch.preload"]
_PRELOAD_REAL = [*_PRELOAD, "fsdpbench.engine.devices.real", "fsdpbench.launch.elastic"]
_PRELOAD_COMPILER = [*_PRELOAD, "fsdpbench.engine.devices.preload_compiler"]
_preload = _PRELOAD_REAL


def start(device: str | None, compiles: bool = False, *, now: bool = True) -> None:
    """Start the server, so that it imports torch while this process still parses its command line.

    `device`: the requested device. `compiles`: some simulated points use `torch.compile`. Other points run
    too, but import what the server lacks themselves. With `now` false, the first point starts the server.
    """
    global _preload
    simulated = _PRELOAD_COMPILER if compiles else _PRELOAD
    _preload = simulated if _is_simulated(device) else _PRELOAD_REAL
    if now:
        ensure()


def context() -> ForkServerContext:
    """Return the context to start processes from the server; use it after `ensure`, inside `plain_main`."""
    return multiprocessing.get_context("forkserver")


def ensure() -> int:
    """Start the server if it does not run; return its process id."""
    context().set_forkserver_preload(_preload)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT,))
    os.environ[PARENT] = str(os.getpid())
    try:
        with plain_main():
            forkserver.ensure_running()
    finally:
        os.environ.pop(PARENT, None)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return _pid()


@contextlib.contextmanager
def workers(processes: int) -> "Iterator[ProcessPoolExecutor]":
    """Yield a pool of `processes` workers forked by the server, for work on files; they end with this one."""
    from concurrent.futures import ProcessPoolExecutor

    from fsdpbench.reports.analysis.processes import end_with_the_caller

    ensure()
    with plain_main():
        with ProcessPoolExecutor(processes, context(), initializer=end_with_the_caller) as pool:
            yield pool


def kill() -> None:
    """Kill the server, and with it the processes that were forked from it and die with it."""
    if _pid():
        with contextlib.suppress(ProcessLookupError):
            os.kill(_pid(), signal.SIGKILL)


def _pid() -> int:
    return getattr(forkserver._forkserver, "_forkserver_pid", None) or 0


def _is_simulated(device: str | None) -> bool:
    if device in (None, "auto"):
        from fsdpbench.engine.devices.detection import has_gpu_driver

        return not has_gpu_driver()
    return device == "sim"


@contextlib.contextmanager
def plain_main() -> Iterator[None]:
    """Keep children of the fork server from importing the calling script again as their main module."""
    main = sys.modules["__main__"]
    saved: dict[str, object] = {n: main.__dict__[n] for n in ("__file__", "__spec__") if n in main.__dict__}
    main.__dict__.update(dict.fromkeys(saved))
    try:
        yield
    finally:
        main.__dict__.update(saved)
