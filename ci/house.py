"""Count the source: files, lines, grain, untyped data, rooms, words; with the ceilings that may only fall.

    python ci/house.py            prints the counts, a line each, with their ceilings
    python ci/house.py --check    prints what is over its ceiling, and exits with 1 if anything is

Ceilings are in `house.toml`. Lower one when its count has fallen; none is raised. A line of code holds a
token other than a comment or a docstring.
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tokenize
import tomllib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[1]
CEILINGS = Path(__file__).with_suffix(".toml")
PACKAGES = ("fsdpbench", "impl", "workloads", "reports")
SHORT, LONG = 40, 600  # lines of code below which a file is a fragment; lines above which it is too long
_LAYOUT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}
_DIALECT = re.compile(r"(?:What|Of|Those|The same|How many|Until now|The other way round)\b")
_OPEN = re.compile(r"(?:dict|Mapping)\[str, (?:Any|object)\]")
_DOCUMENTED_FROM = 4  # parameters
Function = ast.FunctionDef | ast.AsyncFunctionDef
Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Source:
    """A module: its path from the root and its text."""

    path: str
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        """Return the syntax tree."""
        return ast.parse(self.text)

    @cached_property
    def module(self) -> str:
        """Return the dotted name below `fsdpbench`, such as `fsdpbench.impl.runtime`."""
        parts = Path(self.path).with_suffix("").parts
        parts = parts[:-1] if parts[-1] == "__init__" else parts
        return ".".join(parts if parts[0] == "fsdpbench" else ("fsdpbench", *parts))

    @property
    def is_face(self) -> bool:
        """Return whether this is the face of a package or the program's start."""
        return Path(self.path).name in ("__init__.py", "__main__.py")

    @cached_property
    def lines(self) -> int:
        """Return the number of lines."""
        return len(self.text.splitlines())

    @cached_property
    def comments(self) -> int:
        """Return the number of lines with a comment."""
        return sum(each.type == tokenize.COMMENT for each in self._tokens)

    @cached_property
    def code(self) -> int:
        """Return the number of lines of code: without blank lines, comments and docstrings."""
        lines: set[int] = set()
        for each in self._tokens:
            if each.type not in _LAYOUT:
                lines.update(range(each.start[0], each.end[0] + 1))
        for node in self.documented:
            if ast.get_docstring(node, clean=False) is not None:
                text = node.body[0]
                lines.difference_update(range(text.lineno, (text.end_lineno or text.lineno) + 1))
        return len(lines)

    @cached_property
    def _tokens(self) -> list[tokenize.TokenInfo]:
        return list(tokenize.generate_tokens(io.StringIO(self.text).readline))

    @cached_property
    def documented(self) -> list[Documented]:
        """Return all nodes that may have a docstring."""
        return [node for node in ast.walk(self.tree) if isinstance(node, Documented)]

    @cached_property
    def docstrings(self) -> list[str]:
        """Return all docstrings."""
        found = (ast.get_docstring(node) for node in self.documented)
        return [text for text in found if text]

    @cached_property
    def imported(self) -> set[str]:
        """Return the dotted names of what this module imports, lazily or not."""
        found: set[str] = set()
        package = self.module.split(".") if self.is_face else self.module.split(".")[:-1]
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                found.update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                above = package[: len(package) - node.level + 1] if node.level else []
                module = ".".join([*above, *filter(None, [node.module])])
                found.update(f"{module}.{alias.name}" for alias in node.names)
        return found


@dataclass(frozen=True)
class House:
    """All modules of the four packages; links are not followed."""

    sources: list[Source] = field(default_factory=lambda: list(tracked()))

    def below(self, *folders: str) -> list[Source]:
        """Return the modules in these folders, named from the root."""
        return [each for each in self.sources if each.path.startswith(tuple(f"{name}/" for name in folders))]

    @cached_property
    def by_module(self) -> dict[str, Source]:
        """Return the modules by dotted name."""
        return {each.module: each for each in self.sources}

    def closure(self, module: str) -> set[str]:
        """Return the dotted names of the modules that `module` needs, itself included."""
        found, todo = {module}, [module]
        while todo:
            for name in self.by_module[todo.pop()].imported:
                known = next(
                    (each for each in (name, name.rpartition(".")[0]) if each in self.by_module), None
                )
                if known is not None and known not in found:
                    found.add(known)
                    todo.append(known)
        return found

    def rooms(self) -> set[str]:
        """Return the rooms: the packages and single modules right below `fsdpbench`."""
        return {name.split(".")[1] for name in self.by_module if "." in name}

    def arrows(self) -> set[tuple[str, str]]:
        """Return the pairs (importing room, imported room)."""
        found = set()
        for each in self.sources:
            parts = each.module.split(".")
            for name in each.imported:
                target = name.split(".")
                if (
                    len(parts) > 1
                    and len(target) > 1
                    and target[0] == "fsdpbench"
                    and target[1] in self.rooms()
                ):
                    found.add((parts[1], target[1]))
        return {(one, other) for one, other in found if one != other}


def tracked() -> Iterator[Source]:
    """Yield the modules that git tracks in the four packages."""
    command = ["git", "ls-files", "-z", "--", *(f"{name}/*.py" for name in PACKAGES)]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for path in sorted(filter(None, listed.split("\0"))):
        if (ROOT / path).exists():
            yield Source(path, (ROOT / path).read_text(encoding="utf-8"))


def private_imports(sources: Iterable[Source]) -> int:
    """Return how many private names a module imports from another module of the project."""
    count = 0
    for each in sources:
        for name in each.imported:
            module, _, last = name.rpartition(".")
            if name.startswith("fsdpbench.") and not module.endswith("torch_internals"):
                count += last.startswith("_") and not last.startswith("__")
    return count


def undocumented_parameters(sources: Iterable[Source]) -> int:
    """Return the number of public functions of four or more parameters whose docstring names none of them."""
    count = 0
    for each in sources:
        for node in ast.walk(each.tree):
            if not isinstance(node, Function) or node.name.startswith("_"):
                continue
            names = [arg.arg for arg in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
            names = [name for name in names if name not in ("self", "cls")]
            text = ast.get_docstring(node) or ""
            if len(names) >= _DOCUMENTED_FROM and not any(re.search(rf"\b{name}\b", text) for name in names):
                count += 1
    return count


def uses_of_name(sources: Iterable[Source], name: str) -> int:
    """Return the number of modules whose code uses `name`."""
    return sum(
        any(isinstance(node, ast.Name) and node.id == name for node in ast.walk(each.tree))
        for each in sources
        if name in each.text
    )


def words_in_documents() -> int:
    """Return the number of words in `docs`, README, CHANGELOG and CONTRIBUTING, without generated pages."""
    pages = [
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / f"{name}.md" for name in ("README", "CHANGELOG", "CONTRIBUTING")),
    ]
    texts = [path.read_text(encoding="utf-8") for path in pages]
    return sum(len(text.split()) for text in texts if not text.startswith("<!-- Made by"))


Measure = Callable[[House], float]
MEASURES: dict[str, Measure] = {
    "files": lambda house: len(house.sources),
    "lines": lambda house: sum(each.lines for each in house.sources),
    "lines_of_code": lambda house: sum(each.code for each in house.sources),
    "median_lines_of_code": lambda house: median(each.code for each in house.sources),
    "fragments": lambda house: sum(each.code < SHORT and not each.is_face for each in house.sources),
    "long_files": lambda house: sum(each.lines > LONG for each in house.sources),
    "impl_files": lambda house: len(house.below("impl")),
    "impl_lines_of_code": lambda house: sum(each.code for each in house.below("impl")),
    "fully_shard_lines_of_code": lambda house: sum(
        house.by_module[name].code for name in house.closure("fsdpbench.impl.fsdp2.fully_shard")
    ),
    "impl_comments_percent": lambda house: round(
        100
        * sum(each.comments for each in house.below("impl"))
        / sum(each.lines for each in house.below("impl")),
        1,
    ),
    "rooms": lambda house: len(house.rooms()),
    "arrows": lambda house: len(house.arrows()),
    "untyped_dictionaries": lambda house: sum(each.text.count("dict[str, Any]") for each in house.sources),
    "open_mappings": lambda house: sum(len(_OPEN.findall(each.text)) for each in house.sources),
    "private_imports": lambda house: private_imports(house.sources),
    "accelerator_files": lambda house: uses_of_name(house.below("fsdpbench"), "ACCELERATOR"),
    "dialect_docstrings": lambda house: sum(
        bool(_DIALECT.match(text)) for each in house.sources for text in each.docstrings
    ),
    "told": lambda house: sum(len(re.findall(r"\btold\b", each.text)) for each in house.sources),
    "undocumented_parameters": lambda house: undocumented_parameters(house.sources),
    "words_in_documents": lambda _: words_in_documents(),
}


def main(arguments: list[str]) -> int:
    """Print the counts; with `--check` only those over their ceiling. Return the exit code."""
    ceilings = tomllib.loads(CEILINGS.read_text(encoding="utf-8"))["ceilings"]
    if unknown := set(ceilings) - set(MEASURES):
        raise SystemExit(f"{CEILINGS.name}: no such count: {', '.join(sorted(unknown))}")
    house, over = House(), 0
    for name, measure in MEASURES.items():
        count, ceiling = measure(house), ceilings.get(name)
        too_many = ceiling is not None and count > ceiling
        over += too_many
        if too_many or "--check" not in arguments:
            bound = "" if ceiling is None else f"  (at most {ceiling:,})"
            print(f"{name:28}{count:>10,}{bound}{'  TOO MANY' if too_many else ''}")
    return 1 if over and "--check" in arguments else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
