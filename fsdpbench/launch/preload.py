"""Modules that the fork server imports once, so that starting a configuration costs only a fork.

Nothing here may start threads or touch a device; the children do that.

The server ignores interruptions and ends with its parent. It is started with them blocked, because one that
arrives during imports would print a traceback. At exit nothing is torn down: that would take a third of a
second, during which the reader of the command's output waits, because the server holds that stream open.
"""

import atexit
import gc
import importlib
import os
import signal

from fsdpbench.base.files.documents import table_beside
from fsdpbench.base.interruption import PARENT, die_with_named_parent


def _import_all() -> None:
    for name in table_beside(__file__, "preload.toml")["needed"]:
        importlib.import_module(name)
    import torch

    from fsdpbench.base.torch_internals import functorch_config  # noqa: F401
    from fsdpbench.engine.devices.sim import preload
    from fsdpbench.engine.results.provenance import versions
    from fsdpbench.engine.results.residuals.intervals import read_ahead

    torch.set_num_threads(1)
    with torch.device("cpu"):  # triggers imports that torch delays until its first use
        pass
    preload()
    # Read and cache files that every result needs.
    versions()
    read_ahead()


if PARENT in os.environ:  # the server; a Slurm job imports this too, and ends with its own exit code
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT,))
    die_with_named_parent()
    atexit.register(os._exit, 0)
# Imported modules stay alive, so collecting garbage among them is useless and takes longer than many imports.
# Frozen, they are not scanned by children either.
gc.disable()
_import_all()
gc.freeze()
gc.enable()
