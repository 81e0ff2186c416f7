"""Programs on tensors whose values come from the host, drawn by seed, for two devices.

A program is a list of Python lines; its names are the tensors so far, `D` is the device. It is drawn by
running it on the CPU: a line that raises there, or whose values no device repeats, is drawn again. `replay`
runs it on the simulated device, and returns the first value that a script reads there and that neither is the
CPU's nor was reported as unknown.

A collective's other ranks hold other values than this one, so that only what the device says to be assumed
may differ.
"""

from __future__ import annotations

import copy
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

RANKS = 4
_MOST_ELEMENTS = 400
_WHOLE = ("torch.int64", "torch.int32", "torch.uint8", "torch.int16", "torch.bool", "torch.int8")
_REAL = ("torch.float32", "torch.float64", "torch.bfloat16", "torch.float16")
_SHAPES = (
    "()",
    "(1,)",
    "(4,)",
    "(3,)",
    "(2, 3)",
    "(3, 4)",
    "(1, 4)",
    "(4, 1)",
    "(2, 2, 2)",
    "(0,)",
    "(4, 4)",
)
_FLOATS = ("0.1", "2.5", "-1.0", "0.0", "3.0", "16777217.0", "1e-3", "float('inf')")
_INTS = (0, 1, 2, 3, 5, -1, -3, 7, 8, 100, 300, (1 << 40) + 1)
_WEIGHTS = {"factories": 3, "results": 9, "effects": 4, "collectives": 1}


def read_lines() -> dict[str, list[str]]:
    """Return the forms of lines, by kind."""
    found: dict[str, list[str]] = {}
    kind: list[str] = []
    for line in (Path(__file__).parent / "known_lines.txt").read_text().splitlines():
        if line.startswith("[") and line.endswith("]") and line[1:-1].isalpha():
            kind = found.setdefault(line[1:-1], [])
        elif line:
            kind.append(line)
    return found


@dataclass(frozen=True)
class Finding:
    """A value that differs from the CPU's and is not reported as assumed."""

    lines: Sequence[str]
    read: str
    wanted: object
    found: object


Values = dict[str, Any]


def _is_tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor)


def _memory(value: Any) -> int:
    return value.untyped_storage().data_ptr() if _is_tensor(value) else 0


class Forms:
    """Draws lines and reads by seed."""

    def __init__(self, seed: int, *, groups: bool) -> None:
        self.random = random.Random(seed)
        self._forms = read_lines()
        self._kinds = [kind for kind in _WEIGHTS if groups or kind != "collectives"]

    def line(self, values: Values, count: int) -> str:
        """Return the next line of a program that has `count` lines."""
        weights = [_WEIGHTS[kind] for kind in self._kinds]
        kind = "factories" if count < 2 else self.random.choices(self._kinds, weights)[0]
        line = self._filled(kind, values)
        return line if kind in ("effects", "collectives") else f"t{count} = {line}"

    def read(self, values: Values) -> str:
        """Return an expression that reads one of the tensors."""
        return self._filled("reads", values)

    def _filled(self, kind: str, values: Values) -> str:
        pick = self.random.choice
        tensors = [name for name, value in values.items() if _is_tensor(value)] or ["none"]
        recent = tensors[-3:] + tensors
        masks = [n for n in tensors if n != "none" and values[n].dtype is torch.bool] or tensors
        indices = [n for n in tensors if n != "none" and values[n].dtype is torch.int64] or tensors
        first, second = pick(recent), pick(recent)
        memories = [_memory(values.get(name)) for name in (first, second)]
        others = [name for name in tensors if _memory(values.get(name)) not in memories] or ["none"]
        form = pick(self._forms[kind])
        if "out=" in form:
            indices = [name for name in others if name in indices] or ["none"]
            others = [name for name in others if name not in indices] or ["none"]
        return form.format(
            a=first,
            b=second,
            c=pick(others),
            m=pick(masks),
            i=pick(indices),
            int=pick(_INTS),
            float=pick(_FLOATS),
            any=pick(_WHOLE + _REAL),
            whole=pick(_WHOLE),
            real=pick(_REAL),
            size=pick((1, 3, 4, 5)),
            shape=pick(_SHAPES),
            dim=pick((0, -1)),
            ints=[pick((0, 1, 2, 3, 5)) for _ in range(pick((1, 2, 3, 4, 4, 4)))],
            bools=[pick((True, False)) for _ in range(pick((1, 3, 4)))],
            floats=[float(pick((0, 1, 2.5, -1))) for _ in range(pick((1, 3, 4)))],
        )


def start(device: str) -> Values:
    """Return the names that a program knows."""
    torch.manual_seed(1)
    group = dist if device != "cpu" else _Ranks()
    return {"torch": torch, "D": device, "dist": group, "fetch": _fetch}


def _fetch(tensor: torch.Tensor) -> torch.Tensor:
    host = torch.ones_like(tensor, device="cpu")
    torch._foreach_copy_([host], [tensor])
    return host


def _execute(line: str, values: Values) -> Any:
    """Run a line; a name that is given a value is one of `values` afterwards."""
    name, is_assignment, expression = line.partition(" = ")
    if is_assignment and name.isidentifier():
        values[name] = eval(expression, values)
    else:
        exec(line, values)


class _Ranks:
    """What collectives do among ranks of which each has a number more than the one before."""

    ReduceOp = dist.ReduceOp

    def all_reduce(self, tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM, async_op: bool = False) -> Any:
        each = self._of_ranks(tensor)
        if op == dist.ReduceOp.SUM:
            tensor.copy_(sum(each))
        else:
            tensor.copy_(torch.stack(each).amax(0) if op == dist.ReduceOp.MAX else torch.stack(each).amin(0))
        return _Done()

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        tensor.copy_(self._of_ranks(tensor)[source])

    def reduce(self, tensor: torch.Tensor, to: int) -> None:
        self.all_reduce(tensor)

    def all_gather_into_tensor(self, output: torch.Tensor, tensor: torch.Tensor) -> None:
        output.copy_(torch.cat([each.reshape(-1) for each in self._of_ranks(tensor)]).view(output.shape))

    def all_gather(self, outputs: list[torch.Tensor], tensor: torch.Tensor) -> None:
        for output, each in zip(outputs, self._of_ranks(tensor), strict=True):
            _same(output, each).copy_(each)

    def gather(self, tensor: torch.Tensor, outputs: list[torch.Tensor], to: int) -> None:
        self.all_gather(outputs, tensor)

    def scatter(self, tensor: torch.Tensor, parts: list[torch.Tensor], source: int) -> None:
        _same(tensor, parts[0]).copy_(parts[0])

    def reduce_scatter_tensor(self, output: torch.Tensor, tensor: torch.Tensor) -> None:
        parts = sum(self._of_ranks(tensor)).reshape(RANKS, -1)
        _same(output, tensor[: len(tensor) // RANKS]).copy_(parts[0].view(output.shape))

    def all_to_all_single(self, output: torch.Tensor, tensor: torch.Tensor) -> None:
        first = [each.reshape(RANKS, -1)[0] for each in self._of_ranks(tensor)]
        _same(output, tensor).copy_(torch.cat(first).view(output.shape))

    def recv(self, tensor: torch.Tensor, source: int) -> None:
        tensor.copy_(self._of_ranks(tensor)[source])

    def _of_ranks(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        if not tensor.is_contiguous() or not tensor.numel():
            raise ValueError
        more = torch.logical_xor if tensor.dtype is torch.bool else torch.add
        return [more(tensor, torch.tensor(rank, dtype=tensor.dtype)) for rank in range(RANKS)]


def _same(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    if first.dtype is not second.dtype or first.shape != second.shape or not first.is_contiguous():
        raise ValueError
    return first


class _Done:
    def wait(self) -> None:
        """Do nothing."""


class Reports:
    """What the device reports of values that it does not know."""

    def __init__(self, accelerator: Any) -> None:
        self._count = 0
        accelerator.follows_numbers = True
        accelerator.on_value = self._answered

    def _answered(self, operation: str, answer: object, is_true: bool) -> None:
        self._count += not is_true

    def during(self, read: Callable[[], Any]) -> tuple[Any, bool]:
        """Return what was read, and whether it was reported, or came to the host as unknown."""
        from fsdpbench.sim.torch_device.operators.known_values import holds_placeholders

        before = self._count
        found = read()
        tensors = [each for each in (found if isinstance(found, list) else [found]) if _is_tensor(each)]
        unknown = any(holds_placeholders(each) for each in tensors if each.device.type == "cpu")
        return found, unknown or self._count > before


def same(wanted: object, found: object) -> bool:
    """Return whether two values are equal; floats up to rounding."""
    if isinstance(wanted, torch.Tensor) and isinstance(found, torch.Tensor):
        if wanted.dtype is not found.dtype or wanted.shape != found.shape:
            return False
        rounding = 2e-2 if wanted.element_size() == 2 else 1e-5
        return torch.allclose(wanted.double(), found.double(), rounding, 1e-7, equal_nan=True)
    if isinstance(wanted, list) and isinstance(found, list):
        return len(wanted) == len(found) and all(map(same, wanted, found))
    if isinstance(wanted, float) and isinstance(found, float):
        return same(torch.tensor(wanted), torch.tensor(found))
    return type(wanted) is type(found) and wanted == found


class Pair:
    """A program's names on the CPU and on the simulated device. A line that either refuses has no effect."""

    def __init__(self, reports: Reports) -> None:
        self.host, self.device = start("cpu"), start("sim")
        self.lines: list[str] = []
        self.counts: Counter[str] = Counter()
        self.refusals: Counter[str] = Counter()
        self._reports = reports

    def add(self, line: str) -> Finding | None:
        """Run a line on both; return what is wrong with a length that it leaves."""
        trial = {**self.host, **copy.deepcopy({k: v for k, v in self.host.items() if _is_tensor(v)})}
        try:
            _execute(line, trial)
        except Exception:  # torch's errors are of many kinds
            self.counts["invalid"] += 1
            return None
        tensors = [value for value in trial.values() if _is_tensor(value)]
        if any(value.numel() > _MOST_ELEMENTS or value.layout is not torch.strided for value in tensors):
            return None
        try:
            _, reported = self._reports.during(lambda: _execute(line, self.device))
        except Exception as error:
            self._refused("refused", error, line)
            return None
        self.host = trial
        self.lines.append(line)
        if reported:  # as a length or a position: from here on all may differ
            self.counts["reported"] += 1
            self.host, self.device = start("cpu"), start("sim")
            self.lines.clear()
        for name, value in self.host.items():
            if _is_tensor(value) and value.shape != self.device[name].shape:
                return Finding(
                    self.lines, f"{name}.shape", tuple(value.shape), tuple(self.device[name].shape)
                )
        return None

    def compare(self, read: str) -> Finding | None:
        """Read a value on both; return what is wrong with it."""
        try:
            wanted = eval(read, self.host)
        except Exception:
            self.counts["invalid read"] += 1
            return None
        try:
            found, reported = self._reports.during(lambda: eval(read, self.device))
        except Exception as error:
            self._refused("refused read", error, read)
            return None
        self.counts["unknown" if reported else "equal"] += 1
        if reported or same(wanted, found):
            return None
        return Finding(list(self.lines), read, wanted, found)

    def _refused(self, kind: str, error: Exception, text: str) -> None:
        """Count a line or a read that the simulated device refuses."""
        self.counts[kind] += 1
        self.refusals[f"{type(error).__name__}: {error}".splitlines()[0][:90] + f" [{text}]"] += 1

    def compare_all(self) -> Finding | None:
        """Read all tensors; return the first that is wrong."""
        names = [name for name, value in self.host.items() if _is_tensor(value)]
        return next(filter(None, (self.compare(f"{name}.cpu()") for name in names)), None)


def search(seed: int, reports: Reports, *, groups: bool, length: int = 14) -> tuple[Pair, Finding | None]:
    """Draw and run a program."""
    forms, pair = Forms(seed, groups=groups), Pair(reports)
    for _ in range(5 * length):
        finding = pair.add(forms.line(pair.host, len(pair.lines)))
        if finding is None and forms.random.random() < 0.2:
            finding = pair.compare(forms.read(pair.host))
        if finding is not None:
            return pair, shortened(finding, reports)
        if len(pair.lines) >= length:
            break
    return pair, (found := pair.compare_all()) and shortened(found, reports)


def shortened(finding: Finding, reports: Reports) -> Finding:
    """Return the finding of the fewest lines that still have one at the same read."""
    best, tried = finding, 0
    while tried < len(best.lines):
        lines = [*best.lines[:tried], *best.lines[tried + 1 :]]
        pair = Pair(reports)
        found = next(filter(None, map(pair.add, lines)), None) or pair.compare(best.read)
        if found is not None:
            best = found
        else:
            tried += 1
    return best


WHOLE: dict[str, tuple[str, ...]] = {
    "factories": ("t0 = torch.tensor([3, 1, 2, 5]).to(D)",),
    "results": ("t0 = torch.tensor([3, 1, 2, 5]).to(D)", "t1 = torch.tensor([1, 0, 2, 3]).to(D)"),
    "effects": ("t0 = torch.zeros(4, dtype=torch.long, device=D)", "t1 = torch.tensor([1, 0, 2, 3]).to(D)"),
}
"""Whole numbers of the host, before a line of each kind."""


def forgotten(kind: str, reports: Reports) -> Iterator[str]:
    """Yield the forms of `kind` whose result is whole numbers of whole numbers, and unknown on the device."""
    for form in read_lines()[kind]:
        forms, pair = Forms(3, groups=False), Pair(reports)
        assert all(pair.add(line) is None for line in WHOLE[kind])
        forms._forms = {kind: [form]}
        line = forms._filled(kind, pair.host)
        names = ("t0", "t1") if kind == "effects" else ("t9",)
        assert pair.add(line if kind == "effects" else f"t9 = {line}") is None
        values = {name: pair.host.get(name) for name in names} if not pair.counts else {}
        for name, value in values.items():
            if _is_tensor(value) and f"{value.dtype}" in _WHOLE:
                assert pair.compare(f"{name}.cpu()") is None
        if pair.counts["unknown"]:
            yield form
