"""What was compiled in this process: for the result, and for people who wonder why a step is not shorter."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from fsdpbench.torch_internals import dynamo_utils


class Launched(Protocol):
    """A launch of a plan."""

    @property
    def nbytes(self) -> int: ...


class Captured(Protocol):
    """A graph that is captured as a CUDA graph."""

    captures: int
    replays: int
    left_out: int


class Planned(Protocol):
    """The plan of a graph."""

    @property
    def launches(self) -> Sequence[Launched]: ...
    @property
    def fallbacks(self) -> Sequence[str]: ...
    @property
    def captured(self) -> Captured | None: ...
    @property
    def not_captured(self) -> str: ...


@dataclass
class CompileReport:
    """Counts of this process."""

    plans: list[Planned] = field(default_factory=list)
    calls: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    """What could not be compiled here, and the program continues all the same (`suppress_errors`, say)."""

    past_limit: Counter[str] = field(default_factory=Counter)
    """Calls by their place that ran eager, since Dynamo had compiled the function too often."""

    def add_plan(self, plan: Planned) -> None:
        """A graph was lowered, or found lowered."""
        self.plans.append(plan)

    def to_dict(self) -> dict[str, Any]:
        """For the result. ``kernels`` and ``bytes`` are those of one call of each graph."""
        fallbacks = Counter(name for plan in self.plans for name in plan.fallbacks)
        return {
            "graphs": len(self.plans),
            "kernels": sum(len(plan.launches) for plan in self.plans),
            "kernel_bytes": sum(launch.nbytes for plan in self.plans for launch in plan.launches),
            "fallbacks": dict(sorted(fallbacks.items())),
            **({"refused": dict(self.refused)} if self.refused else {}),
            **({"past_recompile_limit": dict(self.past_limit)} if self.past_limit else {}),
            **self._cuda_graphs(),
            **of_dynamo(),
        }

    def _cuda_graphs(self) -> dict[str, Any]:
        """Captures and replays, calls of graphs that were captured too often, and why others were not;
        nothing where no CUDA graph was asked for."""
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
    """`forward (train.py:7)` of a code object, or of what has the same names."""
    return f"{code.co_name} ({code.co_filename}:{code.co_firstlineno})"


def of_dynamo() -> dict[str, Any]:
    """As Dynamo tells them, on any device: graphs that it traced, breaks by their reason, recompilations by
    their place."""
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
