"""Stacks as text: what a reader wants to see of them, innermost first."""

from __future__ import annotations

import os
from functools import lru_cache
from pathlib import Path

import torch

from fsdpbench.sim.followers.sanitizer.shadow import Stack

_PACKAGE_FOLDER = Path(__file__).parents[3]
# What stands between a program and the simulated device.
_OURS = tuple(
    str(_PACKAGE_FOLDER / name) + os.sep for name in ("sim", "script", "devices", "measuring", "launch")
)
_TORCH = str(Path(torch.__file__).parent) + os.sep
_PACKAGE = str(_PACKAGE_FOLDER.parent) + os.sep
_MODULE = _TORCH + os.path.join("nn", "modules", "module.py")
_MACHINERY = tuple(
    _TORCH + name
    for name in (
        "_ops.py", "utils/_python_dispatch.py", "nn/modules/module.py", "utils/_contextlib.py", "_tensor.py",
        "autograd/graph.py", "autograd/__init__.py", "_library/", "utils/_device.py", "_compile.py",
        "_dynamo/",
    )
)  # fmt: skip
_STARTERS = (os.sep + "runpy.py", os.sep + os.path.join("multiprocessing", "process.py"))
"""Below them nothing is the program's."""
_MOST_FRAMES = 12


@lru_cache(maxsize=4096)
def _line(code: object, instruction: int) -> int:
    for start, end, line in code.co_lines():  # type: ignore[attr-defined]
        if start <= instruction < end and line is not None:
            return int(line)
    return int(code.co_firstlineno)  # type: ignore[attr-defined]


def is_in_module(stack: Stack) -> bool:
    """Whether a module's call is on the stack."""
    return any(code.co_filename == _MODULE for code, _ in stack)


def frames(stack: Stack | None) -> list[str]:
    """``file:line function`` of the frames that say something: without simulator and dispatch."""
    told = []
    for code, instruction in stack or ():
        name = code.co_filename
        if name.startswith((*_OURS, *_MACHINERY, "<frozen")):
            continue
        if name.endswith(_STARTERS):
            break
        told.append(f"{_short(name)}:{_line(code, instruction)} {code.co_name}")
        if len(told) == _MOST_FRAMES:
            break
    return told


def own_line(stack: Stack | None) -> str:
    """The innermost line that is neither torch's nor the simulator's; else the innermost of all."""
    for code, instruction in stack or ():
        name = code.co_filename
        if not name.startswith((*_OURS, _TORCH, "<")):
            return f"{_short(name)}:{_line(code, instruction)}"
    told = frames(stack)
    return told[0].split(" ")[0] if told else "unknown"


def _short(name: str) -> str:
    for root, shown in ((_TORCH, "torch/"), (_PACKAGE, "")):
        if name.startswith(root):
            return shown + name.removeprefix(root)
    try:
        inside = os.path.relpath(name)
    except ValueError:
        return name
    return name if inside.startswith("..") else inside
