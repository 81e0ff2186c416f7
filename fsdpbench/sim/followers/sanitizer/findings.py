"""Findings of the sanitizer: each pair of unordered accesses once, with the number of repetitions.

- `race`: two accesses to the same bytes, at least one of them a write, without an order.
- `use_after_free`: a race through the allocator; the bytes were freed, allocated again and used while the old
owner's work may still run.
- `read_before_ready`: memory is used before the end of a copy or collective that reads or writes it.
"""

import os
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from fsdpbench.base.errors import error_text
from fsdpbench.base.files.documents import table_beside
from fsdpbench.sim.followers.sanitizer.shadow import HOST, Operation, Stack
from fsdpbench.sim.model.trace_recorder import trace_stream


class Kind(StrEnum):
    """Ways in which two accesses lack an order."""

    RACE = "race"
    USE_AFTER_FREE = "use_after_free"
    READ_BEFORE_READY = "read_before_ready"


@dataclass
class Access:
    """One side of a finding. `stream`: the stream's name as shown to users."""

    operation: Operation
    writes: bool
    forward: Stack | None
    stream: str

    def to_dict(self) -> dict[str, object]:
        """Return the entry of `result.json`."""
        entry: dict[str, object] = {
            "operation": self.operation.name,
            "access": "write" if self.writes else "read",
            "stream": self.stream,
            # The FSDP unit: the newest profiler span that names one.
            "unit": next((each for each in reversed(self.operation.scopes) if each.startswith("FSDP")), None),
            "phase": phase(self.operation),
            "step": self.operation.step,
            "line": own_line(self.operation.stack),
            "stack": frames(self.operation.stack),
        }
        if self.forward is not None:
            entry["forward_line"] = own_line(self.forward)
            entry["forward_stack"] = frames(self.forward)
        return entry


@dataclass
class Finding:
    """Two unordered accesses. `bytes`: the most that they shared; `role`: the purpose of those bytes."""

    kind: Kind
    first: Access
    second: Access
    bytes: int
    role: str
    count: int = 1

    @property
    def hint(self) -> str:
        """Return the usual fix."""
        return _hint(self.kind, self.first, self.second)

    def to_dict(self) -> dict[str, object]:
        """Return the entry of `result.json`."""
        return {
            "kind": self.kind.value,
            "count": self.count,
            "bytes": self.bytes,
            "role": self.role,
            "first": self.first.to_dict(),
            "second": self.second.to_dict(),
            "hint": self.hint,
        }


class Findings:
    """All findings, in order of discovery."""

    def __init__(self, names: "StreamNames") -> None:
        self._names = names
        self._found: dict[tuple[Any, ...], Finding] = {}

    def __len__(self) -> int:
        return len(self._found)

    def __iter__(self) -> Any:
        return iter(self._found.values())

    def add(
        self,
        old: Operation,
        wrote: bool,
        new: Operation,
        writes: bool,
        shared: int,
        freed: bool,
        forward: tuple[Stack | None, ...],
        role: str | None = None,
    ) -> None:
        """Add two unordered accesses. `freed`: the bytes had another owner at the old access.

        `role`: the purpose of the bytes, if known.
        """
        kind = _kind(old, new, freed)
        key = (kind, old.name, old.stack, wrote, new.name, new.stack, writes)
        known = self._found.get(key)
        if known is not None:
            known.count += 1
            if shared > known.bytes or (role is not None and shared == known.bytes):
                known.bytes, known.role = shared, _role(kind, known.first, known.second, role)
            return
        first = Access(old, wrote, forward[0], self._names.of(old))
        second = Access(new, writes, forward[1], self._names.of(new))
        self._found[key] = Finding(kind, first, second, shared, _role(kind, first, second, role))

    def to_dict(self) -> dict[str, object]:
        """Return `counts` by kind (repetitions included) and `findings`."""
        counts = {kind.value: 0 for kind in Kind}
        for finding in self._found.values():
            counts[finding.kind.value] += finding.count
        return {"counts": counts, "findings": [finding.to_dict() for finding in self._found.values()]}


def _kind(old: Operation, new: Operation, freed: bool) -> Kind:
    if freed:
        return Kind.USE_AFTER_FREE
    if HOST in (old.agent, new.agent) or old.collective:
        return Kind.READ_BEFORE_READY
    return Kind.RACE


def phase(operation: Operation) -> str:
    """Return an operation's part of the training step; `forward` is inside a module's call."""
    for scope in reversed(operation.scopes):
        if scope.startswith("Optimizer.step"):
            return "optimizer"
        if scope.startswith("Optimizer.zero_grad"):
            return "zero_grad"
    if operation.in_backward:
        return "backward"
    in_module = any(code.co_filename == _MODULE for code, _ in operation.stack)
    return "forward" if in_module else "outside the model"


def _role(kind: Kind, first: Access, second: Access, known: str | None) -> str:
    """Return the purpose of the bytes: the known one, or one implied by the two accesses."""
    if known is not None:
        return known
    for access in (first, second):
        name = access.operation.name
        if access.operation.agent != HOST and name in _COLLECTIVES:
            return f"{name.replace('_', '-')} {'output' if access.writes else 'input'}"
    if any(access.operation.name.startswith("copy ") for access in (first, second)):
        return "tensor of the host" if HOST in (first.operation.agent, second.operation.agent) else "tensor"
    return "memory handed out again" if kind is Kind.USE_AFTER_FREE else "tensor"


_COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce", "broadcast", "all_to_all", "send_recv")


def _hint(kind: Kind, first: Access, second: Access) -> str:
    old, new = short_name(first.stream), short_name(second.stream)
    if first.operation.collective:
        if kind is Kind.USE_AFTER_FREE:
            return "call wait() on the collective's Work before the last reference to its tensors goes"
        return "call wait() on the collective's Work before its tensors are used again"
    if kind is Kind.USE_AFTER_FREE:
        return error_text("findings.freed", old, old)
    if HOST in (first.operation.agent, second.operation.agent):
        return error_text("findings.copy")
    return error_text("findings.unordered", new, old)


class StreamNames:
    """Names of streams, from the place or purpose for which they were created."""

    def __init__(self) -> None:
        self._made: dict[int, Stack | str] = {}

    def made(self, stream: int, by: Stack | str) -> None:
        """Record where, or for what purpose, a stream was created."""
        self._made[stream] = by

    def of(self, operation: Operation) -> str:
        """Return `CPU`, `stream 7 (default)`, `stream 20 (made at train.py:9)`."""
        if operation.agent == HOST:
            return "CPU"
        number = operation.agent - 1
        by = self._made.get(number, "default" if number == 0 else "")
        what = by if isinstance(by, str) else f"made at {own_line(by)}"
        return f"stream {trace_stream(number)}{f' ({what})' if what else ''}"


def short_name(name: str) -> str:
    """Return `stream 20`, without its origin."""
    return name.partition(" (")[0]


_PACKAGE_FOLDER = Path(__file__).parents[3]
# Packages between a program and the simulated device.
_OURS = tuple(str(_PACKAGE_FOLDER / n) + os.sep for n in ("sim", "script", "engine", "launch"))
_TORCH = str(Path(torch.__file__).parent) + os.sep
_PACKAGE = str(_PACKAGE_FOLDER.parent) + os.sep
_MODULE = _TORCH + os.path.join("nn", "modules", "module.py")
_MACHINERY = tuple(_TORCH + name for name in table_beside(__file__, "findings.toml")["machinery"])
_STARTERS = (os.sep + "runpy.py", os.sep + os.path.join("multiprocessing", "process.py"))
"""Frames further out than these are not the program's."""
_MOST_FRAMES = 12


@lru_cache(maxsize=4096)
def _line(code: object, instruction: int) -> int:
    for start, end, line in code.co_lines():  # type: ignore[attr-defined]
        if start <= instruction < end and line is not None:
            return int(line)
    return int(code.co_firstlineno)  # type: ignore[attr-defined]


def frames(stack: Stack | None) -> list[str]:
    """Return `file:line function` of frames, without those of the simulator and of torch's dispatch."""
    found = []
    for code, instruction in stack or ():
        name = code.co_filename
        if name.startswith((*_OURS, *_MACHINERY, "<frozen")):
            continue
        if name.endswith(_STARTERS):
            break
        found.append(f"{_short(name)}:{_line(code, instruction)} {code.co_name}")
        if len(found) == _MOST_FRAMES:
            break
    return found


def own_line(stack: Stack | None) -> str:
    """Return the innermost line outside torch and the simulator; if there is none, the innermost line."""
    for code, instruction in stack or ():
        name = code.co_filename
        if not name.startswith((*_OURS, _TORCH, "<")):
            return f"{_short(name)}:{_line(code, instruction)}"
    found = frames(stack)
    return found[0].split(" ")[0] if found else "unknown"


def _short(name: str) -> str:
    for root, shown in ((_TORCH, "torch/"), (_PACKAGE, "")):
        if name.startswith(root):
            return shown + name.removeprefix(root)
    try:
        inside = os.path.relpath(name)
    except ValueError:
        return name
    return name if inside.startswith("..") else inside
