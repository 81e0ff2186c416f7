"""Refusals of constructs that `torch.compile` cannot handle on the simulated device; the compile report."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from fsdpbench.base.torch_internals import dynamo_utils
from fsdpbench.sim.torch_device.strict.words import error_text

_EAGER = "leave it out of the compiled part (torch.compiler.disable), or simulate the eager program"


class CompileRefusedError(NotImplementedError):
    """A compiled program uses a construct that the simulated device does not support."""


def refused(what: str, way_out: str = _EAGER) -> CompileRefusedError:
    """Return an error that names the construct and what to do instead."""
    return CompileRefusedError(f"torch.compile on simulated GPUs: {what} is not simulated; {way_out}")


_CONTROL_FLOW = ("cond", "while_loop", "scan", "associative_scan", "map_impl", "switch")
_TORCH = str(Path(torch.__file__).parent)
_TRITON = "triton_kernel_wrapper"


def refuse_graph(graph: torch.fx.Graph) -> None:
    """Raise `CompileRefusedError`, with the program's line, for nodes that cannot be simulated."""
    for node in graph.nodes:
        name = getattr(node.target, "__name__", "") if node.op == "call_function" else ""
        if name == "invoke_subgraph":
            raise refused(
                f"a region that is compiled once (torch.compiler.nested_compile_region){_place(node)}",
                "call the function as it is: graphs that are alike are lowered once here",
            )
        if name in _CONTROL_FLOW:
            raise refused(
                f"control flow in the graph (torch's {name}{_place(node)})", error_text("refusals.rounds")
            )
        if name.startswith(_TRITON):
            raise refused(
                f"a Triton kernel of the program's own{_place(node)}", error_text("refusals.operator")
            )


def _place(node: torch.fx.Node) -> str:
    """Return the program's line for a node, or a line in torch if no other is known."""
    frames = [
        line.strip() for line in (node.stack_trace or "").splitlines() if line.lstrip().startswith("File")
    ]
    frames = [line for line in frames if _TORCH not in line] or frames
    return f", {frames[-1]}" if frames else ""


def refusal_behind(error: BaseException | None) -> CompileRefusedError | None:
    """Return the refusal that the compiler has wrapped into its own errors, if any."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, CompileRefusedError):
            return error
        seen.add(id(error))
        error = getattr(error, "inner_exception", None) or error.__cause__ or error.__context__
    return None


REFUSED_OPTIONS = ("cpp_wrapper", "fx_wrapper", "freezing")
"""Inductor's settings by name; a program may also set them globally."""
_TUNED = ("max_autotune", "max_autotune_gemm")


def refuse_options(options: Mapping[str, object]) -> None:
    """Raise `CompileRefusedError` for Inductor settings that cannot be simulated."""
    for name in REFUSED_OPTIONS:
        if options.get(name):
            raise refused(f"Inductor's {name}", "leave that option out")


def without_tuning(options: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the arguments of `torch.compile` without autotuning on the GPU, and count removals."""
    mode, of_inductor = str(options.get("mode") or ""), dict(options.get("options") or {})
    if mode.startswith("max-autotune"):
        REPORT.untuned += 1
        return {**options, "mode": "default" if mode.endswith("no-cudagraphs") else "reduce-overhead"}
    if any(of_inductor.pop(name, False) for name in _TUNED):
        REPORT.untuned += 1
        return {**options, "options": of_inductor}
    return options


def refuse_mode(options: dict[str, Any], *, sanitized: bool = False) -> None:
    """Raise `CompileRefusedError` for unsupported arguments of `torch.compile`, or if `sanitized`."""
    if sanitized:
        # Dynamo silently compiles nothing while a dispatch mode is active.
        raise refused("under --sanitize, which follows eager programs, a compiled part", _EAGER)
    refuse_options(dict(options.get("options") or {}))
    if options.get("backend") == "cudagraphs":
        raise refused('backend="cudagraphs"', 'use the default backend with mode="reduce-overhead"')


@dataclass
class CompileReport:
    """Counts of this process's compilations. `plans`: the `Plan` of each graph, lowered or cached."""

    plans: list[Any] = field(default_factory=list)
    calls: int = 0
    untuned: int = 0
    """Calls of `torch.compile` that requested autotuning on the GPU."""

    refused: Counter[str] = field(default_factory=Counter)
    """Refusals after which the program continued (for example with `suppress_errors`)."""

    past_limit: Counter[str] = field(default_factory=Counter)
    """Calls by place that ran eager because Dynamo had reached its recompilation limit."""

    def to_dict(self) -> dict[str, object]:
        """Return the report for the result. `kernels` and `kernel_bytes` count one call of each graph."""
        fallbacks = Counter(name for plan in self.plans for name in plan.fallbacks)
        return {
            "graphs": len(self.plans),
            "kernels": sum(len(plan.launches) for plan in self.plans),
            "kernel_bytes": sum(launch.nbytes for plan in self.plans for launch in plan.launches),
            "fallbacks": dict(sorted(fallbacks.items())),
            **({"untuned": self.untuned} if self.untuned else {}),
            **({"refused": dict(self.refused)} if self.refused else {}),
            **({"past_recompile_limit": dict(self.past_limit)} if self.past_limit else {}),
            **self._cuda_graphs(),
            **of_dynamo(),
        }

    def _cuda_graphs(self) -> dict[str, dict[str, object]]:
        """Return captures, replays, calls past the limit and reasons not to capture; empty without any."""
        captured = [plan.captured for plan in self.plans if plan.captured is not None]
        skipped = Counter(plan.not_captured for plan in self.plans if plan.not_captured)
        if not captured and not skipped:
            return {}
        return {
            "cuda_graphs": {
                "captures": sum(graph.captures for graph in captured),
                "replays": sum(graph.replays for graph in captured),
                "calls_past_the_limit": sum(graph.left_out for graph in captured),
                "not_captured": dict(sorted(skipped.items())),
            }
        }


def place_of(code: Any) -> str:
    """Return `forward (train.py:7)` for a code object, or an object with the same attributes."""
    return f"{code.co_name} ({code.co_filename}:{code.co_firstlineno})"


def of_dynamo() -> dict[str, object]:
    """Return Dynamo's counts on all devices: graphs traced, breaks by reason, recompilations by place."""
    breaks = {str(reason).splitlines()[0]: n for reason, n in dynamo_utils.counters["graph_break"].items()}
    again: Counter[str] = Counter()
    for each in dynamo_utils.get_compilation_metrics():
        name = str(getattr(each, "compile_id", "") or "")
        if each.co_name and "/" in name and not name.rpartition("/")[2].startswith("0"):
            again[place_of(each)] += 1
    return {
        "traced": int(dynamo_utils.counters["stats"]["unique_graphs"]),
        "graph_breaks": dict(sorted(breaks.items())),
        "recompilations": dict(sorted(again.items())),
    }


REPORT = CompileReport()
