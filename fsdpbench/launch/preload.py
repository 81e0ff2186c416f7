"""Imported once by the fork server: what every point needs, so that starting one costs a fork; how it ends.

Nothing here may start threads or touch a device; the children do that.

An interruption is for the server's parent, with which it ends; sent to a server that still imports, it would
print where, which is why it is started with interruptions held back. At the end nothing is taken down: that
would take a third of a second, for which the reader of the command's output waits: the server has it open
too.
"""

import atexit
import gc
import importlib
import os
import signal

from fsdpbench.base.files.documents import table_beside
from fsdpbench.base.interruption import die_with_named_parent


def _import_all() -> None:
    for name in table_beside(__file__, "preload.toml")["needed"]:
        importlib.import_module(name)
    import torch

    from fsdpbench.base.torch_internals import functorch_config  # noqa: F401
    from fsdpbench.engine.devices.sim import preload
    from fsdpbench.engine.results.provenance import versions
    from fsdpbench.engine.results.residuals.intervals import read_ahead

    torch.set_num_threads(1)
    with torch.device("cpu"):  # torch imports what this needs at its first use
        pass
    preload()
    # Files that every result needs, of which the answers are kept.
    versions()
    read_ahead()


signal.signal(signal.SIGINT, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT,))
die_with_named_parent()
atexit.register(os._exit, 0)
# Modules stay, so that looking for garbage among them is in vain, and takes longer than many imports; frozen,
# they are looked at by no child either.
gc.disable()
_import_all()
gc.freeze()
gc.enable()
