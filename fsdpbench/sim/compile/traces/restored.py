"""A kept trace in the shape of one that Dynamo has just made, for what it does with it from there on."""

from __future__ import annotations

import marshal
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from fsdpbench.sim.compile.traces.entry import Entry
from fsdpbench.torch_internals import dynamo_guards, dynamo_output_graph


class _Graph(dynamo_output_graph.OutputGraphCommon):
    """What is asked of the graph after a trace: counts for logs, and what is to be cleaned up."""

    root_tx = None

    def __init__(self, state: Any, entry: Entry) -> None:
        super().__init__(state, entry.modules)
        self.cleanups: list[Any] = []
        self.graph = SimpleNamespace(nodes=range(entry.calls + entry.inputs + 1))
        self.placeholders = range(entry.inputs)
        self.non_compliant_ops: set[Any] = set()
        self.compliant_custom_ops: set[Any] = set()
        self.tracing_context = SimpleNamespace(guards_context=SimpleNamespace(dynamo_guards=set()))
        self._calls = entry.calls

    def count_calls(self) -> int:
        return self._calls

    def is_empty_graph(self) -> bool:
        return False

    def has_outputs(self) -> bool:
        return True

    def get_graph_sizes_structured(self) -> dict[str, Any]:
        return {}

    def get_replayed_side_effect_source_refs(self) -> list[Any]:
        return []


class Restored:
    """In the place of Dynamo's own `DynamoOutput`."""

    last_attempt_start_time = None

    def __init__(self, entry: Entry, manager: Any) -> None:
        self.bytecode = marshal.loads(entry.bytecode)
        self.pycode: list[Any] = []
        self._graph = _Graph(manager.state, entry)
        self._manager = manager
        self.tracer_output = SimpleNamespace(
            output_graph=self._graph, output_graph_for_cleanup=None, error_on_graph_break=False
        )

    def build_guards(self, code: Any, hooks: Any = None, save: bool = False, **about: Any) -> Any:
        """Those that were compared, unless whoever compiles filters them or is told of failures."""
        asked: list[Callable[..., Any] | None] = [
            getattr(hooks, name, None) for name in ("guard_fail_fn", "guard_filter_fn")
        ]
        if not any(asked):
            return self._manager
        return dynamo_guards.CheckFunctionManager(code, self._graph, about.get("cache_entries"), *asked)
