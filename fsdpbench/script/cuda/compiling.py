"""`torch.compile` in a script: torch's own; its graphs become plans (`fsdpbench/sim/torch_device/compile`).

If torch's settings switch it off, the eager program is simulated and the result says so.
"""

import functools
import inspect
import os
import pkgutil
import sys
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch

import fsdpbench.script
from fsdpbench.base.errors import error_text
from fsdpbench.base.torch_internals import dynamo_torch_variables, find, replace, trace_rules
from fsdpbench.script.cuda.device_names import TAKES_DEVICE, own_device
from fsdpbench.script.cuda.refusals import Replacements
from fsdpbench.script.triton_kernels import without_stand_in
from fsdpbench.sim.torch_device.accelerator import Accelerator
from fsdpbench.sim.torch_device.patches.dynamo import passing_to

_DISABLING = ("TORCHDYNAMO_DISABLE", "TORCH_COMPILE_DISABLE")


class _Requests:
    """The calls of `torch.compile` in this process."""

    left_out = 0
    made = 0
    without_kernels: ClassVar[set[str]] = set()
    """Requested backends other than Inductor."""
    leave_alone: Callable[[str], None] | None = None


def leave_cache_alone(leave_alone: Callable[[str], None]) -> None:
    """Call `leave_alone` with the folder of the compiler's cache before its use: plans hold no tensors."""
    _Requests.leave_alone = leave_alone


def map_compile(replacements: Replacements, accelerator: Accelerator) -> None:
    """Record what a script compiles."""
    replacements.add(torch.compile, _noticing(accelerator, torch.compile))


def wants_compiled() -> bool:
    """Return whether the script asked for anything to be compiled."""
    return _Requests.made > 0


def compile_notes(compilation: Mapping[str, Any]) -> list[str]:
    """Return remarks about `torch.compile` in this run; `compilation`: the device's record, maybe empty."""
    graphs = compilation.get("graphs", 0)
    notes = []
    if _Requests.left_out:
        notes.append("torch.compile is switched off in this run: the eager program was simulated")
    if _Requests.without_kernels:
        named = ", ".join(sorted(_Requests.without_kernels))
        notes.append(error_text("compiling.other_backend", named))
    elif wants_compiled() and not graphs:
        notes.append(error_text("compiling.no_graph"))
    if compilation.get("untuned"):
        notes.append(error_text("compiling.max_autotune"))
    notes += [error_text("compiling.gave_up", place) for place in compilation.get("past_recompile_limit", ())]
    refused = compilation.get("refused", ())
    return notes + [f"{reason}: the eager program was simulated there" for reason in refused]


def _is_switched_off() -> bool:
    """Return whether torch itself would run the eager program despite a request to compile."""
    if "1" in (os.environ.get(name) for name in _DISABLING):
        return True
    return bool(find("dynamo").config.disable) or find("dynamo_stance").stance == "force_eager"


def _noticing(accelerator: Accelerator, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def compile(model: Any = None, **options: Any) -> Any:
        if model is None:
            return lambda decorated: compile(decorated, **options)
        if options.get("disable"):
            return original(model, **options)
        if isinstance(model, torch.nn.Module):
            return model if _leaves_out() else _compiled(model, options)
        made: list[Any] = []

        @functools.wraps(model)
        def decided_when_called(*args: Any, **kwargs: Any) -> Any:
            if _leaves_out():
                return model(*args, **kwargs)
            if not made:
                made.append(_compiled(model, options))
            return made[0](*args, **kwargs)

        return decided_when_called

    def _compiled(model: Any, options: dict[str, Any]) -> Any:
        from fsdpbench.sim.torch_device.compile.front_end import install
        from fsdpbench.sim.torch_device.compile.refusals import refuse_mode, without_tuning

        refuse_mode(options, sanitized=accelerator.sanitizer is not None)
        options = dict(without_tuning(options))
        install(without_stand_in)
        show_to_dynamo()
        if not _Requests.made and _Requests.leave_alone is not None:
            _Requests.leave_alone(find("inductor_cache_dir")())
        _Requests.made += 1
        backend = options.get("backend", "inductor")
        if backend != "inductor":
            name = str(getattr(backend, "__name__", type(backend).__name__))
            _Requests.without_kernels.add(repr(backend) if isinstance(backend, str) else name)
        return original(model, **options)

    return compile


def _leaves_out() -> bool:
    if not _is_switched_off():
        return False
    _Requests.left_out += 1
    return True


__all__ = ["compile_notes", "leave_cache_alone", "map_compile", "wants_compiled"]


_PLACES = (torch, torch.cuda, torch.distributed)


@functools.cache
def show_to_dynamo() -> None:
    """Make Dynamo treat our replacements like the functions that they replace.

    Dynamo recognizes torch's functions by identity, and puts them into its graphs. It would treat our
    wrappers as Python functions: trace into them, break the graph there, and compile their frames. Called
    once, after everything is replaced and before anything is compiled.
    """
    for module in pkgutil.iter_modules(fsdpbench.script.__path__):
        if module.name != "triton_kernels":  # launches stay in the graph
            trace_rules.add(f"fsdpbench.script.{module.name}")
    trace_rules.clear_lru_cache()  # its table is made by names, which now mean our replacements
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
    replace(variable, call_function=passing_to(_calling_torchs_own)(variable.call_function))


def _stand_ins(functions: list[Any]) -> list[Any]:
    """Return our replacements for these functions of torch."""
    found = []
    for function in functions:
        for place in (sys.modules.get(getattr(function, "__module__", None) or ""), *_PLACES):
            stands = getattr(place, getattr(function, "__name__", ""), None)
            if stands is not None and stands is not function:  # a wrapper has the name of torch's module
                found.append(stands)
    return found


def _calling_torchs_own(
    original: Callable[..., Any], self: Any, tx: Any, args: Any, kwargs: Mapping[str, Any]
) -> Any:
    """Replace `TorchInGraphFunctionVariable.call_function`: for a wrapper that resolves devices, call torch's
    function with the resolved device."""
    if not getattr(self.value, TAKES_DEVICE, False):
        return original(self, tx, args, kwargs)
    given = {name: value for name, value in kwargs.items() if name != "pin_memory"}
    if "device" in given:
        device = given["device"].realize()
        if device.is_python_constant() and device.as_python_constant() is not None:
            meant = own_device(device.as_python_constant())
            given["device"] = dynamo_torch_variables.VariableTracker.build(tx, meant)
    return original(type(self)(inspect.unwrap(self.value)), tx, args, given)
