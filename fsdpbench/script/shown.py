"""Whether what a line of a script reads is only printed there, as its source says."""

from __future__ import annotations

import ast
import functools
import linecache
from types import CodeType, FrameType
from typing import Any

_PRINTS = {
    "print", "log", "info", "debug", "warning", "write", "set_postfix", "set_description", "add_scalar",
}  # fmt: skip
_TEXT = {"format", "str", "repr"}


def is_only_shown(frame: FrameType) -> bool:
    """Whether the call that runs in a frame is part of what is printed or made text there, uncompared."""
    return _shown_at(frame.f_code, frame.f_lasti, True)


def is_only_printed(frame: FrameType) -> bool:
    """Whether it is part of what is printed at that place: nothing else can be done with it."""
    return _shown_at(frame.f_code, frame.f_lasti, False)


@functools.cache
def _shown_at(code: CodeType, instruction: int, texts: bool) -> bool:
    place = list(code.co_positions())[instruction // 2]
    try:
        tree = ast.parse("".join(linecache.getlines(code.co_filename)))
    except (SyntaxError, ValueError):
        return False
    return bool(_shown(tree, place, shown=False, texts=texts))


def _shown(node: ast.AST, place: tuple[Any, ...], *, shown: bool, texts: bool) -> bool | None:
    """Of the expression at `place` (lines and columns, as code objects have them); None: it is not below
    `node`. `texts`: to become text is to be shown."""
    if isinstance(node, ast.Call):
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        shown = shown or name in _PRINTS or (texts and name in _TEXT)
    elif isinstance(node, ast.FormattedValue):
        shown = shown or texts
    elif isinstance(node, ast.Compare | ast.IfExp | ast.BoolOp | ast.Lambda):
        shown = texts = False
    if isinstance(node, ast.Call | ast.FormattedValue) and place == _place(node):
        return shown
    for child in ast.iter_child_nodes(node):
        answer = _shown(child, place, shown=shown, texts=texts)
        if answer is not None:
            return answer
    return None


def _place(node: ast.expr) -> tuple[Any, ...]:
    return node.lineno, node.end_lineno, node.col_offset, node.end_col_offset
