"""What is kept of one trace."""

from __future__ import annotations

import copy
import importlib
import marshal
import sys
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from fsdpbench.sim.compile.traces.frame import Frame
from fsdpbench.sim.compile.traces.guards import Guards, built, check_hooks, words_of
from fsdpbench.sim.compile.traces.meaning import Meanings, NotKeptError, digest, of_code
from fsdpbench.sim.compile.traces.sizes_seen import SizesSeen
from fsdpbench.torch_internals import dynamo_output_graph


@dataclass(frozen=True)
class Entry:
    """``words``: a digest of what its guards say. ``bytecode``: of the new frame, marshalled. ``modules``:
    by the names that it has for them. ``traced``: code that no guard tells, by where it is. ``graph``: the
    compiled graph's name, ``graph_key``: where AOTAutograd keeps it. ``counts``: what Dynamo counted of it.
    """

    guards: Guards
    words: str
    bytecode: bytes
    modules: dict[str, str]
    traced: tuple[tuple[str, str, str], ...]
    graph: str
    graph_key: str
    calls: int
    inputs: int
    counts: dict[str, int]
    sizes_seen: SizesSeen

    @classmethod
    def of(
        cls, frame: Frame, made: Any, graph_key: str, counts: dict[str, int], sizes_seen: SizesSeen
    ) -> Entry:
        """Of what Dynamo has made of a frame. Raises NotKeptError, and whatever torch does."""
        graph = made.tracer_output.output_graph
        _refuse(made)
        check_hooks(frame.f_locals.values(), frame.code)
        guards, meanings = Guards.of(graph), Meanings()
        words = _words(guards, frame, meanings)[1]
        installed = set(graph.installed_globals) - {guards.builtins_name}
        if len(installed) != 1:
            raise NotKeptError("it needs other objects than a graph")
        return cls(
            guards,
            words,
            marshal.dumps(made.bytecode),
            dict(graph.import_sources),
            _untold(graph.tracing_context.traced_code, meanings),
            installed.pop(),
            graph_key,
            graph.count_calls(),
            len(graph.placeholders),
            counts,
            sizes_seen,
        )

    def guards_for(self, frame: Frame) -> Any:
        """The guards, if they say now what they said then. Raises NotKeptError, and whatever torch does."""
        check_hooks(frame.f_locals.values(), frame.code)
        for module, name, expected in self.traced:
            if _digest_at(module, name) != expected:
                raise NotKeptError(f"{module}.{name} is another one now")
        for name, module in self.modules.items():
            frame.f_globals[name] = importlib.import_module(module)
        self._provide_builtins(frame.f_globals)
        manager, words = _words(self.guards, frame, Meanings())
        if words != self.words:
            raise NotKeptError("its guards say something else")
        return manager

    def _provide_builtins(self, f_globals: dict[str, Any]) -> None:
        name = self.guards.builtins_name
        if name is None or name in f_globals:
            return
        f_globals[name] = dynamo_output_graph.get_builtins_dict(f_globals)
        number = int(name.rpartition("_")[2])
        while int(dynamo_output_graph.unique_id("").rpartition("_")[2]) < number:
            pass  # else a trace to come would take the name for its own


def _words(guards: Guards, frame: Frame, meanings: Meanings) -> tuple[Any, str]:
    manager = built(guards, frame.code, frame.f_locals, frame.f_globals)
    return manager, digest(words_of(manager, meanings).encode())


def _refuse(made: Any) -> None:
    """Raises NotKeptError for what is more than one graph and its guards."""
    traced, graph = made.tracer_output, made.tracer_output.output_graph
    if traced.error_on_graph_break or graph.is_empty_graph() or graph.get_replayed_side_effect_source_refs():
        raise NotKeptError("it is more than one graph, or less")
    if made.last_attempt_start_time is not None:
        raise NotKeptError("it was traced again")
    for node in graph.graph.nodes:
        if node.op == "call_module" or (node.op == "call_function" and not _is_of_torch(node.target)):
            raise NotKeptError(f"its graph calls {node.target}")


def _is_of_torch(target: Any) -> bool:
    package = (getattr(target, "__module__", None) or "torch").partition(".")[0]
    namespace = getattr(target, "namespace", "aten")
    return package in ("torch", "_operator", "builtins", "math") and namespace in (
        "aten",
        "prims",
        "higher_order",
    )


def _untold(codes: Any, meanings: Meanings) -> tuple[tuple[str, str, str], ...]:
    """Of the code that was traced, what no guard tells: where it is found again. Raises NotKeptError."""
    found = set()
    for code in set(codes):
        kept = of_code(code)
        if kept in meanings.codes:
            continue
        module = next((name for name, each in _modules().items() if each == code.co_filename), "")
        if _digest_at(module, code.co_qualname) != kept:
            raise NotKeptError(f"{code.co_qualname} is nowhere")
        found.add((module, code.co_qualname, kept))
    return tuple(sorted(found))


def _modules() -> Mapping[str, str]:
    return {name: getattr(each, "__file__", None) or "" for name, each in list(sys.modules.items())}


def _digest_at(module: str, qualname: str) -> str:
    found: Any = sys.modules.get(module)
    for part in qualname.split("."):
        found = getattr(found, part, None)
    code = getattr(found, "__code__", None)
    return of_code(code) if isinstance(code, types.CodeType) else ""


def counting(counters: Mapping[str, int]) -> Callable[[], dict[str, int]]:
    """How much has been counted since now."""
    before = copy.copy(dict(counters))
    return lambda: {name: n - before.get(name, 0) for name, n in counters.items() if n != before.get(name, 0)}
