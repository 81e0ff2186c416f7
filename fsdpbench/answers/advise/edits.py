"""Edits of a script's own text, by the place of a call in it, and the unified diff that they make."""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fsdpbench.answers.advise.script_text import NoDiffError, ScriptText


@dataclass(frozen=True)
class Edit:
    """One change at the call that stands at `place`. `do`: a method of `_Text`; `more`: its arguments. In
    text `{0}` is the call's first argument, `{like}` a like call that wraps `block`."""

    place: Mapping[str, Any]
    do: str
    more: tuple[Any, ...] = ()


def diff_of(edits: Sequence[Edit], folder: str) -> str:
    """Return the unified diff of all edits, for `patch -p1` in `folder`. Raises `NoDiffError`."""
    texts: dict[str, _Text] = {}
    for edit in edits:
        file = str(edit.place.get("file") or "")
        if not file.startswith(folder + os.sep):
            raise NoDiffError("the call is in no file of the script's own")
        text = texts.setdefault(file, _Text(file))
        getattr(text, edit.do)(text.node(edit.place.get("span"), edit.place["line"]), *edit.more)
    return "".join(text.diff(os.path.relpath(file, folder)) for file, text in texts.items())


class _Text(ScriptText):
    """The edits of one file."""

    def _filled(self, node: Any, text: str) -> str:
        if "{like}" in text:
            given = ["block", *map(self.source, [*node.args[1:], *node.keywords])]
            text = text.replace("{like}", f"{self.source(node.func)}({', '.join(given)})")
        first = self.source(node.args[0]) if getattr(node, "args", None) else ""
        if "{0}." in text and not re.fullmatch(r"[\w.]+", first):
            raise NoDiffError("the module is not named at the call")
        return text.replace("{0}", first)

    def keyword(self, call: ast.Call, name: str, value: str) -> None:
        """Give a call this argument, by name; one that it has is replaced."""
        value = self._filled(call, value)
        found = self.argument_of(call, name)
        if found is not None:
            return self.change(*self.offsets(found), value)
        if any(each.arg is None for each in call.keywords):
            raise NoDiffError(f"its arguments come from **{self.source(call.keywords[-1].value)}")
        given = [*call.args, *(each.value for each in call.keywords)]
        last = max((self.offsets(each)[1] for each in given), default=0)
        end = self.offsets(call)[1]
        if last == end:  # f(x for x in y)
            start = self.offsets(call.args[0])[0]
            return self.change(start, end, f"({self.source(call.args[0])}, {name}={value})")
        while given and self.content[last : last + 1] in b")":  # of an argument in parentheses of its own
            if last == end - 1:
                break
            last += 1
        return self.change(*(2 * (last if given else end - 1,)), f"{', ' if given else ''}{name}={value}")

    def drop(self, call: ast.Call, name: str, required: bool = True) -> None:
        """Take an argument from a call."""
        found = next((each for each in call.keywords if each.arg == name), None)
        if found is None:
            if required:
                raise NoDiffError(f"{name}= is not written at the call")
            return
        start, end = self.offsets(found)
        before = re.search(rb",\s*$", self.content[:start])
        self.change(before.start() if before else start, end, "")

    def replace(self, node: ast.AST, text: str) -> None:
        """Write something else in the place of a call."""
        self.change(*self.offsets(node), self._filled(node, text))

    def argument(self, call: ast.Call, text: str) -> None:
        """Write another first argument."""
        if not call.args:
            raise NoDiffError("its argument is not written at the call")
        self.replace(call.args[0], text)

    def doubled(self, call: ast.Call, name: str) -> None:
        """Give a call twice this argument."""
        found = self.argument_of(call, name)
        if found is None:
            raise NoDiffError(f"{name}= is not written at the call")
        plain = isinstance(found, ast.Name | ast.Constant)
        self.replace(found, f"2 * {self.source(found)}" if plain else f"2 * ({self.source(found)})")

    def bare(self, call: ast.Call, names: Sequence[str]) -> None:
        """Call the function that a call recomputes by itself."""
        called = self.source(call.func).rpartition(".")[2]
        if called not in ("checkpoint", "checkpoint_wrapper"):
            if called == "apply_activation_checkpointing":
                return self.without(call)
            raise NoDiffError(f"{called} decides which blocks are recomputed")
        plain = self.source(call.args[0])
        if called == "checkpoint":
            given = [*call.args[1:], *(each for each in call.keywords if each.arg not in names)]
            plain = f"{plain}({', '.join(map(self.source, given))})"
        return self.change(*self.offsets(call), plain)

    def detached(self, call: ast.Call) -> None:
        """Keep a value on the device that a call reads: `x.item()`, `float(x)`."""
        read = call.func.value if isinstance(call.func, ast.Attribute) else call.args[0]
        self.replace(call, f"{self.source(read)}.detach()")

    def made_on_device(self, node: ast.AST) -> None:
        """Make on the device what `to_empty` makes on the host."""
        for each in ast.walk(self.tree):
            if isinstance(each, ast.Call) and self.source(each.func).endswith(".to_empty"):
                found = self.argument_of(each, "device")
                if isinstance(found, ast.Constant) and found.value == "cpu":
                    self.replace(found, '"cuda"')

    def pairs(self, call: ast.Call) -> None:
        """Wrap two blocks at a time, in the loop that wraps each."""
        loop = self.parents[self.parents[call]]
        if not isinstance(loop, ast.For) or len(loop.body) > 1 or loop.body[0] is not self.parents[call]:
            raise NoDiffError("no loop does nothing but wrap the blocks")
        target, blocks = self.source(loop.target), f"[*{self.source(loop.iter)}]"
        if not call.args or self.source(call.args[0]) != target:
            raise NoDiffError("no loop does nothing but wrap the blocks")
        self.replace(loop.iter, f"range(0, len({blocks}), 2)")
        self.replace(call.args[0], f"{blocks}[{target} : {target} + 2]")

    def around(self, call: ast.Call, path: str) -> None:
        """Wrap the model whose blocks a loop wraps, as it wraps them, after the loop."""
        loop = self.parents[self.statement(call)[0]]
        blocks = self.source(loop.iter) if isinstance(loop, ast.For) else ""
        if not path or not blocks.endswith(f".{path}"):
            raise NoDiffError("the model is not named where its blocks are wrapped")
        given = [blocks.removesuffix(f".{path}")]
        given += [self.source(each) for each in call.keywords if each.arg != "reshard_after_forward"]
        self.after(call, f"{self.source(call.func)}({', '.join(given)})")

    def moved(self, node: ast.AST, span: Sequence[int] | None) -> None:
        """Do the statement of a call after that of another one."""
        other = self.node(span, 0)
        if self.function(node) is not self.function(other):
            raise NoDiffError("the model is wrapped in another function")
        self.after(other, self.source(self.statement(node)[0]))
        self.without(node)

    def beside(
        self, call: ast.Call, spans: Sequence[Any], before: Sequence[str], after: Sequence[str]
    ) -> None:
        """Put statements before the loops of the first of the calls at `spans`, which wrap, and after `call`,
        the last of them."""
        name = self.source(call.func).rpartition(".")[2]
        if name not in ("fully_shard", "FSDP", "FullyShardedDataParallel"):
            raise NoDiffError(f"{name}() wraps the model, which this line does not name")
        first, *others = (self.statement(self.node(span, 0))[0] for span in spans)
        if any(self.function(each) is not self.function(call) for each in (first, *others)):
            raise NoDiffError("the calls are in several functions, and share no variable")
        while isinstance(up := self.parents[first], ast.For):
            first = up
        for text in before:
            self.before(first, self._filled(call, text))
        for text in after:
            self.after(call, text)

    def before(self, node: ast.AST, text: str) -> None:
        """Put a statement before that of a call."""
        statement, indent = self.statement(node)
        if indent is None and text.startswith("for "):
            raise NoDiffError("several statements share the line")
        start, text = self.offsets(statement)[0], self._filled(node, text).replace("\n", f"\n{indent}")
        self.change(start, start, f"{text}; " if indent is None else f"{text}\n{indent}")

    def after(self, node: ast.AST, text: str) -> None:
        """Put a statement after that of a call, or after the loops that it is in."""
        statement, indent = self.statement(self.outermost(node))
        if indent is None:
            raise NoDiffError("several statements share the line")
        text = self._filled(node, text).replace("\n", f"\n{indent}")
        self.change(*(2 * (self.offsets(statement)[1],)), f"\n{indent}{text}")

    def without(self, node: ast.AST) -> None:
        """Leave the statement of a call out."""
        self.replace(self.statement(node)[0], "pass")

    def seldom(self, node: ast.AST, every: int) -> None:
        """Do the statement of a call in one of so many steps only."""
        statement, indent = self.statement(node)
        test = f"{self.counter(statement)} % {every} == 0"
        if isinstance(statement, ast.If | ast.While):
            return self.replace(statement.test, f"{test} and ({self.source(statement.test)})")
        if not isinstance(statement, ast.Expr) or indent is None:
            raise NoDiffError("its value is needed, or several statements share the line")
        return self.replace(statement, f"if {test}: {self.source(statement)}")

    def imports(self, node: ast.AST, text: str) -> None:
        """Import a name at the top, unless the script does."""
        every = [each for each in self.tree.body if isinstance(each, ast.Import | ast.ImportFrom)]
        bound = {name.asname or name.name for each in every for name in each.names}
        if text.split()[-1] in bound:
            return
        start = self.starts[next(each for each in self.tree.body if not _is_head(each)).lineno - 1]
        self.change(start, start, f"{text}\n")


def _is_head(statement: ast.stmt) -> bool:
    """Return whether a statement has to stay first: a docstring, an import from `__future__`."""
    future = isinstance(statement, ast.ImportFrom) and statement.module == "__future__"
    return future or (isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant))
