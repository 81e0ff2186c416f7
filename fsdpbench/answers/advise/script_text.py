"""One file of a script: the place of a call in it, what is around that, and the diff of what is changed."""

from __future__ import annotations

import ast
import difflib
import os
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

_POSITIONS = {
    "FullyShardedDataParallel": ("module", "process_group", "sharding_strategy", "cpu_offload",
        "auto_wrap_policy", "backward_prefetch", "mixed_precision", "ignored_modules"),
    "DistributedDataParallel": ("module", "device_ids", "output_device", "dim", "broadcast_buffers",
        "init_sync", "process_group"),
    "DataLoader": ("dataset", "batch_size"),
    "zero_grad": ("set_to_none",),
}  # fmt: skip
"""Parameters that a call may give by position."""


class NoDiffError(Exception):
    """Why no diff can be made, in words."""


class ScriptText:
    """Offsets are in bytes, as those of `ast` are."""

    def __init__(self, file: str) -> None:
        try:
            self.content = Path(file).read_bytes()
            self.tree = ast.parse(self.content)
        except (OSError, SyntaxError, ValueError):
            raise NoDiffError(f"{os.path.basename(file)} cannot be read") from None
        self.lines = self.content.splitlines(keepends=True)
        self.starts = [0]
        for line in self.lines:
            self.starts.append(self.starts[-1] + len(line))
        self._changes: dict[tuple[int, int], str] = {}

    @cached_property
    def parents(self) -> dict[ast.AST, ast.AST]:
        """Return the node around each node."""
        return {child: each for each in ast.walk(self.tree) for child in ast.iter_child_nodes(each)}

    def node(self, span: Sequence[int] | None, line: int) -> Any:
        """Return the call or other node that is exactly there; without a span the line's one statement."""
        nodes = [node for node in ast.walk(self.tree) if _span(node) is not None]
        found = [node for node in nodes if span is not None and _span(node) == tuple(span)]
        if span is None:
            found = [node for node in nodes if isinstance(node, ast.stmt) and node.lineno == line]
        if not found or (span is None and len(found) > 1):
            raise NoDiffError("the call cannot be located in the script's text")
        return next((node for node in found if isinstance(node, ast.Call)), found[0])

    def offsets(self, node: Any) -> tuple[int, int]:
        """First byte, and that after the last one."""
        line, end_line, column, end_column = _span(node) or (0, 0, 0, 0)
        return self.starts[line - 1] + column, self.starts[end_line - 1] + end_column

    def source(self, node: Any) -> str:
        """Return the text of a node."""
        start, end = self.offsets(node)
        return self.content[start:end].decode()

    def change(self, start: int, end: int, text: str) -> None:
        """Write `text` in the place of these bytes; insertions at one place follow each other."""
        known = self._changes.get((start, end), "")
        if known and start < end and known != text:
            raise NoDiffError("two changes meet at one place")
        self._changes[start, end] = known if text in known else known + text

    def argument_of(self, call: ast.Call, name: str) -> ast.expr | None:
        """Return the argument for a parameter of this name, given by name or by position."""
        for each in call.keywords:
            if each.arg == name:
                return each.value
        called = self.source(call.func).rpartition(".")[2]
        names = _POSITIONS.get("FullyShardedDataParallel" if called == "FSDP" else called, ())
        place = names.index(name) if name in names else len(call.args)
        if place < len(call.args) and not any(isinstance(each, ast.Starred) for each in call.args):
            return call.args[place]
        return None

    def statement(self, node: Any) -> tuple[Any, str | None]:
        """Return the statement around a node, and its indentation; None where it shares its lines."""
        while not isinstance(node, ast.stmt):
            if isinstance(node, ast.Lambda | ast.comprehension | ast.ListComp):
                raise NoDiffError("the call is inside of an expression that is run elsewhere")
            node = self.parents[node]
        before = self.lines[node.lineno - 1][: node.col_offset]
        after = self.content[self.offsets(node)[1] :].split(b"\n", 1)[0].strip()
        alone = not before.strip() and not after.startswith(b";")
        return node, before.decode() if alone else None

    def outermost(self, node: Any) -> Any:
        """Return the statement around a node, or the outermost loop around that."""
        node = self.statement(node)[0]
        while isinstance(up := self.parents[node], ast.For | ast.With | ast.If):
            node = up
        return node

    def function(self, node: Any) -> ast.AST:
        """Return the function that a node is in, or the module."""
        while not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Module):
            node = self.parents[node]
        found: ast.AST = node
        return found

    def counter(self, node: Any) -> str:
        """Return the variable that counts the steps of the loop around a statement."""
        while node in self.parents and not isinstance(node, ast.FunctionDef | ast.Lambda):
            node = self.parents[node]
            if isinstance(node, ast.For):
                target = node.target.elts[0] if isinstance(node.target, ast.Tuple) else node.target
                called = self.source(node.iter).partition("(")[0]
                if called in ("range", "enumerate") and isinstance(target, ast.Name) and target.id != "_":
                    return target.id
        raise NoDiffError("no loop around the line counts its steps in a variable")

    def diff(self, name: str) -> str:
        """Raise `NoDiffError` where the changed text is not valid Python."""
        new, position = b"", 0
        for (start, end), text in sorted(self._changes.items()):
            if start < position:
                raise NoDiffError("two changes meet at one place")
            new += self.content[position:start] + text.encode()
            position = end
        new += self.content[position:]
        try:
            ast.parse(new)
        except (SyntaxError, ValueError):
            raise NoDiffError("the changed text would not be valid Python") from None
        old, changed = ([line.decode() for line in text.splitlines(True)] for text in (self.content, new))
        lines = difflib.unified_diff(old, changed, f"a/{name}", f"b/{name}")
        cut_off = "\n\\ No newline at end of file\n"
        return "".join(line if line.endswith("\n") else line + cut_off for line in lines)


def _span(node: Any) -> tuple[int, int, int, int] | None:
    if getattr(node, "end_lineno", None) is None:
        return None
    return node.lineno, node.end_lineno, node.col_offset, node.end_col_offset
