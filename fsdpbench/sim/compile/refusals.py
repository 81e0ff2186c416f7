"""What `torch.compile` cannot do on the simulated device, said by name."""

from __future__ import annotations

from typing import Any

from fsdpbench.sim.accelerator import ACCELERATOR

_EAGER = "leave it out of the compiled part (torch.compiler.disable), or simulate the eager program"


class CompileRefusedError(NotImplementedError):
    """Something of a compiled program has no counterpart on the simulated device."""


def refused(what: str, way_out: str = _EAGER) -> CompileRefusedError:
    """The error that names it, and the remedy."""
    return CompileRefusedError(f"torch.compile on simulated GPUs: {what} is not simulated; {way_out}")


def refuse_options(options: dict[str, Any]) -> None:
    """Raise `CompileRefusedError` for settings of Inductor's (by its names) that have no counterpart."""
    if options.get("max_autotune") or options.get("max_autotune_gemm"):
        raise refused(
            'templates that are timed on the GPU (mode="max-autotune", "max-autotune-no-cudagraphs")',
            'use mode="default" or "reduce-overhead": products then come from the library, as eager ones do',
        )
    for name in ("cpp_wrapper", "fx_wrapper", "freezing"):
        if options.get(name):
            raise refused(f"Inductor's {name}", "leave that option out")


def refuse_mode(options: dict[str, Any]) -> None:
    """Raise `CompileRefusedError` for arguments of `torch.compile` that have no counterpart."""
    if ACCELERATOR.sanitizer is not None:
        # Dynamo compiles nothing while somebody sees every operator, and says nothing of it.
        raise refused("under --sanitize, which follows eager programs, a compiled part", _EAGER)
    autotunes = str(options.get("mode")).startswith("max-autotune")
    refuse_options({**(options.get("options") or {}), **({"max_autotune": True} if autotunes else {})})
    if options.get("backend") == "cudagraphs":
        raise refused('backend="cudagraphs"', 'use the default backend with mode="reduce-overhead"')
