"""Files and names in backquotes exist: in pages, in the READMEs of packages, in docstrings and comments."""

from __future__ import annotations

import ast
import fnmatch
import io
import re
import subprocess
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path, PurePosixPath

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("fsdpbench", "impl", "reports", "workloads")
_BLOCK = re.compile(r"^( *)```.*?^\1```", re.MULTILINE | re.DOTALL)
_QUOTED = re.compile(r"`+([^`\n]+)`+")
_FILE = re.compile(r"(?:(?:\.{1,2}|\.?[\w-]+)/)*[\w*-]+\.(?:py|toml|csv|sh|md|jinja|yml)")
_PLAIN = re.compile(
    r"(?<![\w/.`])(?:docs|ci|tests|fsdpbench|impl|reports|workloads)/[\w./-]+\.(?:py|md|toml|csv|txt|sh|json)\b"
)
_FOLDER = re.compile(r"(?:fsdpbench|impl|reports|workloads|tests|ci|docs)(?:/[\w-]+)+/?")
_DOTTED = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+")
_FILE_AND_NAME = re.compile(r"`([\w/]+\.py)` `([A-Za-z_]\w*)`|`([\w/]+\.py)::(\w+)`")
# Heads that name files of the torch or llm-foundry that they imitate.
IMITATING = ("replacements.py", "software.py")
# Files of users, files that a command writes, and those of other projects.
OF_OTHERS = {
    "best.toml", "best_*.py", "fa_fwd_tables.csv", "gemm_tables.csv", "impl.py", "mine.toml", "my_systems.py",
    "nccl_intranode_tables.csv", "run.sh", "space.toml", "sweep.toml", "t.py", "train.py", "workloads.py",
    "best_SYSTEM.py", "dist_strategy.py", "mosaic_fsdp.py", "nlp.py", "trainer.py",
}  # fmt: skip


@cache
def tracked() -> tuple[str, ...]:
    """Return the paths of all files of the repository, from its root."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return tuple(name for name in listed.stdout.splitlines() if (ROOT / name).is_file())


@cache
def base_names() -> frozenset[str]:
    """Return the names of all files without their folders."""
    return frozenset(PurePosixPath(name).name for name in tracked())


def prose(source: str) -> str:
    """Return the comments and the strings that stand alone, as docstrings do, of a source file."""
    found, fresh = [], True
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT or (token.type == tokenize.STRING and fresh):
            found.append(token.string)
        if token.type != tokenize.COMMENT:
            fresh = token.type in (tokenize.NEWLINE, tokenize.NL, tokenize.INDENT, tokenize.DEDENT)
    return "\n".join(found)


@cache
def texts() -> dict[str, str]:
    """Return the text of each page, and the docstrings and comments of each source file, by path."""
    found = {}
    for name in tracked():
        path = ROOT / name
        inside = name.startswith((*(f"{package}/" for package in PACKAGES), "ci/"))
        if name.endswith(".md") and not name.startswith(".github"):
            found[name] = _BLOCK.sub("", path.read_text(encoding="utf-8"))
        elif inside and name.endswith(".py") and path.name not in IMITATING:
            found[name] = prose(path.read_text(encoding="utf-8"))
        elif inside and name.endswith(".toml"):
            lines = path.read_text(encoding="utf-8").splitlines()
            found[name] = "\n".join(line for line in lines[:5] if line.startswith("#"))
    return found


def exists(file: str, page: str) -> bool:
    """Return whether `file` is in the repository: from the root, or from the page's folder."""
    if "/" not in file:
        return file in base_names() or ("*" in file and bool(fnmatch.filter(base_names(), file)))
    near = (ROOT, (ROOT / page).parent, *(ROOT / package for package in (*PACKAGES, "tests/impl", "docs")))
    return any(any(base.glob(file)) if "*" in file else (base / file).exists() for base in near)


def files_in(text: str) -> Iterator[str]:
    """Yield the files and folders that a text names: in backquotes, or by a path from the root."""
    for token in _QUOTED.findall(text):
        file = token.partition("::")[0]
        if _FILE.fullmatch(file) or _FOLDER.fullmatch(file):
            yield file
    yield from _PLAIN.findall(text)


@cache
def sources() -> dict[str, str]:
    """Return the text of each source file by its dotted name, as imported from the root."""
    names = [name for name in tracked() if name.endswith(".py") and name.startswith(PACKAGES)]
    return {
        name.removesuffix(".py").removesuffix("/__init__").replace("/", "."): (ROOT / name).read_text()
        for name in names
    }


@cache
def tree_of(module: str) -> ast.Module:
    """Return the syntax tree of a source file."""
    return ast.parse(sources()[module])


def names_of(tree: ast.AST) -> set[str]:
    """Return the names that a module or class defines or imports, and those set on `self`."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            found.add(node.attr)
        elif isinstance(node, ast.alias):
            found.add(node.asname or node.name)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isidentifier():
            found.add(node.value)  # `__all__`, tables of lazy imports
    return found


@cache
def defining() -> dict[str, list[str]]:
    """Return the modules that define a class, by the class's name."""
    found = defaultdict(list)
    for module, text in sources().items():
        for name in re.findall(r"^ *class (\w+)", text, re.MULTILINE):
            found[name].append(module)
    return dict(found)


def classes(name: str) -> list[ast.ClassDef]:
    """Return the classes of this name."""
    nodes = (node for module in defining()[name] for node in ast.walk(tree_of(module)))
    return [node for node in nodes if isinstance(node, ast.ClassDef) and node.name == name]


def has_member(name: str, member: str) -> bool:
    """Return whether a class of the packages has the member, or a base that is not theirs."""
    for node in classes(name):
        bases = [ast.unparse(base).partition("[")[0] for base in node.bases]
        if member in names_of(node):
            return True
        if any(base not in defining() or has_member(base, member) for base in bases):
            return True
    return False


def is_there(dotted: str) -> bool:
    """Return whether a dotted name exists, if it is one of this project."""
    first, *rest = dotted.split(".")
    if first in defining():
        return has_member(first, rest[0])
    if first not in PACKAGES:
        return True
    if first == "fsdpbench" and rest[0] in PACKAGES:
        first, rest = rest[0], rest[1:]
    parts = [first, *rest]
    for end in range(len(parts), 0, -1):
        if (module := ".".join(parts[:end])) in sources():
            return end == len(parts) or parts[end] in names_of(tree_of(module))
    return False


@pytest.mark.parametrize("what", ["files", "names"])
def test_pointers_lead_somewhere(what: str) -> None:
    wrong = []
    for page, text in texts().items():
        if what == "files":
            named = {file for file in files_in(text) if PurePosixPath(file).name not in OF_OTHERS}
            wrong += [f"{page}: {file}" for file in sorted(named) if not exists(file, page)]
        else:
            dotted = {token.removesuffix("()") for token in _QUOTED.findall(text)}
            named = {token for token in dotted if _DOTTED.fullmatch(token) and not _FILE.fullmatch(token)}
            wrong += [f"{page}: {name}" for name in sorted(named) if not is_there(name)]
    assert not wrong, "\n".join(wrong)


def test_names_beside_a_file_are_in_it() -> None:
    wrong = []
    for page, text in texts().items():
        for match in _FILE_AND_NAME.finditer(text):
            file, name = match[1] or match[3], match[2] or match[4]
            found = [path for path in tracked() if path == file or path.endswith(f"/{file}")]
            if not any(name in names_of(ast.parse((ROOT / path).read_text())) for path in found):
                wrong.append(f"{page}: {file} has no {name}")
    assert not wrong, "\n".join(wrong)


def test_a_stale_pointer_is_found() -> None:
    assert not exists("fsdpbench/sim/nowhere.py", "README.md")
    assert not exists("nowhere_at_all.py", "README.md")
    assert exists("test_pointers.py", "README.md")
    assert not is_there("fsdpbench.impl.nowhere")
    assert is_there("fsdpbench.impl.fully_shard")
    assert not is_there("Unit.no_such_member")
    assert list(files_in("see `ci/x.py`, docs/y.md and `impl/runtime`")) == [
        "ci/x.py",
        "impl/runtime",
        "docs/y.md",
    ]
