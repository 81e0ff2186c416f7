"""The fork server that points start from: one process that has imported torch, and forks for each of them.

Light to import, so that a command starts the server first and imports its own modules beside it.
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
    """Let the server import torch while this process is still reading its command line.

    `device`: as asked for. `compiles`: simulated points that compile are to come. Others than those run too,
    and import themselves what the server lacks. Not `now`: the first point starts it.
    """
    global _preload
    simulated = _PRELOAD_COMPILER if compiles else _PRELOAD
    _preload = simulated if _is_simulated(device) else _PRELOAD_REAL
    if now:
        ensure()


def context() -> ForkServerContext:
    """Return the way to start processes from the server: after `ensure`, inside `plain_main`."""
    return multiprocessing.get_context("forkserver")


def ensure() -> int:
    """Start the server if it does not run; the number of its process."""
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
    """Give a pool of so many processes from the server, for work on files; they end with this one."""
    from concurrent.futures import ProcessPoolExecutor

    from fsdpbench.reports.analysis.processes import end_with_the_caller

    ensure()
    with plain_main():
        with ProcessPoolExecutor(processes, context(), initializer=end_with_the_caller) as pool:
            yield pool


def kill() -> None:
    """End the server immediately, and with it all that was started from it and follows it."""
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
    """Keep the fork server's children from importing the calling script again as their main module."""
    main = sys.modules["__main__"]
    saved: dict[str, object] = {n: main.__dict__[n] for n in ("__file__", "__spec__") if n in main.__dict__}
    main.__dict__.update(dict.fromkeys(saved))
    try:
        yield
    finally:
        main.__dict__.update(saved)
