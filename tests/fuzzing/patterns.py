"""Every regular expression of the source, and texts that repeat each phrase that it knows.

`patterns()` evaluates the first argument of each call of `re` in the four source folders in its module, and
takes what its module's constants hold. `texts(pattern, size)` repeats the phrases of an expression: whole,
cut, and one with a long run of each class of characters after it. An expression that looks for its end from
each of them takes time that grows with the square.
"""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from re import _constants as sre  # type: ignore[attr-defined]
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("fsdpbench", "impl", "reports", "workloads")
_FLAGS_AT = {"compile": 1, "match": 2, "search": 2, "fullmatch": 2, "findall": 2, "finditer": 2}
_FUNCTIONS = {*_FLAGS_AT, "sub", "subn", "split"}
_CLASSES = {sre.CATEGORY_DIGIT: "1", sre.CATEGORY_SPACE: " ", sre.CATEGORY_WORD: "a"}
_ENDS = ("", "\n", "!", "\nx")
_MOST_PHRASES = 40


@dataclass(frozen=True)
class Pattern:
    """An expression, where it is written, and whether it is tried at every place of a text (`search`)."""

    place: str
    pattern: re.Pattern[Any]
    anywhere: bool = True

    def use(self, text: Any) -> None:
        """Use it as its module does."""
        if self.anywhere:
            for _ in self.pattern.finditer(text):
                pass
        else:
            self.pattern.match(text)
            self.pattern.fullmatch(text)


@cache
def source_files() -> tuple[Path, ...]:
    """The Python files of the four source folders, each once."""
    found = (path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py")))
    return tuple(path for path in found if path.resolve() == path)


def module_of(path: Path) -> Any:
    """The module of a source file, imported."""
    words = path.relative_to(ROOT).with_suffix("").parts
    whole = ".".join(words if words[0] == "fsdpbench" else ("fsdpbench", *words))
    return importlib.import_module(whole.removesuffix(".__init__"))


@cache
def patterns() -> tuple[Pattern, ...]:
    """All of them."""
    return tuple(found for path in source_files() for found in _of_file(path))


def _of_file(path: Path) -> Iterator[Pattern]:
    tree = ast.parse(path.read_text())
    calls = [node for node in ast.walk(tree) if _is_of_re(node)]
    if not calls:
        return
    module = module_of(path)
    constants = [(name, found) for name, value in vars(module).items() for found in _compiled(value)]
    for call in calls:
        place = f"{path.relative_to(ROOT)}:{call.lineno}"
        if call.func.attr == "compile" and constants:
            continue
        try:
            yield Pattern(place, _evaluated(call, vars(module)), call.func.attr not in ("match", "fullmatch"))
        except NameError as error:
            raise AssertionError(f"{place}: {ast.unparse(call)} cannot be evaluated ({error})") from None
    for name, found in constants:
        uses = _uses(tree, name)
        yield Pattern(
            f"{path.relative_to(ROOT)} {name}", found, not uses or not uses <= {"match", "fullmatch"}
        )


def _uses(tree: ast.Module, name: str) -> set[str]:
    """The methods of a constant that its module calls; those of a constant in a tuple are not known."""
    return {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == name
    }


def _is_of_re(node: ast.AST) -> bool:
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return False
    return ast.unparse(node.func.value) == "re" and node.func.attr in _FUNCTIONS


def _evaluated(call: Any, scope: dict[str, Any]) -> re.Pattern[Any]:
    def value(node: ast.expr) -> Any:
        return eval(compile(ast.Expression(node), "<pattern>", "eval"), scope)

    position = _FLAGS_AT.get(call.func.attr)
    flags = [keyword.value for keyword in call.keywords if keyword.arg == "flags"]
    flags += call.args[position : position + 1] if position else []
    return re.compile(value(call.args[0]), value(flags[0]) if flags else 0)


def _compiled(value: Any) -> Iterator[re.Pattern[Any]]:
    if isinstance(value, re.Pattern):
        yield value
    elif isinstance(value, dict | list | tuple):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _compiled(item)


def phrases(pattern: re.Pattern[Any]) -> list[tuple[str, str]]:
    """(a text that matches up to a place, the character that may be repeated there or nothing)."""
    tree = parser.parse(
        pattern.pattern, pattern.flags & ~re.UNICODE if isinstance(pattern.pattern, bytes) else 0
    )
    found: dict[tuple[str, str], None] = {}
    for sample, at in _walk(list(tree)):
        found[sample, at] = None
    whole = [sample for sample, _ in found if sample]
    for sample in whole[-4:]:
        for cut in range(1, min(len(sample), 12)):
            found[sample[:-cut], ""] = None
    return [each for each in found if each[0] or each[1]][:_MOST_PHRASES]


def texts(pattern: re.Pattern[Any], size: int) -> Iterator[tuple[str, str | bytes]]:
    """Named texts of `size` characters for one expression."""
    for sample, run in phrases(pattern):
        made = {f"{sample!r} x n": (sample * size)[:size]} if sample else {}
        if run:
            for fill in {"x": ("x", " "), " ": (" ", "\n")}.get(run, (run,)):  # of large classes several
                made |= {f"{sample!r}, {fill!r} x n, {end!r}": sample + fill * size + end for end in _ENDS}
                made[f"{sample + fill + fill!r} x n"] = ((sample + fill + fill) * size)[:size]
        for name, text in made.items():
            yield name, text.encode("latin-1", "replace") if isinstance(pattern.pattern, bytes) else text


def _walk(nodes: Sequence[Any], before: str = "") -> Iterator[tuple[str, str]]:
    """Every place of an expression at which something repeats or a branch ends."""
    text = before
    for kind, argument in nodes:
        if kind in (sre.MAX_REPEAT, sre.MIN_REPEAT, sre.POSSESSIVE_REPEAT):
            least, _, inner = argument
            one = _sample(inner)
            yield text, one
            yield from _walk(list(inner), text)
            text += one * max(least, 1)
        elif kind is sre.BRANCH:
            for branch in argument[1]:
                yield from _walk(list(branch), text)
            text += _sample(argument[1][0])
        elif kind is sre.SUBPATTERN or kind is sre.ATOMIC_GROUP:
            inner = argument[-1] if kind is sre.SUBPATTERN else argument
            yield from _walk(list(inner), text)
            text += _sample(inner)
        elif kind in (sre.ASSERT, sre.ASSERT_NOT):
            yield from _walk(list(argument[1]), text)
        else:
            text += _sample([(kind, argument)])
    yield text, ""


def _sample(nodes: Any) -> str:
    """A short text that the nodes match."""
    return "".join(_sample_of(kind, argument) for kind, argument in nodes)


def _sample_of(kind: Any, argument: Any) -> str:
    if kind is sre.LITERAL:
        return chr(argument)
    if kind is sre.ANY:
        return "x"
    if kind is sre.NOT_LITERAL:
        return "y" if argument == ord("x") else "x"
    if kind is sre.IN:
        return _of_class(argument)
    if kind in (sre.MAX_REPEAT, sre.MIN_REPEAT, sre.POSSESSIVE_REPEAT):
        return _sample(argument[2]) * max(min(argument[0], 3), 1)
    if kind is sre.BRANCH:
        return _sample(argument[1][0])
    if kind is sre.SUBPATTERN:
        return _sample(argument[-1])
    if kind is sre.ATOMIC_GROUP:
        return _sample(argument)
    return ""


def _of_class(items: Any) -> str:
    negated = items[0][0] is sre.NEGATE
    for kind, argument in items:
        if negated:
            continue
        if kind is sre.LITERAL:
            return chr(argument)
        if kind is sre.RANGE:
            return chr(argument[0])
        if kind is sre.CATEGORY:
            return _CLASSES.get(argument, "x")
    pattern_of_class = {chr(argument) for kind, argument in items if kind is sre.LITERAL}
    return next(letter for letter in "xyz 1-" if letter not in pattern_of_class)
