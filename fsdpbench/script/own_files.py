"""The script's own files (beside it or in its package, but not installed there), and places in them."""

import ast
import atexit
import contextlib
import functools
import importlib.util
import itertools
import linecache
import multiprocessing
import os
import pickle
import runpy
import sys
import threading
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, cast

import torch

import fsdpbench
from fsdpbench.base.configuration.script_source import ScriptSource
from fsdpbench.base.result_sections import Place

_INSTALLED = ("site-packages", "dist-packages")
PACKAGE = os.path.dirname(fsdpbench.__file__) + os.sep
_PYTHON = os.path.dirname(os.__file__) + os.sep
_TORCH = os.path.dirname(torch.__file__) + os.sep
_PASSES_ON = tuple(
    f"{_TORCH}{name}".replace("/", os.sep)
    for name in ("_tensor.py", "testing/", "optim/lr_scheduler.py", "distributed/_functional_collectives.py")
)
# Python's library and this project, which may also be below the script's folder.
_NOT_THE_SCRIPTS = (_PYTHON, PACKAGE)


class OwnFiles:
    """The files of one script, looked up by their names in code objects."""

    def __init__(self, source: ScriptSource) -> None:
        self._script = source.program[0]
        self._folder = str(source.own_folder) + os.sep
        self._whole = str(Path(self._script).absolute())
        self._known: dict[str, bool] = {}

    def whole_name(self, name: str) -> str:
        """Return the absolute name of one of the files; the script may have changed the working folder."""
        return self._whole if name == self._script else name

    def has(self, name: str) -> bool:
        """Return whether `name` is one of the files."""
        known = self._known.get(name)
        if known is None:
            known = self._known[name] = self._is_own(name)
        return known

    def seen(self) -> list[str]:
        """Return the own files that were looked up, by their names in code objects."""
        return [self._script, *(name for name, own in self._known.items() if own and name != self._script)]

    def line(self) -> str | None:
        """Return the script's own line that is running, such as `train.py:12`."""
        frame = self.innermost()
        return None if frame is None else f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"

    def lines(self) -> str:
        """Return the script's own lines that are running, as `train.py:12 train.py:80`, innermost first."""
        own = ((f.f_code.co_filename, line) for f, line in traceback.walk_stack(None))
        return " ".join(f"{os.path.basename(name)}:{line}" for name, line in own if self.has(name))

    def last_line(self, error: BaseException) -> Place:
        """Return the line of the script's own code that an error passed last."""
        frames = [each for each in traceback.extract_tb(error.__traceback__) if self.has(each.filename)]
        return Place(frames[-1].filename, frames[-1].lineno or 0) if frames else Place()

    def with_line(self, said: str, error: BaseException) -> str:
        """Return the text `said` about an error, and the script's own line that the error passed last."""
        place = self.last_line(error)
        text = linecache.getline(place.file, place.line).strip()
        return f"{said}, at {place.short}: {text}" if place.file else said

    def _is_own(self, name: str) -> bool:
        if name == self._script:  # an installed command only calls its package
            return os.path.dirname(self._whole) != os.path.dirname(sys.executable)
        if not name.startswith(self._folder) or name.startswith(_NOT_THE_SCRIPTS):
            return False
        return not any(part in name[len(self._folder) :].split(os.sep) for part in _INSTALLED)

    def place(self, frame: FrameType | None) -> Place:
        """Return the line that is running in a frame; without a frame, an unknown place."""
        if frame is None:
            return Place()
        code = frame.f_code
        file = self.whole_name(code.co_filename)
        span = next(itertools.islice(code.co_positions(), frame.f_lasti // 2, None), (None,))
        text = linecache.getline(file, frame.f_lineno).strip()
        known = all(each is not None for each in span)
        return Place(file, frame.f_lineno, text, cast("tuple[int, ...]", span) if known else None)

    def innermost(self) -> FrameType | None:
        """Return the script's own frame that is running, else the innermost of a library other than torch."""
        frame: FrameType | None = sys._getframe(1)
        library = None
        while frame is not None:
            name = frame.f_code.co_filename
            if self.has(name):
                return frame
            installed = any(f"{os.sep}{part}{os.sep}" in name for part in _INSTALLED)
            if library is None and installed and not name.startswith((PACKAGE, _TORCH)):
                library = frame
            frame = frame.f_back
        return library


def is_of_torch(frame: FrameType | None) -> bool:
    """Return whether a frame runs torch's own code, except a method that passes a question on."""
    name = frame.f_code.co_filename if frame is not None else ""
    return name.startswith(_TORCH) and not name.startswith(_PASSES_ON)


_PRINTS = {
    "print", "log", "info", "debug", "warning", "write", "set_postfix", "set_description", "add_scalar",
}  # fmt: skip
_TEXT = {"format", "str", "repr"}


def is_only_shown(frame: FrameType) -> bool:
    """Return whether the value of a frame's running call is only printed or made text there, uncompared."""
    return _shown_at(frame.f_code, frame.f_lasti, True)


def is_only_printed(frame: FrameType) -> bool:
    """Return whether the value of a frame's running call is only printed: nothing else can use it."""
    return _shown_at(frame.f_code, frame.f_lasti, False)


@functools.cache
def _shown_at(code: CodeType, instruction: int, texts: bool) -> bool:
    place = list(code.co_positions())[instruction // 2]
    return bool(_shown(_parsed(code), place, shown=False, texts=texts))


def _parsed(code: CodeType) -> ast.AST:
    try:
        return ast.parse("".join(linecache.getlines(code.co_filename)))
    except (SyntaxError, ValueError):
        return ast.Module([], [])


def _shown(node: ast.AST, place: tuple[Any, ...], *, shown: bool, texts: bool) -> bool | None:
    """Return whether the expression at `place` (lines and columns, as in code objects) is only shown; None if
    it is not below `node`. `texts`: conversion to text counts as showing."""
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


@functools.cache
def passing(code: CodeType, instruction: int) -> bool | None:
    """Return the truth value at an instruction with which a program passes its own check (`assert ok.all()`,
    `if not ok.all(): raise`); None if the instruction is not in a check."""
    place = list(code.co_positions())[instruction // 2]
    for node in ast.walk(_parsed(code)):
        raises = isinstance(node, ast.If) and isinstance(node.body[-1], ast.Raise)
        if isinstance(node, ast.Assert | ast.If) and (raises or isinstance(node, ast.Assert)):
            whole = place in (_place(node), _place(node.test))  # Python 3.11 records no more about an operand
            operands = _operands(node.test, not raises)
            found = {truth for each, truth in operands if whole or _place(each) == place}
            if found:
                return found.pop() if len(found) == 1 else None
    return None


def _operands(node: ast.expr, truth: bool) -> Iterator[tuple[ast.expr, bool]]:
    """Yield the operands of `not`, `and`, `or` in a condition, each with the value that makes it `truth`."""
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield from _operands(node.operand, not truth)
    elif isinstance(node, ast.BoolOp):
        for each in node.values:
            yield from _operands(each, truth)
    else:
        yield node, truth


def _place(node: ast.expr | ast.stmt) -> tuple[Any, ...]:
    return node.lineno, node.end_lineno, node.col_offset, node.end_col_offset


def in_a_line(error: BaseException) -> str:
    """Return an error's type and the first line of its text; for a `CheckpointException`, a rank's error."""
    if failures := getattr(error, "failures", None):
        return f"{type(error).__name__}: {in_a_line(next(iter(failures.values()))[0])}"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def run_as_main(source: ScriptSource) -> str:
    """Run a script as `__main__`; return the error in its exit code, or "". Raises what the script raises."""
    multiprocessing.set_start_method(None, force=True)  # data loaders start as in a fresh interpreter
    sys.argv = [source.path, *source.arguments]
    sys.path.insert(0, os.getcwd() if source.module else str(Path(source.path).parent.absolute()))
    try:
        if source.module:
            runpy.run_module(source.module, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(source.path, run_name="__main__")
    except SystemExit as stop:
        if stop.code not in (None, 0):
            cause = stop.__context__
            said = f" after {in_a_line(cause)}" if isinstance(cause, Exception) else ""
            return f"the script ended itself with exit code {stop.code}{said}"
    return ""


@contextlib.contextmanager
def ending_as_python() -> Iterator[None]:
    """Wait at the end for threads started inside, and call functions registered with `atexit` inside.

    Neither happens after an exception. Functions registered before are never called.
    """
    before = set(threading.enumerate())
    atexit._clear()
    yield
    for end_executors in reversed(vars(threading)["_threading_atexits"]):
        end_executors()
    for thread in set(threading.enumerate()) - before:
        if not thread.daemon:
            thread.join()
    atexit._run_exitfuncs()


def run_function(source: ScriptSource) -> object:
    """Call the function of `source`, found by module and name; return its value. Raises what it raises."""
    asked = source.function
    assert asked is not None
    multiprocessing.set_start_method(None, force=True)
    sys.argv = [source.path]
    _import(asked.module, source.path)
    function, (args, named) = pickle.loads(Path(asked.folder, "call.pickle").read_bytes())
    return function(*args, **named)


def _import(name: str, path: str) -> None:
    """Import the module `name` if it is the file at `path`, else load that file: pytest has its own names."""
    with contextlib.suppress(ImportError):
        if os.path.realpath(str(importlib.import_module(name).__file__)) == path:
            return
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
