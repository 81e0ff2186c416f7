"""Modules that the fork server also imports if simulated configurations will use `torch.compile`.

Importing the compiler takes longer than tracing a block. Hashing torch's sources, which the compiler's disk
cache needs, takes as long as training an eager configuration.
"""

import gc
import importlib
import logging

import torch

from fsdpbench.base.files.documents import table_beside
from fsdpbench.base.torch_internals import inductor_common, inductor_torch_key
from fsdpbench.sim.torch_device.compile.plan import of_compiler
from fsdpbench.sim.torch_device.patches.dynamo import use_real_dynamo

_NEEDED = ("fsdpbench.sim.torch_device.compile.front_end", "fsdpbench.sim.torch_device.compile.lowering")


def _import_all() -> None:
    use_real_dynamo()
    for name in _NEEDED:
        importlib.import_module(name)
    for name in table_beside(__file__, "imported_late.toml")["modules"].split():
        # These imports only save time. If this version of torch lacks a module, its user handles that.
        try:
            importlib.import_module(name)
        except ImportError:
            logging.getLogger(__name__).debug("torch has no %s", name)
    inductor_common.init_backend_registration()
    inductor_common.get_device_op_overrides("cuda")
    inductor_torch_key()
    torch.compiler.list_backends()  # caches its search of all installed packages
    of_compiler()


gc.disable()
_import_all()
gc.freeze()
gc.enable()
