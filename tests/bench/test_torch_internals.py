"""Private names of torch: in the door modules alone, all there, and missed loudly where they are not."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from fsdpbench.base import torch_internals
from fsdpbench.base.torch_internals import TorchInternalError, expect, patch, replace
from fsdpbench.impl.shared import torch_internals as impl_internals
from fsdpbench.script.cuda.refusals import Replacements

ROOT = Path(__file__).resolve().parents[2]
DOORS = {"fsdpbench/base/torch_internals.py", "impl/shared/torch_internals.py"}
LINKS = tuple(f"fsdpbench/{name}/" for name in ("impl", "reports", "workloads"))
_ASSIGNMENTS = ast.Assign | ast.AnnAssign
DOTTED = re.compile(r"torch(\.\w+)+")


def is_private(path: str) -> bool:
    """Operators are not: the dispatcher finds them by their schema's name, which scripts see in traces."""
    if path.startswith("torch.ops."):
        path = ".".join(path.split(".")[5:])
    return any(part.startswith("_") and not part.startswith("__") for part in path.split("."))


class PrivateUses:
    """Dotted names that begin at torch and pass something private, however they are reached: by import, by an
    alias of a module or class, by `getattr(torch.x, "_y")`, or as the text of a whole string."""

    def __init__(self, tree: ast.Module) -> None:
        self.found: set[str] = set()
        self._means: dict[str, str] = {}
        nodes = list(ast.walk(tree))
        naming = [each for each in nodes if isinstance(each, ast.Import | ast.ImportFrom | _ASSIGNMENTS)]
        for node in (*naming, *naming):  # whatever a name means anywhere in the file; an alias of an alias
            self._learn(node)
        for node in nodes:
            self._look(node)

    def _learn(self, node: ast.AST) -> None:
        if isinstance(node, ast.Import):
            for name in node.names:
                if name.name.split(".")[0] == "torch":
                    self._means[name.asname or "torch"] = name.name if name.asname else "torch"
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            for name in node.names:
                self._means[name.asname or name.name] = f"{node.module}.{name.name}"
        elif isinstance(node, _ASSIGNMENTS) and node.value is not None:
            path = self._path(node.value)
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                if path is not None and isinstance(target, ast.Name):
                    self._means[target.id] = path

    def _path(self, node: ast.AST) -> str | None:
        if isinstance(node, ast.Name):
            return self._means.get(node.id)
        if isinstance(node, ast.Attribute):
            owner = self._path(node.value)
            return None if owner is None else f"{owner}.{node.attr}"
        return None

    def _note(self, path: str | None) -> None:
        if path is not None and is_private(path):
            self.found.add(path)

    def _look(self, node: ast.AST) -> None:
        if isinstance(node, ast.Attribute):
            self._note(self._path(node))
        elif isinstance(node, ast.Constant):
            if isinstance(node.value, str) and DOTTED.fullmatch(node.value):
                self._note(node.value)
        elif isinstance(node, ast.Call) and _is_owner(node):
            owners = [path for path in map(self._path, node.args) if path is not None]
            texts = [a.value for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str)]
            for text in [*texts, *(keyword.arg or "" for keyword in node.keywords)]:
                if owners and text.isidentifier():
                    self._note(f"{owners[0]}.{text}")
        elif isinstance(node, ast.Import):
            for name in node.names:
                self._note(name.name if name.name.startswith("torch.") else None)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            for name in node.names:
                self._note(f"{node.module}.{name.name}")


def _is_owner(call: ast.Call) -> bool:
    """Whether a call names attributes of its first argument."""
    function = call.func
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    return name in {"getattr", "hasattr", "setattr", "delattr", "replace", "expect", "wrap"}


def private_uses(source: str) -> set[str]:
    return PrivateUses(ast.parse(source)).found


@pytest.mark.parametrize(
    ("source", "path"),
    [
        ("import torch\ntorch._C._x()", "torch._C._x"),
        ("import torch._dynamo", "torch._dynamo"),
        ("from torch.utils import _pytree", "torch.utils._pytree"),
        (
            "import torch.distributed as dist\ndist.distributed_c10d._get()",
            "torch.distributed.distributed_c10d._get",
        ),
        ("import torch\ncuda: object = torch.cuda\ncuda.nvtx._nvtx = 1", "torch.cuda.nvtx._nvtx"),
        ("import torch\nsetattr(torch.cuda, '_lazy_init', 1)", "torch.cuda._lazy_init"),
        ("import torch\nreplacements.wrap(torch._C, '_x', f)", "torch._C._x"),
        ("import torch\nreplace(torch.cuda, _x=1)", "torch.cuda._x"),
        ("NAME = 'torch._functorch.config'", "torch._functorch.config"),
        ("import torch\ntorch.ops.aten._softmax.default._op_dk", "torch.ops.aten._softmax.default._op_dk"),
    ],
)
def test_each_way_to_a_private_name_is_seen(source: str, path: str) -> None:
    assert path in private_uses(source)


@pytest.mark.parametrize(
    "source",
    [
        "tensor._base",
        "module._parameters",
        "import torch\ntorch.__version__",
        "import torch\ntorch.ops.aten._softmax",
    ],
)
def test_attributes_of_objects_are_not_meant(source: str) -> None:
    assert private_uses(source) == set()


def test_no_file_but_the_doors_has_a_private_name_of_torch() -> None:
    files = [
        path for top in ("fsdpbench", "impl", "workloads", "reports") for path in (ROOT / top).rglob("*.py")
    ]
    names = {str(path.relative_to(ROOT)): path for path in files}
    names = {name: path for name, path in names.items() if not name.startswith(LINKS) and name not in DOORS}
    assert len(names) > 200
    texts = {name: path.read_text(encoding="utf-8") for name, path in names.items()}
    found = {name: sorted(private_uses(text)) for name, text in texts.items() if "torch" in text}
    assert {name: uses for name, uses in found.items() if uses} == {}


@pytest.mark.parametrize("door", [torch_internals, impl_internals], ids=["fsdpbench", "impl"])
def test_this_torch_has_them_all(door: types.ModuleType) -> None:
    assert door.missing() == []


@pytest.mark.parametrize("door", [torch_internals, impl_internals], ids=["fsdpbench", "impl"])
def test_each_name_is_used_and_each_used_name_is_there(door: types.ModuleType) -> None:
    packages = ["impl"] if door is impl_internals else ["fsdpbench", "workloads"]
    texts = {
        path: path.read_text(encoding="utf-8")
        for package in packages
        for path in (ROOT / package).rglob("*.py")
        if not str(path.relative_to(ROOT)).startswith(LINKS) and str(path.relative_to(ROOT)) not in DOORS
    }
    importing = [text for text in texts.values() if "torch_internals" in text]
    used = {
        alias.name
        for text in importing
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.ImportFrom) and (node.module or "").endswith("torch_internals")
        for alias in node.names
    }
    assert {name for name in used if not hasattr(door, name)} == set()
    quoted = {name for name in door.INTERNALS if any(f'"{name}"' in text for text in texts.values())}
    assert set(door.INTERNALS) - used - quoted == set()


def members_used(tree: ast.AST) -> set[tuple[str, str]]:
    """Names of the door, each with an attribute that a file reads or replaces."""
    door = {
        alias.asname or alias.name: alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module == "fsdpbench.base.torch_internals"
        for alias in node.names
    }
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            owner = node.value
            if isinstance(owner, ast.Call) and ast.unparse(owner.func) == "find":
                found.add((ast.literal_eval(owner.args[0]), node.attr))
            elif isinstance(owner, ast.Name) and owner.id in door:
                found.add((door[owner.id], node.attr))
        elif isinstance(node, ast.Tuple) and len(node.elts) > 1:  # an owner and its member, to be replaced
            owner, member = node.elts[:2]
            if (
                isinstance(owner, ast.Name)
                and owner.id in door
                and isinstance(getattr(member, "value", None), str)
            ):
                found.add((door[owner.id], ast.literal_eval(member)))
        elif isinstance(node, ast.Call) and node.args and _is_owner(node):
            owner = node.args[0]
            if isinstance(owner, ast.Name) and owner.id in door:
                texts = [each.value for each in node.args[1:] if isinstance(each, ast.Constant)]
                names = [*texts, *(keyword.arg for keyword in node.keywords if keyword.arg)]
                found |= {(door[owner.id], str(name)) for name in names}
    return {(name, member) for name, member in found if name in torch_internals.INTERNALS}


def test_the_door_lists_the_members_that_are_used_of_a_module() -> None:
    used = {
        (name, member)
        for path in (ROOT / "fsdpbench").rglob("*.py")
        if not str(path.relative_to(ROOT)).startswith(LINKS)
        for text in [path.read_text(encoding="utf-8")]
        if "torch_internals" in text
        for name, member in members_used(ast.parse(text))
        if not member.startswith("__")
    }
    listed = {(name, member) for name, each in torch_internals.INTERNALS.items() for member in each.members}
    assert used == listed


def test_a_member_that_is_gone_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    half = torch_internals.Internal("torch.utils._pytree", "nothing", members=("tree_map", "moved_away"))
    monkeypatch.setitem(torch_internals.INTERNALS, "half", half)
    assert torch_internals.missing() == [
        f"torch {torch.__version__} has no torch.utils._pytree.moved_away, needed for nothing: "
        "install a version of torch that has it"
    ]


@pytest.mark.parametrize("door", [torch_internals, impl_internals], ids=["fsdpbench", "impl"])
def test_a_name_that_is_gone_is_reported(door: types.ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch._C, "_current_graph_task_id")
    monkeypatch.delitem(vars(door), "current_graph_task_id", raising=False)
    (sentence,) = door.missing()
    assert sentence.startswith(
        f"torch {torch.__version__} has no torch._C._current_graph_task_id, needed for "
    )
    with pytest.raises(door.TorchInternalError, match=re.escape(sentence)):
        door.current_graph_task_id  # noqa: B018


def test_a_module_that_is_gone_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = torch_internals.Internal("torch.utils._moved_away:f", "nothing")
    monkeypatch.setitem(torch_internals.INTERNALS, "moved", gone)
    assert torch_internals.missing() == [
        f"torch {torch.__version__} has no torch.utils._moved_away.f, needed for nothing: "
        "install a version of torch that has it"
    ]


@pytest.mark.parametrize(("path", "members"), [("torch.utils._moved_away:f", ()), ("torch.utils", ("gone",))])
def test_a_name_of_some_versions_is_none_in_others(
    path: str, members: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    optional = torch_internals.Internal(path, "nothing", only_in="2.11", members=members)
    monkeypatch.setitem(torch_internals.INTERNALS, "moved", optional)
    assert torch_internals.missing() == []
    assert torch_internals.find("moved") is None
    patch("moved", lambda original: pytest.fail("there is nothing to patch"))


def test_a_door_asked_for_another_name_has_none() -> None:
    assert not hasattr(torch_internals, "no_such_name")
    assert not hasattr(impl_internals, "no_such_name")


def test_a_patch_of_a_private_name_that_is_gone_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed.fsdp._fully_shard import _fsdp_param

    monkeypatch.delattr(_fsdp_param, "_chunk_with_empty")
    with pytest.raises(
        TorchInternalError, match=r"torch 2\.\S+ has no torch\.\S+\._fsdp_param\._chunk_with_empty"
    ):
        patch("chunk_with_empty", lambda original: original)
    assert not hasattr(_fsdp_param, "_chunk_with_empty")


def test_a_replacement_of_what_is_gone_refuses_and_changes_nothing() -> None:
    owner = types.SimpleNamespace(there=1)
    with pytest.raises(TorchInternalError, match="gone"):
        replace(owner, there=2, gone=3)
    assert vars(owner) == {"there": 1}


@pytest.mark.parametrize(
    ("owner", "named"),
    [(torch.cuda, "torch.cuda.gone"), (torch.nn.RMSNorm, "torch.nn.modules.normalization.RMSNorm.gone")],
)
def test_what_is_gone_is_called_by_its_full_name(owner: object, named: str) -> None:
    with pytest.raises(TorchInternalError, match=re.escape(f"torch {torch.__version__} has no {named}, ")):
        expect(owner, "gone")


def test_names_of_scripts_refuse_to_wrap_what_is_gone() -> None:
    with pytest.raises(TorchInternalError, match=r"has no torch\.distributed\.gone, "):
        Replacements().wrap(torch.distributed, "gone", lambda function: function)


def test_names_of_scripts_refuse_what_no_module_of_torch_holds() -> None:
    def nowhere() -> None: ...

    replacements = Replacements()
    replacements.add(nowhere, print)
    with pytest.raises(TorchInternalError, match="nowhere"):
        replacements.apply()


SIMULATION_WITHOUT = """
import importlib, torch
from fsdpbench.base.errors import BenchError
from fsdpbench.sim.torch_device.patches.torch_patches import apply_patches
from fsdpbench.sim.simulation import preload
from fsdpbench.sim.torch_device.accelerator import ACCELERATOR
preload()
delattr(importlib.import_module({owner!r}), {name!r})
try:
    apply_patches(ACCELERATOR)
except BenchError as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        pytest.param("torch.accelerator", "max_memory_reserved", marks=pytest.mark.campaign),
        pytest.param("torch.distributed", "gather_object", marks=pytest.mark.campaign),
        ("torch.nn.parallel.distributed", "_verify_param_shape_across_processes"),
    ],
)
def test_a_simulation_refuses_a_torch_without_what_it_patches(in_forks: Any, owner: str, name: str) -> None:
    (done,) = in_forks(SIMULATION_WITHOUT.format(owner=owner, name=name), [[]])
    assert f"torch {torch.__version__} has no {owner}.{name}, needed for" in done.stdout, done.stderr


def test_the_doors_import_no_heavy_module() -> None:
    program = (
        "import sys, torch; before = set(sys.modules);"
        "import fsdpbench.base.torch_internals;"
        "print([name for name in set(sys.modules) - before if name.startswith('torch')])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.stdout == "[]\n", done.stderr
