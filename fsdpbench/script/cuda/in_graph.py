"""What replaces torch's functions in a script is, to Dynamo, what it replaces.

Dynamo knows torch's functions by identity, and puts them into its graphs. A wrapper of ours would be a
function of Python's to it: it would trace into it, break the graph there, and compile the wrapper's frames.

    torch.arange(n, device="cuda")    in the program: our wrapper
          │ Dynamo
          ▼
    torch.arange(n, device=sim:0)     in the graph: torch's own
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch

from fsdpbench.script.cuda.device_names import TAKES_DEVICE, own_device
from fsdpbench.torch_internals import dynamo_torch_variables, replace, trace_rules

_PLACES = (torch, torch.cuda, torch.distributed)


@functools.cache
def show_to_dynamo() -> None:
    """To be called once, when all is replaced and before anything is compiled."""
    trace_rules.add("fsdpbench.script")
    trace_rules.clear_lru_cache()  # its table is made by names: now it has what stands there
    table = trace_rules.get_torch_obj_rule_map()
    for function, rule in list(table.items()):
        if not isinstance(function, str):
            table.setdefault(inspect.unwrap(function), rule)
    variable: Any = dynamo_torch_variables.TorchInGraphFunctionVariable
    handlers = variable._get_handlers()
    for function, handler in list(handlers.items()):
        handlers.setdefault(inspect.unwrap(function), handler)
    for folded in (
        dynamo_torch_variables.constant_fold_functions,
        dynamo_torch_variables.constant_fold_functions_need_guards,
    ):
        folded.update(dict.fromkeys(_stand_ins(list(folded))))
    replace(variable, call_function=_calling_torchs_own(variable.call_function))


def _stand_ins(functions: list[Any]) -> list[Any]:
    """What stands where these functions of torch were."""
    found = []
    for function in functions:
        for place in (sys.modules.get(getattr(function, "__module__", None) or ""), *_PLACES):
            stands = getattr(place, getattr(function, "__name__", ""), None)
            if stands is not None and getattr(stands, "__module__", "").startswith("fsdpbench."):
                found.append(stands)
    return found


def _calling_torchs_own(original: Callable[..., Any]) -> Callable[..., Any]:
    """`TorchInGraphFunctionVariable.call_function`, for a wrapper that resolves devices: the function in it,
    with the device that is meant."""

    @functools.wraps(original)
    def call_function(self: Any, tx: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if not getattr(self.value, TAKES_DEVICE, False):
            return original(self, tx, args, kwargs)
        given = {name: value for name, value in kwargs.items() if name != "pin_memory"}
        if "device" in given:
            device = given["device"].realize()
            if device.is_python_constant() and device.as_python_constant() is not None:
                meant = own_device(device.as_python_constant())
                given["device"] = dynamo_torch_variables.VariableTracker.build(tx, meant)
        return original(type(self)(inspect.unwrap(self.value)), tx, args, given)

    return call_function
