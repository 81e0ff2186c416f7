"""The source opens files for writing in one place, and makes numbers of text in one.

By its syntax: a call that opens for writing, copies, packs or saves by a path is in
`fsdpbench/base/writing.py`, or in the table of
exceptions with its reason. What is there and is no exception any more is found too.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("fsdpbench", "impl", "reports", "workloads")
WRITERS = {
    "fsdpbench/base/writing.py": "the place itself",
    "fsdpbench/cli/group.py": "a new file among the temporary ones: mkstemp follows no link",
    "fsdpbench/cli/startup.py": "the null device",
    "fsdpbench/base/files/folder_lock.py": "a name of its own; touch(exist_ok=False) follows no link",
    "fsdpbench/engine/devices/real.py": "torch's profiler, by a name of its own that replaces the trace",
    "fsdpbench/base/files/shared_log.py": "memory that has no name on a disk",
    "fsdpbench/engine/results/store.py": "a database in memory",
    "fsdpbench/script/files/overlay.py": "the script's own files",
    "fsdpbench/script/files/operations.py": "the script's own files",
    "fsdpbench/answers/prove/parts.py": "the script's own files, between folders made for its runs",
    "fsdpbench/answers/upgrade/runs.py": "a link to fsdpbench's sources, in a folder made for its runs",
    "fsdpbench/script/real_ranks/pieces.py": "tensors of ranks, in a folder made for their run",
    "fsdpbench/script/cuda/profiling.py": "the script's own traces",
    "fsdpbench/script/observed/waits.py": "workers of a script's loader, in a folder made for its run",
    "fsdpbench/sim/followers/memory_history.py": "the script's own snapshots",
    "fsdpbench/sim/followers/sanitizer/operations.py": "a method of its own named touch",
    "fsdpbench/sim/followers/sanitizer/sanitizer.py": "a method of its own named touch",
}
NUMBERS = {
    "fsdpbench/base/numbers.py": "the place itself",
    "fsdpbench/cli/group.py": "an exit code",
    "fsdpbench/cli/commands/sweep.py": "an exit code, an option that is a number",
    "fsdpbench/cli/commands/run.py": "an exit code",
    "fsdpbench/cli/commands/pages.py": "an exit code",
    "fsdpbench/cli/commands/validate.py": "an exit code",
    "fsdpbench/cli/commands/list.py": "an exit code",
    "fsdpbench/cli/commands/prove.py": "an exit code",
    "fsdpbench/cli/commands/check.py": "an exit code",
    "fsdpbench/cli/terminal/notes.py": "a number of a checked result",
    "fsdpbench/cli/terminal/by_count.py": "a number",
    "fsdpbench/base/settings/values.py": "a number",
}
_NUMBER_FOLDERS = (
    "fsdpbench/cli",
    "fsdpbench/base/configuration",
    "fsdpbench/base/settings",
    "fsdpbench/sweep/spaces",
    "fsdpbench/base/numbers.py",
)
_OPENERS = {"open", "fdopen", "GzipFile"}
_ALWAYS = {
    "write_text", "write_bytes", "touch", "copy", "copy2", "copyfile", "copytree", "to_csv", "to_json",
    "mkstemp", "NamedTemporaryFile", "symlink_to", "hardlink_to", "connect",
    "export_chrome_trace", "savefig", "write_html", "FileHandler",
}  # fmt: skip
_OF_MODULES = {
    "copy": ("shutil",), "copy2": ("shutil",), "move": ("shutil",), "save": ("torch", "np", "numpy"),
    "connect": ("sqlite3",), "to_json": ("pandas",),
}  # fmt: skip


_MAY = re.compile(rf"\b(?:{'|'.join(sorted(_OPENERS | _ALWAYS | _OF_MODULES.keys()))})\(")


@cache
def trees() -> dict[str, ast.Module]:
    paths = (path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py")))
    texts = ((path, path.read_text()) for path in paths if path.resolve() == path)
    return {
        path.relative_to(ROOT).as_posix(): ast.parse(text)
        for path, text in texts
        if _MAY.search(text) or path.relative_to(ROOT).as_posix().startswith(_NUMBER_FOLDERS)
    }


def writes(tree: ast.AST) -> Iterator[ast.Call]:
    """Calls that open, or may open, a file for writing by its path."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and _writes(node):
            yield node


def _writes(call: ast.Call) -> bool:
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    owner = ast.unparse(call.func.value) if isinstance(call.func, ast.Attribute) else ""
    if name in _OF_MODULES:
        return owner in _OF_MODULES[name]
    if name in _ALWAYS:
        return True
    if name not in _OPENERS:
        return False
    words = [*call.args, *(keyword.value for keyword in call.keywords)]
    if owner == "os" and name == "open":
        return any(flag in ast.unparse(word) for word in words for flag in ("O_WRONLY", "O_RDWR", "O_CREAT"))
    if name == "fdopen" or any(keyword.arg == "fileobj" for keyword in call.keywords):
        return False  # of a handle: who opened it is found
    modes = [word.value for word in words if isinstance(word, ast.Constant) and isinstance(word.value, str)]
    return any(set(mode) <= set("rwxabt+") and set(mode) & set("wxa+") for mode in modes)


def numbers_of_text(tree: ast.AST) -> Iterator[ast.Name]:
    """`int` and `float`, called or handed on: not as annotations, and not to ask for a type."""
    passed: set[ast.AST] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.arg | ast.AnnAssign) and node.annotation:
            passed.update(ast.walk(node.annotation))
        elif isinstance(node, ast.FunctionDef) and node.returns:
            passed.update(ast.walk(node.returns))
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("isinstance", "cast"):
            passed.update(each for word in node.args for each in ast.walk(word) if word is not node.args[0])
        elif isinstance(node, ast.Subscript | ast.BinOp):
            passed.update(ast.walk(node.slice if isinstance(node, ast.Subscript) else node))
            passed -= {each for call in ast.walk(node) if isinstance(call, ast.Call) for each in [call.func]}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id in ("int", "float") and node not in passed:
            yield node


def test_one_place_opens_files_for_writing() -> None:
    found = {path: [call.lineno for call in writes(tree)] for path, tree in trees().items()}
    found = {path: lines for path, lines in found.items() if lines}
    others = {path: lines for path, lines in found.items() if path not in WRITERS}
    assert not others, f"use fsdpbench.base.writing: {others}"
    assert not WRITERS.keys() - found.keys(), "exceptions that are none any more"


def test_one_place_makes_numbers_of_text() -> None:
    inside = {path: tree for path, tree in trees().items() if path.startswith(_NUMBER_FOLDERS)}
    found = {path: [node.lineno for node in numbers_of_text(tree)] for path, tree in inside.items()}
    found = {path: lines for path, lines in found.items() if lines}
    others = {path: lines for path, lines in found.items() if path not in NUMBERS}
    assert not others, f"use fsdpbench.base.numbers: {others}"
    assert not NUMBERS.keys() - found.keys(), "exceptions that are none any more"


def test_the_scan_sees_each_way() -> None:
    ways = (
        "open(p, 'w')", "open(p, mode='ab')", "p.open('x')", "io.open(p, 'r+b')", "p.write_text(t)",
        "p.write_bytes(t)", "os.open(p, os.O_WRONLY | os.O_APPEND)", "shutil.copyfile(a, b)",
        "shutil.move(a, b)", "profiler.export_chrome_trace(p)",
        "shutil.copy(a, b)", "gzip.open(p, 'wb')", "gzip.GzipFile(p, 'wb')", "torch.save(x, p)",
        "np.save(p, x)",
        "sqlite3.connect(p)", "tempfile.NamedTemporaryFile()", "frame.to_csv(p)", "p.touch()",
    )  # fmt: skip
    unseen = [way for way in ways if not list(writes(ast.parse(way)))]
    harmless = ("open(p)", "open(p, 'rb')", "os.open(p, os.O_RDONLY)", "os.fdopen(h, 'wb')", "a.copy()")
    assert not unseen
    assert not [way for way in harmless if list(writes(ast.parse(way)))]
    for way in ("int(x)", "map(float, x)", "click.option('-n', type=int)", "[k(x) for k in (int, float)]"):
        assert list(numbers_of_text(ast.parse(way))), way
    for way in ("def f(x: int) -> float | None: ...", "isinstance(x, int | float)", "y: dict[str, int] = {}"):
        assert not list(numbers_of_text(ast.parse(way))), way
