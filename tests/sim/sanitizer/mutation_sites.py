"""The places of a source that order work or keep memory alive, and each of them taken out.

    stream.wait_event(event)        ->  _removed("wait", stream, event)
    event = stream.record_event()   ->  event = _removed("event", stream)    an event that was never recorded
    tensor.record_stream(stream)    ->  _removed("record_stream", tensor, stream)
    Held(tensor, event)             ->  Held(_removed("None", tensor), event)

Receivers and arguments are evaluated as before, so that nothing else changes and each function keeps its free
variables. `_removed` counts how often it is called.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

REMOVED = "_removed"
WATCHED = "_watched"


class Mutation(StrEnum):
    """What is taken out."""

    WAIT = "wait"
    RECORD = "record"
    RECORD_STREAM = "record_stream"
    HOLD = "hold"


_WAITS = frozenset(
    {
        "wait", "wait_event", "wait_stream", "synchronize", "follow", "let_gathers_wait", "await_host_read",
        "shards_may_change", "_wait_all_gather_streams_on_event", "_wait_for_post_backward",
        "_wait_for_computation_stream", "_wait_unshard_streams_on_current_stream",
    }
)  # fmt: skip
_RECORDS = frozenset({"record", "record_event"})
_RECORD_STREAMS = frozenset({"record_stream", "_no_dispatch_record_stream", "keep"})
_HOLDS = {
    # By what the reference is given to: which argument is the reference, and what stands for it.
    "AllGatherState": (0, "None"),
    "ReduceScatterState": (0, "None"),
    "AllReduceState": (0, "None"),
    "self._gradients.append": (0, "[]"),
    "self._outputs.append": (0, "None"),
    "self._read.append": (0, "None"),
    "self.held.append": (0, "free"),
}
_ASSIGNED = {
    # References and events that wait for their time: by attribute, what stands for them.
    "host_reads": "event",
    "all_gather_state": "None",
    "_all_reduce_state": "None",
    "_last_post_reduce_events": "event",
}
# What only sounds alike (ranks' store, a copy that is kept), and a call whose one wait is a site itself.
_OTHERS = frozenset({"store.wait", "self.gather.keep", "self._limiter.wait"})


@dataclass(frozen=True)
class Site:
    """One place. ``text``: the call as it is written; ``number``: which of equal calls in its function."""

    file: str
    function: str
    line: int
    column: int
    mutation: Mutation
    text: str
    number: int

    @property
    def key(self) -> str:
        """What stays when lines are added above."""
        return f"{self.file} {self.function}: {self.text}" + (f" #{self.number}" if self.number > 1 else "")


def sites_of(path: Path, name: str) -> list[Site]:
    """All places of a file; ``name`` is how it is called in tables."""
    finder = _Finder(name)
    finder.visit(ast.parse(path.read_text(encoding="utf-8")))
    return finder.found


def mutated(path: Path, site: Site) -> ast.Module:
    """The file's syntax tree without what the site does."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    remover = _Remover(site)
    tree = ast.fix_missing_locations(remover.visit(tree))
    if not remover.done:
        raise ValueError(f"{site.file}:{site.line}: no {site.text}")
    return tree


def watched(path: Path, sites: Sequence[tuple[int, Site]]) -> ast.Module:
    """The file's syntax tree where each site's call tells its number when it is done."""
    return ast.fix_missing_locations(_Watcher(sites).visit(ast.parse(path.read_text(encoding="utf-8"))))


def _mutation_of(call: ast.Call) -> Mutation | None:
    name = _name(call.func)
    full = ast.unparse(call.func)
    if full in _OTHERS:
        return None
    if name in _HOLDS or (full in _HOLDS and isinstance(call.args[0], ast.Tuple)):
        return Mutation.HOLD
    if isinstance(call.func, ast.Attribute) or name.startswith("_"):
        if name in _WAITS:
            return Mutation.WAIT
        if name in _RECORDS:
            return Mutation.RECORD
        if name in _RECORD_STREAMS:
            return Mutation.RECORD_STREAM
    return None


def _stand_in(node: ast.Assign) -> str | None:
    """What stands for a value that is held, None where the assignment holds nothing."""
    target = node.targets[0]
    if isinstance(target, ast.Subscript):
        target = target.value
        if isinstance(node.value, ast.Call):
            return None  # a record, which is a site itself
    if not isinstance(target, ast.Attribute) or isinstance(node.value, (ast.Constant, ast.Dict)):
        return None
    is_new = isinstance(node.value, ast.Call) and _name(node.value.func) == "dict"
    return None if is_new else _ASSIGNED.get(target.attr)


def _name(function: ast.expr) -> str:
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


class _Finder(ast.NodeVisitor):
    def __init__(self, file: str) -> None:
        self._file = file
        self._scopes: list[str] = []
        self._seen: Counter[tuple[str, str]] = Counter()
        self.found: list[Site] = []

    def generic_visit(self, node: ast.AST) -> None:
        is_scope = isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
        if is_scope:
            self._scopes.append(node.name)
        super().generic_visit(node)
        if is_scope:
            self._scopes.pop()

    def visit_Call(self, node: ast.Call) -> None:
        mutation = _mutation_of(node)
        if mutation is not None:
            self._add(node, mutation)
        self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> None:
        if _stand_in(node) is not None:
            self._add(node, Mutation.HOLD)
        self.generic_visit(node)

    def _add(self, node: ast.Call | ast.Assign, mutation: Mutation) -> None:
        if self._scopes:
            function, text = ".".join(self._scopes), ast.unparse(node)
            self._seen[function, text] += 1
            number = self._seen[function, text]
            self.found.append(
                Site(self._file, function, node.lineno, node.col_offset, mutation, text, number)
            )


class _Watcher(ast.NodeTransformer):
    def __init__(self, sites: Sequence[tuple[int, Site]]) -> None:
        self._sites = {(site.line, site.column, site.text): index for index, site in sites}

    def visit_Call(self, node: ast.Call) -> ast.AST:
        index = self._sites.get((node.lineno, node.col_offset, ast.unparse(node)))
        self.generic_visit(node)
        if index is None:
            return node
        return self._call(index, node)

    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        index = self._sites.get((node.lineno, node.col_offset, ast.unparse(node)))
        self.generic_visit(node)
        if index is not None:
            node.value = self._call(index, node.value)
        return node

    @staticmethod
    def _call(index: int, node: ast.expr) -> ast.Call:
        name = ast.Name(id=WATCHED, ctx=ast.Load())
        return ast.Call(func=name, args=[ast.Constant(value=index), node], keywords=[])


class _Remover(ast.NodeTransformer):
    def __init__(self, site: Site) -> None:
        self._site = site
        self._statement = False
        self.done = False

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        before, self._statement = self._statement, True
        found = self.generic_visit(node)
        self._statement = before
        return found

    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        site = self._site
        if (node.lineno, node.col_offset) == (site.line, site.column) and ast.unparse(node) == site.text:
            self.done = True
            node.value = _removed_call(_stand_in(node) or "None", node.value)
            return node
        return self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        site, statement = self._site, self._statement
        self._statement = False
        if (node.lineno, node.col_offset) == (site.line, site.column) and ast.unparse(node) == site.text:
            self.done = True
            return self._without(node, statement)
        return self.generic_visit(node)

    def _without(self, call: ast.Call, statement: bool) -> ast.expr:
        mutation = self._site.mutation
        if mutation is Mutation.HOLD:
            return _without_reference(call)
        receiver = [call.func.value] if isinstance(call.func, ast.Attribute) else []
        kind: str = mutation.value
        if mutation is Mutation.RECORD and not statement and not _is_event(call.func):
            kind = "event"
        elif mutation is Mutation.WAIT and not statement:
            kind = "receiver"
        arguments = [*receiver, *call.args, *(keyword.value for keyword in call.keywords)]
        return _removed_call(kind, *arguments)


def _is_event(function: ast.expr) -> bool:
    """Whether `record` is an event's own, which returns nothing."""
    return isinstance(function, ast.Attribute) and "event" in ast.unparse(function.value).lower()


def _without_reference(call: ast.Call) -> ast.Call:
    """The same call, but the event alone is kept."""
    index, instead = _HOLDS.get(ast.unparse(call.func)) or _HOLDS[_name(call.func)]
    holder, tuple_ = call, call.args[0]
    if isinstance(tuple_, ast.Tuple):
        values = list(tuple_.elts)
        values[index] = _removed_call(instead, values[index])
        holder.args = [ast.Tuple(elts=values, ctx=ast.Load())]
    else:
        holder.args[index] = _removed_call(instead, holder.args[index])
    return holder


def _removed_call(kind: str, *arguments: ast.expr) -> ast.Call:
    return ast.Call(
        func=ast.Name(id=REMOVED, ctx=ast.Load()), args=[ast.Constant(value=kind), *arguments], keywords=[]
    )
