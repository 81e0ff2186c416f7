"""The diff of an advice is made of the call that was seen, wherever that stands, and applies."""

from __future__ import annotations

import ast
import subprocess
from pathlib import Path
from typing import Any

import msgspec
import pytest

from fsdpbench.answers.advise.edits import Edit, NoDiffError, diff_of
from fsdpbench.base.result_sections import Place


def place(folder: Path, text: str, call: str, file: str = "train.py") -> Place:
    """A script, and where its call of that source stands, as it would be seen running."""
    (folder / file).write_bytes(text.encode())
    found = [
        node
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call) and ast.get_source_segment(text, node) == call
    ]
    assert found, f"{call} is not in the script"
    node = found[0]
    assert node.end_lineno is not None
    assert node.end_col_offset is not None
    span = node.lineno, node.end_lineno, node.col_offset, node.end_col_offset
    return Place(str(folder / file), node.lineno, "", span)


def patched(folder: Path, *edits: Edit) -> str:
    """The script after the diff, applied by `patch` and found applicable by `git apply`."""
    diff = diff_of(edits, str(folder))
    checked = ["git", "apply", "--check", "-"]
    subprocess.run(checked, input=diff.encode(), cwd=folder, check=True, capture_output=True)
    subprocess.run(["patch", "-p1", "-s"], input=diff.encode(), cwd=folder, check=True, capture_output=True)
    return (folder / "train.py").read_bytes().decode()


ON = ("argument", ("True",))
KEEP = ("keyword", ("reshard_after_forward", "False"))
FUSED = ("keyword", ("fused", "True"))
CKPT = "x = ckpt(block, x, use_reentrant=False)\n"
WRAPPER = "from torch.wrappers import checkpoint_wrapper as ptd\n"
CASES: dict[str, tuple[str, str, tuple[str, tuple[Any, ...]], str]] = {
    # text, call, edit, what the script is afterwards
    "statements": ("a = f(1); m.sync(False); b = 2\n", "m.sync(False)", ON,
                   "a = f(1); m.sync(True); b = 2\n"),
    "loop on a line": (
        "for p in m.modules(): p.sync(False)\n", "p.sync(False)", ON, "for p in m.modules(): p.sync(True)\n",
    ),
    "conditional": (
        "[p.sync(False) if p.ok() else None for p in m.parts()]\n", "p.sync(False)", ON,
        "[p.sync(True) if p.ok() else None for p in m.parts()]\n",
    ),
    "lambda": ("off = lambda p: p.sync(False)\n", "p.sync(False)", ON, "off = lambda p: p.sync(True)\n"),
    "several lines": (
        "m = shard(\n    block,\n    mesh=mesh,  # a comment, with a (\n)\n",
        "shard(\n    block,\n    mesh=mesh,  # a comment, with a (\n)", KEEP,
        "m = shard(\n    block,\n    mesh=mesh, reshard_after_forward=False,  # a comment, with a (\n)\n",
    ),
    "no argument": ("o = Adam()\n", "Adam()", FUSED, "o = Adam(fused=True)\n"),
    "generator": (
        "o = Adam(p for p in m.parameters())\n", "Adam(p for p in m.parameters())", FUSED,
        "o = Adam((p for p in m.parameters()), fused=True)\n",
    ),
    "replaced": (
        "shard(b, reshard_after_forward=keep)\n", "shard(b, reshard_after_forward=keep)", KEEP,
        "shard(b, reshard_after_forward=False)\n",
    ),
    "in parentheses": ("o = Adam((a + b))\n", "Adam((a + b))", FUSED, "o = Adam((a + b), fused=True)\n"),
    "by position": (
        "d = DataLoader(data, 8)\n", "DataLoader(data, 8)", ("doubled", ("batch_size",)),
        "d = DataLoader(data, 2 * 8)\n",
    ),
    "dropped first": (
        "F(m, mesh=mesh, x=1)\n", "F(m, mesh=mesh, x=1)", ("drop", ("mesh",)), "F(m, x=1)\n",
    ),
    "no end of line": ("m.sync(False)", "m.sync(False)", ON, "m.sync(True)"),
    "other lines": ("x = 'ä'; m.sync(False)\r\ny = 1\r\n", "m.sync(False)", ON,
                    "x = 'ä'; m.sync(True)\r\ny = 1\r\n"),
    "left out": ("if True:\n    wait()\n", "wait()", ("without", ()), "if True:\n    pass\n"),
    "seldom": (
        "for i, b in enumerate(d):\n    print(b.item())\n", "b.item()", ("seldom", (100,)),
        "for i, b in enumerate(d):\n    if i % 100 == 0: print(b.item())\n",
    ),
    "test": (
        "for i in range(9):\n    if nan(x): stop()\n", "nan(x)", ("seldom", (100,)),
        "for i in range(9):\n    if i % 100 == 0 and (nan(x)): stop()\n",
    ),
    "of a step": (
        "for i in range(9):\n    for b in c:\n        print(x.item())\n    o.step()\n", "x.item()",
        ("seldom", (100,)),
        "for i in range(9):\n    for b in c:\n        if i % 100 == 0: print(x.item())\n    o.step()\n",
    ),
    "detached": ("t += x.item()\n", "x.item()", ("detached", ()), "t += x.detach()\n"),
    "recomputed": (
        "x = checkpoint(block, x, mask, use_reentrant=False)\n",
        "checkpoint(block, x, mask, use_reentrant=False)", ("bare", (("use_reentrant",),)),
        "x = block(x, mask)\n",
    ),
    "recomputed by another name": (
        f"from a import b\nfrom torch.utils.checkpoint import checkpoint as ckpt\n{CKPT}",
        "ckpt(block, x, use_reentrant=False)", ("bare", (("use_reentrant",),)),
        "from a import b\nfrom torch.utils.checkpoint import checkpoint as ckpt\nx = block(x)\n",
    ),
    "recomputed by a partial": (
        "self.ckpt = functools.partial(checkpoint, use_reentrant=False)\nx = self.ckpt(block, x)\n",
        "self.ckpt(block, x)", ("bare", (("use_reentrant",),)),
        "self.ckpt = functools.partial(checkpoint, use_reentrant=False)\nx = block(x)\n",
    ),
    "wrapped by another name": (
        f"{WRAPPER}wrap = partial(ptd, checkpoint_impl=impl)\nm.blocks[i] = wrap(block)\n",
        "wrap(block)", ("bare", ((),)),
        f"{WRAPPER}wrap = partial(ptd, checkpoint_impl=impl)\nm.blocks[i] = block\n",
    ),
    "recomputed by Hugging Face": (
        "model.gradient_checkpointing_enable()\nloss = model(x).loss\n",
        "model(x)", ("bare", ((),)),
        "pass\nloss = model(x).loss\n",
    ),
    "before": ("for b in m.layers: shard(b)\n", "shard(b)", ("before", ("{0}.compile()",)),
               "for b in m.layers: b.compile(); shard(b)\n"),
    "after": (
        "def f():\n    for b in m.layers:\n        shard(b)\n    return m\n",
        "shard(b)", ("around", ("layers",)),
        "def f():\n    for b in m.layers:\n        shard(b)\n    shard(m)\n    return m\n",
    ),
    "imported": (
        '"""Doc."""\nfrom __future__ import annotations\nimport os\nf(1)\n',
        "f(1)", ("imports", ("import torch",)),
        '"""Doc."""\nfrom __future__ import annotations\nimport torch\nimport os\nf(1)\n',
    ),
    "imported before": ("import torch.nn as nn, torch\nf(1, 2)\n", "f(1, 2)", ("keyword", ("a", "torch.b")),
                        "import torch.nn as nn, torch\nf(1, 2, a=torch.b)\n"),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_call_is_changed_where_it_stands(name: str, tmp_path: Path) -> None:
    text, call, (do, more), expected = CASES[name]
    assert patched(tmp_path, Edit(place(tmp_path, text, call), do, more)) == expected


REFUSED = {
    "unknown arguments": ("Adam(p, **options)\n", "Adam(p, **options)", FUSED, "options"),
    "no counter": ("while True:\n    print(x.item())\n", "x.item()", ("seldom", (100,)), "counts its steps"),
    "counts epochs": (
        "for e in range(9):\n    for b in d:\n        print(x.item())\n        o.step()\n",
        "x.item()",
        ("seldom", (100,)),
        "counts its steps",
    ),
    "its value is needed": (
        "for i in range(9): y = x.item()\n",
        "x.item()",
        ("seldom", (9,)),
        "value is needed",
    ),
    "not written": ("F(m)\n", "F(m)", ("drop", ("mesh",)), "mesh= is not written"),
    "another function's arguments": (
        "ckpt = partial(checkpoint, mask=m)\nx = ckpt(block, x)\n",
        "ckpt(block, x)",
        ("bare", (("use_reentrant",),)),
        "ckpt decides",
    ),
    "chosen elsewhere": (
        "if on: model.gradient_checkpointing_enable()\nelse: m.gradient_checkpointing_enable()\nmodel(x)\n",
        "model(x)",
        ("bare", ((),)),
        "model decides",
    ),
    "unnamed": ("shard(m[0])\n", "shard(m[0])", ("before", ("{0}.compile()",)), "not named"),
    "a loop before": ("x = f(1); y = 2\n", "f(1)", ("before", ("for a in b: c()",)), "share the line"),
    "no python": ("x = f(1)\n", "f(1)", ("argument", ("for",)), "not be valid Python"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_where_no_diff_can_be_made_the_reason_is_named(name: str, tmp_path: Path) -> None:
    text, call, (do, more), reason = REFUSED[name]
    with pytest.raises(NoDiffError, match=reason):
        diff_of([Edit(place(tmp_path, text, call), do, more)], str(tmp_path))


def test_a_call_that_is_not_the_scripts_is_not_changed(tmp_path: Path) -> None:
    at = place(tmp_path, "f(1)\n", "f(1)")
    with pytest.raises(NoDiffError, match="no file of the script"):
        diff_of([Edit(at, *ON)], str(tmp_path / "other"))
    with pytest.raises(NoDiffError, match="cannot be located"):
        diff_of([Edit(msgspec.structs.replace(at, span=(1, 1, 2, 4)), *ON)], str(tmp_path))


def test_several_edits_are_one_diff_of_several_files(tmp_path: Path) -> None:
    (tmp_path / "parts").mkdir()
    first = place(tmp_path, "F(a)\nF(b)\n", "F(a)")
    second = place(tmp_path, "F(a)\nF(b)\n", "F(b)")
    other = place(tmp_path, "F(c)\n", "F(c)", "parts/helper.py")
    edits = [Edit(each, "keyword", ("x", "1")) for each in (first, second, other)]
    assert patched(tmp_path, *edits) == "F(a, x=1)\nF(b, x=1)\n"
    assert (tmp_path / "parts/helper.py").read_text() == "F(c, x=1)\n"
