"""Front end of `torch.compile` for the simulated device, installed at the first compilation."""

import functools
import importlib
import inspect
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fsdpbench.base.torch_internals import (
    ShortenTraceback,
    compiler_config,
    dynamo_always_compiled,
    functorch_config,
    patch,
    trace_rules,
)
from fsdpbench.sim.torch_device.compile import refusals
from fsdpbench.sim.torch_device.compile.plan import apart_from_the_run, check_code_on_disk, choose_folder
from fsdpbench.sim.torch_device.patches.dynamo import passing_to, use_real_dynamo
from fsdpbench.sim.torch_device.tensors import is_on_device, tensors_in

_LOWERING = "fsdpbench.sim.torch_device.compile.lowering"
_PRETENDED = "fsdpbench.sim.torch_device.compile.pretended"
"""Imported late because they import Inductor."""
_CUDA_GRAPHS = "triton.cudagraphs"


def compile_report() -> dict[str, object] | None:
    """Return the report of this process's compilations for the result, or None without any."""
    return refusals.REPORT.to_dict() if install.cache_info().currsize else None


@functools.cache
def install(around: Callable[[], AbstractContextManager[object]] = nullcontext) -> None:
    """Make Inductor compile graphs of simulated tensors into plans; called at the first compilation.

    `around`: a context manager to enter while the compiler is imported and whenever it runs.
    """
    with around():
        choose_folder()
        use_real_dynamo()
        importlib.import_module(_LOWERING)
        patch("exceeds_recompile_limit", passing_to(_noticing_limit))
        if "TORCH_LOGS" not in os.environ:
            # Dynamo uses it only for log lines and parses each file for it: a quarter of a warm trace.
            patch("dynamo_function_name", lambda original: _no_name)
        patch("compile_fx", functools.partial(_compile_by_device, around))
        importlib.import_module(_PRETENDED).install_random_numbers()
        check_code_on_disk()
        _hide_the_simulator()
        register_optimizer_step_pre_hook(_compile_whole_step)
        _lock_progress_within_process()


def lower_backwards_with_forwards() -> None:
    """Compile each backward together with its forward, for configurations of the bench.

    By default torch compiles a backward when it first runs, and only then caches the graph on disk. If a
    step ran out of memory in forward, every process would compile the graph again.
    """
    functorch_config.force_non_lazy_backward_lowering = True


def _as_it_is(refusal: refusals.CompileRefusedError) -> Exception:
    """Return the refusal as one of Dynamo's own errors, which it does not wrap, so users see its text."""
    shown = type("CompileRefusedError", (ShortenTraceback, refusals.CompileRefusedError), {})
    error: Exception = shown(str(refusal), first_useful_frame=None)
    return error


def _lock_progress_within_process() -> None:
    """Give the compiler's hidden progress bars a lock within the process.

    Their default system semaphore leaks if a process exits immediately, and Python would warn.
    """
    try:
        tqdm = importlib.import_module("tqdm").tqdm
    except ImportError:
        return
    if not hasattr(tqdm, "_lock"):
        tqdm.set_lock(threading.RLock())


def _hide_the_simulator() -> None:
    """Keep Dynamo out of the device's kernels, because a GPU's kernels are not Python frames.

    While compiled code runs, Dynamo inspects every frame, including those of an eager operator's kernel.
    """
    trace_rules.add("fsdpbench.sim")
    trace_rules.add("fsdpbench.base")


def _compile_whole_step(optimizer: Any, args: Any, kwargs: Any) -> None:
    """Make Dynamo compile a `step` whose code does not name torch: hooks around it break the graph."""
    if code := getattr(inspect.unwrap(type(optimizer).step), "__code__", None):
        dynamo_always_compiled[code] = True


def _no_name(filename: str, lineno: int) -> None:
    """Return no function name for a line."""


def _noticing_limit(original: Callable[..., Any], *args: Any) -> Any:
    """Report a frame that exceeds Dynamo's recompilation limit and runs eager, which Dynamo only logs."""
    found = original(*args)
    code = sys._getframe(2).f_locals.get("code")
    if found[0] and code is not None:
        refusals.REPORT.past_limit[refusals.place_of(code)] += 1
    return found


def _is_simulated(model: Any, inputs: Sequence[Any]) -> bool:
    """Return whether a graph takes tensors of the device (lists with compiled autograd) or creates any."""
    nodes = getattr(getattr(model, "graph", None), "nodes", ())
    return any(map(is_on_device, tensors_in(tuple(inputs), {}))) or any(
        is_on_device(value)
        for node in nodes
        if isinstance(value := node.meta.get("example_value"), torch.Tensor)
    )


@contextmanager
def _as_simulated(captures: bool = False) -> Iterator[None]:
    """Apply the settings for graphs of the device; work of the compiler itself stays out of the run."""
    lowering: Any = sys.modules[_LOWERING]
    with (
        apart_from_the_run(),
        lowering.inductor_config.patch(lowering.SETTINGS),  # otherwise it starts compile processes
        compiler_config.patch(cache_key_tag=lowering.cache_tag(captures)),
        # Otherwise CUDA's generators would keep their own state, and there are none; kernels do not change.
        functorch_config.patch(graphsafe_rng_functionalization=False),
    ):
        yield


def _compile_by_device(
    around: Callable[[], AbstractContextManager[object]], original: Callable[..., Any]
) -> Callable[..., Any]:
    """Return a `compile_fx` that handles graphs of the device and passes on others."""
    lowering: Any = sys.modules[_LOWERING]

    def lower(captures: bool, gm: Any, example_inputs: Sequence[Any], **about: Any) -> Any:
        with around(), _as_simulated(captures):  # backward may be lowered after `compile_fx` returns
            return lowering.lower(gm, example_inputs, captures=captures, **about)

    def compile_fx(model: Any, inputs: Sequence[Any], *args: Any, **options: Any) -> Any:
        if not _is_simulated(model, inputs) or args or "inner_compile" in options:
            return original(model, inputs, *args, **options)
        patches = dict(options.get("config_patches") or {})
        captures = bool(patches.get(_CUDA_GRAPHS, getattr(lowering.inductor_config, _CUDA_GRAPHS)))
        options["config_patches"] = {**patches, _CUDA_GRAPHS: False}  # torch's capture needs a GPU
        with around(), _as_simulated(captures):
            try:
                config = lowering.inductor_config  # settings for everything that it compiles
                of_all = {
                    name: getattr(config, name) for name in refusals.REFUSED_OPTIONS if hasattr(config, name)
                }
                refusals.refuse_options({**of_all, **patches})
                return original(model, inputs, inner_compile=functools.partial(lower, captures), **options)
            except Exception as error:
                refusal = refusals.refusal_behind(error)
                if refusal is None:
                    raise
                refusals.REPORT.refused[str(refusal)] += 1
                raise _as_it_is(refusal) from None

    return compile_fx
