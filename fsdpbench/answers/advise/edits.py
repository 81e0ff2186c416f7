"""Edits of a script's source at the place of a call and in the code around it, and the unified diff of
all edits."""

import ast
import difflib
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from fsdpbench.base.files.documents import table_beside
from fsdpbench.base.result_sections import Place

_POSITIONS = table_beside(__file__, "positions.toml")
"""Parameters that a call may pass by position."""
_ENABLES = ".gradient_checkpointing_enable"
"""The method that enables recomputation in a Hugging Face model."""


class NoDiffError(Exception):
    """Raised, with the reason, if no diff can be made."""


class ScriptText:
    """The source of a script with its syntax tree. Offsets are in bytes, as in `ast`."""

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
        """Return the parent of each node."""
        return {child: each for each in ast.walk(self.tree) for child in ast.iter_child_nodes(each)}

    def node(self, span: Sequence[int] | None, line: int) -> Any:
        """Return the node (preferably a call) with this span; without one, the only statement of `line`."""
        nodes = [node for node in ast.walk(self.tree) if _span(node) is not None]
        found = [node for node in nodes if span is not None and _span(node) == tuple(span)]
        if span is None:
            found = [node for node in nodes if isinstance(node, ast.stmt) and node.lineno == line]
        if not found or (span is None and len(found) > 1):
            raise NoDiffError("the call cannot be located in the script's text")
        return next((node for node in found if isinstance(node, ast.Call)), found[0])

    def offsets(self, node: Any) -> tuple[int, int]:
        """Return the offsets of the first byte of a node and of the byte after it."""
        line, end_line, column, end_column = _span(node) or (0, 0, 0, 0)
        return self.starts[line - 1] + column, self.starts[end_line - 1] + end_column

    def source(self, node: Any) -> str:
        """Return the source text of a node."""
        start, end = self.offsets(node)
        return self.content[start:end].decode()

    def change(self, start: int, end: int, text: str) -> None:
        """Replace these bytes by `text`; insertions at the same place are concatenated."""
        known = self._changes.get((start, end), "")
        if known and start < end and known != text:
            raise NoDiffError("two changes meet at one place")
        self._changes[start, end] = known if text in known else known + text

    def argument_of(self, call: ast.Call, name: str) -> ast.expr | None:
        """Return the argument for the parameter `name`, passed by keyword or by position."""
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
        """Return the statement around a node and its indentation, or None if it shares its lines."""
        while not isinstance(node, ast.stmt):
            if isinstance(node, ast.Lambda | ast.comprehension | ast.ListComp):
                raise NoDiffError("the call is inside of an expression that is run elsewhere")
            node = self.parents[node]
        before = self.lines[node.lineno - 1][: node.col_offset]
        after = self.content[self.offsets(node)[1] :].split(b"\n", 1)[0].strip()
        alone = not before.strip() and not after.startswith(b";")
        return node, before.decode() if alone else None

    def outermost(self, node: Any) -> Any:
        """Return the statement around a node, or the outermost loop around the statement."""
        node = self.statement(node)[0]
        while isinstance(up := self.parents[node], ast.For | ast.With | ast.If):
            node = up
        return node

    def function(self, node: ast.AST) -> ast.AST:
        """Return the function that a node is in, or the module."""
        while not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Module):
            node = self.parents[node]
        return node

    def counter(self, node: Any) -> str:
        """Return the variable that counts the innermost loop around a statement that calls `step`."""
        every = [each for each in ast.walk(self.function(node)) if isinstance(each, ast.For)]
        loops = [each for each in reversed(every) if node in set(ast.walk(each))]
        stepping = [each for each in loops if ".step(" in self.source(each)]
        for loop in stepping[:1] or loops:
            target = loop.target.elts[0] if isinstance(loop.target, ast.Tuple) else loop.target
            called = self.source(loop.iter).partition("(")[0]
            if called in ("range", "enumerate") and isinstance(target, ast.Name) and target.id != "_":
                return target.id
        raise NoDiffError("no loop around the line counts its steps in a variable")

    def diff(self, name: str) -> str:
        """Return the unified diff. Raises `NoDiffError` if the changed text is not valid Python."""
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


@dataclass(frozen=True)
class Edit:
    """One change at the call at `place`. `do`: a method of `_Text`; `more`: its arguments. In text, `{0}` is
    the call's first argument, and `{like}` is the same call with `block` as its first argument."""

    place: Place
    do: str
    more: tuple[Any, ...] = ()


def diff_of(edits: Sequence[Edit], folder: str) -> str:
    """Return the unified diff of all edits, for `patch -p1` in `folder`. Raises `NoDiffError`."""
    texts: dict[str, _Text] = {}
    for edit in edits:
        file = edit.place.file
        if not file.startswith(folder + os.sep):
            raise NoDiffError("the call is in no file of the script's own")
        text = texts.setdefault(file, _Text(file))
        getattr(text, edit.do)(text.node(edit.place.span, edit.place.line), *edit.more)
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
        """Set an argument of a call by keyword; replace it if the call has it."""
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
        while given and self.content[last : last + 1] in b")":  # the argument is in parentheses
            if last == end - 1:
                break
            last += 1
        return self.change(*(2 * (last if given else end - 1,)), f"{', ' if given else ''}{name}={value}")

    def drop(self, call: ast.Call, name: str, required: bool = True) -> None:
        """Remove an argument from a call."""
        found = next((each for each in call.keywords if each.arg == name), None)
        if found is None:
            if required:
                raise NoDiffError(f"{name}= is not written at the call")
            return
        start, end = self.offsets(found)
        before = re.search(rb",\s*$", self.content[:start])
        self.change(before.start() if before else start, end, "")

    def replace(self, node: ast.AST, text: str) -> None:
        """Replace a call by `text`."""
        self.change(*self.offsets(node), self._filled(node, text))

    def argument(self, call: ast.Call, text: str) -> None:
        """Replace the first argument of a call."""
        if not call.args:
            raise NoDiffError("its argument is not written at the call")
        self.replace(call.args[0], text)

    def doubled(self, call: ast.Call, name: str) -> None:
        """Double an argument of a call."""
        found = self.argument_of(call, name)
        if found is None:
            raise NoDiffError(f"{name}= is not written at the call")
        plain = isinstance(found, ast.Name | ast.Constant)
        self.replace(found, f"2 * {self.source(found)}" if plain else f"2 * ({self.source(found)})")

    def bare(self, call: ast.Call, names: Sequence[str]) -> None:
        """Call a checkpointed function directly, without recomputation."""
        called = self._called(call.func, names)
        if called not in ("checkpoint", "checkpoint_wrapper"):
            if called == "apply_activation_checkpointing":
                return self.without(call)
            every = [each for each in ast.walk(self.tree) if isinstance(each, ast.Call)]
            found = [each for each in every if self.source(each.func).endswith(_ENABLES)]
            if len(found) != 1 or not isinstance(self.parents[found[0]], ast.Expr):
                raise NoDiffError(f"{called} decides which blocks are recomputed")
            return self.without(found[0])
        plain = self.source(call.args[0])
        if called == "checkpoint":
            given = [*call.args[1:], *(each for each in call.keywords if each.arg not in names)]
            plain = f"{plain}({', '.join(map(self.source, given))})"
        return self.change(*self.offsets(call), plain)

    def _called(self, function: ast.expr, names: Sequence[str]) -> str:
        """Return the original name of a function, through `import ... as` and through a `functools.partial`
        that only sets keywords in `names`."""
        source = self.source(function)
        for each in ast.walk(self.tree):
            if isinstance(each, ast.alias) and each.asname == source:
                return each.name
            if not isinstance(each, ast.Assign) or [*map(self.source, each.targets)] != [source]:
                continue
            match each.value:
                case ast.Call(func, [first], keywords) if self.source(func).endswith("partial"):
                    called = source if self.source(first) == source else self._called(first, names)
                    if called != "checkpoint" or all(given.arg in names for given in keywords):
                        return called
        return source.rpartition(".")[2]

    def detached(self, call: ast.Call) -> None:
        """Keep on the device a value that a call reads on the host, such as `x.item()` or `float(x)`."""
        read = call.func.value if isinstance(call.func, ast.Attribute) else call.args[0]
        self.replace(call, f"{self.source(read)}.detach()")

    def made_on_device(self, node: ast.AST) -> None:
        """Make `to_empty` calls allocate on the device instead of the host."""
        for each in ast.walk(self.tree):
            if isinstance(each, ast.Call) and self.source(each.func).endswith(".to_empty"):
                found = self.argument_of(each, "device")
                if isinstance(found, ast.Constant) and found.value == "cpu":
                    self.replace(found, '"cuda"')

    def pairs(self, call: ast.Call) -> None:
        """Wrap two blocks at a time in the loop that wraps single blocks."""
        loop = self.parents[self.parents[call]]
        if not isinstance(loop, ast.For) or len(loop.body) > 1 or loop.body[0] is not self.parents[call]:
            raise NoDiffError("no loop does nothing but wrap the blocks")
        target, blocks = self.source(loop.target), f"[*{self.source(loop.iter)}]"
        if not call.args or self.source(call.args[0]) != target:
            raise NoDiffError("no loop does nothing but wrap the blocks")
        self.replace(loop.iter, f"range(0, len({blocks}), 2)")
        self.replace(call.args[0], f"{blocks}[{target} : {target} + 2]")

    def around(self, call: ast.Call, path: str) -> None:
        """After the loop that wraps blocks, wrap the model with the same arguments."""
        loop = self.parents[self.statement(call)[0]]
        blocks = self.source(loop.iter) if isinstance(loop, ast.For) else ""
        if not path or not blocks.endswith(f".{path}"):
            raise NoDiffError("the model is not named where its blocks are wrapped")
        given = [blocks.removesuffix(f".{path}")]
        given += [self.source(each) for each in call.keywords if each.arg != "reshard_after_forward"]
        self.after(call, f"{self.source(call.func)}({', '.join(given)})")

    def moved(self, node: ast.AST, span: Sequence[int] | None) -> None:
        """Move the statement of a call behind the statement of the call at `span`."""
        other = self.node(span, 0)
        if self.function(node) is not self.function(other):
            raise NoDiffError("the model is wrapped in another function")
        self.after(other, self.source(self.statement(node)[0]))
        self.without(node)

    def beside(
        self, call: ast.Call, spans: Sequence[Any], before: Sequence[str], after: Sequence[str]
    ) -> None:
        """Insert statements `before` the loops around the first of the wrapping calls at `spans`, and `after`
        the last of them, `call`."""
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
        """Insert a statement before the statement of a call."""
        statement, indent = self.statement(node)
        if indent is None and text.startswith("for "):
            raise NoDiffError("several statements share the line")
        start, text = self.offsets(statement)[0], self._filled(node, text).replace("\n", f"\n{indent}")
        self.change(start, start, f"{text}; " if indent is None else f"{text}\n{indent}")

    def after(self, node: ast.AST, text: str) -> None:
        """Insert a statement after the statement of a call, or after the loops around it."""
        statement, indent = self.statement(self.outermost(node))
        if indent is None:
            raise NoDiffError("several statements share the line")
        text = self._filled(node, text).replace("\n", f"\n{indent}")
        self.change(*(2 * (self.offsets(statement)[1],)), f"\n{indent}{text}")

    def without(self, node: ast.AST) -> None:
        """Remove the statement of a call."""
        self.replace(self.statement(node)[0], "pass")

    def seldom(self, node: ast.AST, every: int) -> None:
        """Run the statement of a call only once in `every` steps."""
        statement, indent = self.statement(node)
        test = f"{self.counter(statement)} % {every} == 0"
        if isinstance(statement, ast.If | ast.While):
            return self.replace(statement.test, f"{test} and ({self.source(statement.test)})")
        if not isinstance(statement, ast.Expr) or indent is None:
            raise NoDiffError("its value is needed, or several statements share the line")
        return self.replace(statement, f"if {test}: {self.source(statement)}")

    def imports(self, node: ast.AST, text: str) -> None:
        """Add an import at the top, unless the script has it."""
        every = [each for each in self.tree.body if isinstance(each, ast.Import | ast.ImportFrom)]
        bound = {name.asname or name.name for each in every for name in each.names}
        if text.split()[-1] in bound:
            return
        start = self.starts[next(each for each in self.tree.body if not _is_head(each)).lineno - 1]
        self.change(start, start, f"{text}\n")


def _is_head(statement: ast.stmt) -> bool:
    """Return whether a statement must stay at the top: a docstring or an import from `__future__`."""
    future = isinstance(statement, ast.ImportFrom) and statement.module == "__future__"
    return future or (isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant))
