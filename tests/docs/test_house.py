"""The house keeps its bounds: sizes of files, functions, classes, and who may know the simulator's state."""

from __future__ import annotations

import ast
import csv
import re
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("impl", "fsdpbench", "workloads", "reports")
MOST_LINES = 600
MOST_LINES_OF_A_FUNCTION = 50
MOST_METHODS = 20
MOST_BYTES = 256 * 1024
Function = ast.FunctionDef | ast.AsyncFunctionDef

# What an outside interface makes long: of these the body is counted, without signature and docstring.
SIGNATURES_OF_OTHERS = {
    "impl/fsdp1/fully_sharded_data_parallel.py FullyShardedDataParallel.__init__": "torch's arguments",
    "impl/fsdp2/fully_shard.py fully_shard": "torch's arguments, with the page that documents them",
    "fsdpbench/cli/commands/calibrate.py command": "click: an option is a parameter",
    "fsdpbench/cli/commands/check.py command": "click: an option is a parameter",
    "fsdpbench/cli/commands/tune.py command": "click: an option is a parameter",
}
CLASSES_OF_OTHERS = {"impl/fsdp2/fsdp_module.py FSDPModule": "the methods of torch's FSDPModule"}

# Registered functions, patches and compiled graphs, which torch calls without our arguments, and the start.
KNOW_THE_ACCELERATOR = {
    "simulation.py",
    "torch_device/accelerator.py",
    "torch_device/compile/cuda_graphs.py",
    "torch_device/compile/plan.py",
    "torch_device/device_module.py",
    "torch_device/distributed/process_group.py",
    "torch_device/operators/host_memory.py",
    "torch_device/operators/choices.py",
    "torch_device/operators/kernels.py",
    "torch_device/operators/known_values.py",
    "torch_device/operators/special_operators.py",
    "torch_device/patches/torch_patches.py",
    "torch_device/tensors.py",
}


def sources() -> Iterator[tuple[str, str]]:
    """Names from the root and texts of all modules; links are followed nowhere."""
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            if not any(part.is_symlink() for part in path.parents if part != ROOT):
                yield str(path.relative_to(ROOT)), path.read_text()


@cache
def defined() -> list[tuple[str, Function | ast.ClassDef]]:
    """Every function and class, methods by the name of their class."""
    found: list[tuple[str, Function | ast.ClassDef]] = []
    for name, text in sources():
        if len(text.splitlines()) <= MOST_METHODS:
            continue
        stack: list[tuple[str, ast.AST]] = [("", ast.parse(text))]
        while stack:
            owner, node = stack.pop()
            for child in ast.iter_child_nodes(node):
                if isinstance(child, (Function, ast.ClassDef)):
                    inside = f"{owner}.{child.name}".lstrip(".")
                    found.append((f"{name} {inside}", child))
                    stack.append((inside, child))
                elif isinstance(child, (ast.stmt, ast.ExceptHandler, ast.match_case)):
                    stack.append((owner, child))
    return found


def lines_of_body(function: Function) -> int:
    first = function.body[1 if ast.get_docstring(function) is not None else 0]
    assert function.end_lineno is not None
    return function.end_lineno - first.lineno + 1


def is_overload(function: Function) -> bool:
    return any(isinstance(each, ast.Name) and each.id == "overload" for each in function.decorator_list)


def test_functions_are_a_screen() -> None:
    long, excused = {}, set()
    for name, node in defined():
        if not isinstance(node, Function) or is_overload(node):
            continue
        assert node.end_lineno is not None
        lines = node.end_lineno - node.lineno + 1
        if name in SIGNATURES_OF_OTHERS and lines > MOST_LINES_OF_A_FUNCTION:
            excused.add(name)
            lines = lines_of_body(node)
        if lines > MOST_LINES_OF_A_FUNCTION:
            long[name] = lines
    assert long == {}
    assert excused == set(SIGNATURES_OF_OTHERS), "an exception that none needs any more"


def test_classes_have_few_methods() -> None:
    counts = {
        name: sum(isinstance(each, Function) for each in node.body)
        for name, node in defined()
        if isinstance(node, ast.ClassDef)
    }
    large = {name for name, count in counts.items() if count > MOST_METHODS}
    assert large == set(CLASSES_OF_OTHERS)


def test_files_are_short() -> None:
    tests = ((str(path.relative_to(ROOT)), path.read_text()) for path in (ROOT / "tests").rglob("*.py"))
    counted = {name: len(text.splitlines()) for name, text in (*sources(), *tests)}
    assert {name: lines for name, lines in counted.items() if lines >= MOST_LINES} == {}


def test_no_tracked_file_is_large() -> None:
    """Weights and data that a program makes in the checkout would be cloned by everybody."""
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    paths = [ROOT / name for name in tracked.stdout.split("\0") if name]
    sizes = {str(path.relative_to(ROOT)): path.stat().st_size for path in paths if path.is_file()}
    assert sizes
    assert {name: size for name, size in sizes.items() if size > MOST_BYTES} == {}


def imported(text: str) -> set[str]:
    """The first names of the modules that a source imports by their full names, in its strings too."""
    lines = re.findall(r"^\s*(?:from (\w+)|import (\w.*))", text, re.MULTILINE)
    several = [each for _, names in lines for each in re.split(r",\s*", names)]
    return {name for name, _ in lines} | {re.split(r"\W", each)[0] for each in several}


def ambiguous(sources: dict[Path, str]) -> dict[str, set[Path]]:
    """Modules by bare name that another module of this name can be taken for.

    A folder is on the path if some module of it, of a name that no other has, is imported by its bare name.
    Names of conftest files are for type checkers only.
    """
    places: dict[str, set[Path]] = {}
    for path in sources:
        places.setdefault(path.stem, set()).add(path)
    bare = set().union(*map(imported, sources.values())) & places.keys() - {"conftest"}
    on_path = {path.parent for name in bare if len(places[name]) == 1 for path in places[name]}
    found = {name: {path for path in places[name] if path.parent in on_path} for name in bare}
    return {name: paths for name, paths in found.items() if len(paths) > 1}


def test_helpers_of_tests_are_imported_by_names_of_their_own() -> None:
    """One process may collect all folders: of two modules of a name, all would get the first imported."""
    paths = [path for folder in ("tests", "ci") for path in (ROOT / folder).rglob("*.py")]
    assert ambiguous({path: path.read_text() for path in paths}) == {}


def test_two_helpers_of_a_name_are_found() -> None:
    texts = {"a/help.py": "", "b/help.py": "", "a/one.py": "", "b/two.py": "import help, one, two"}
    sources = {Path(name): text for name, text in texts.items()}
    assert ambiguous(sources) == {"help": {Path("a/help.py"), Path("b/help.py")}}
    assert ambiguous({path: text for path, text in sources.items() if path != Path("a/help.py")}) == {}


def test_no_row_of_a_table_has_more_cells_than_columns() -> None:
    """A comma in a text that is not quoted would cut it."""
    tables = [path for package in PACKAGES for path in (ROOT / package).rglob("*.csv")]
    assert tables
    for table in tables:
        lines = [line for line in table.read_text().splitlines() if not line.startswith("#")]
        assert [row for row in csv.DictReader(lines) if None in row] == [], table


def test_state_of_the_simulator_is_passed() -> None:
    """`ACCELERATOR` is for what torch calls without our arguments; everybody else is given it."""
    using = {
        name
        for name, text in sources()
        if "ACCELERATOR" in text
        and any(isinstance(node, ast.Name) and node.id == "ACCELERATOR" for node in ast.walk(ast.parse(text)))
    }
    assert using == {f"fsdpbench/sim/{name}" for name in KNOW_THE_ACCELERATOR}
