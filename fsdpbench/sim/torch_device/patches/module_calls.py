"""A module call and its hooks cost CPU time.

Dynamo, where something is compiled, decides by a function's file and name what to do with it: it traces
torch's `nn.Module.__call__`, and starts no graph at it. So that its decisions stay the same, what takes that
place says that it is of the same file and name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fsdpbench.sim.torch_device.accelerator import ACCELERATOR
from fsdpbench.torch_internals import replace


def install_module_calls() -> None:
    """Replace `nn.Module.__call__`."""
    module_type = torch.nn.Module
    original: Callable[..., Any] = module_type.__call__
    accelerator = ACCELERATOR
    compiles = torch.compiler.is_compiling

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if compiles():  # Dynamo takes this for True, and sees nothing of the rest
            return original(self, *args, **kwargs)
        costs = accelerator.cpu_costs
        if costs is not None:
            hooks = len(self._forward_pre_hooks) + len(self._forward_hooks) + len(self._backward_hooks)
            accelerator.timeline.cpu += costs.module_call_ns + hooks * costs.hook_ns
        return original(self, *args, **kwargs)

    code = original.__code__
    call.__code__ = call.__code__.replace(co_filename=code.co_filename, co_name=code.co_name)
    call.__name__ = original.__name__
    replace(module_type, __call__=call)
