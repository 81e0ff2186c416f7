"""Regions: the exact bytes of its storage that a tensor covers.

Most tensors cover one interval. Others have holes (columns of a matrix): the extents of two such tensors can
overlap although they share no element::

    a = buffer[:, 0:2]      | x x . . | x x . . | x x . . |
    b = buffer[:, 2:4]      | . . x x | . . x x | . . x x |     no byte in common
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from fsdpbench.sim.torch_device.followed import Region, Runs, Use
from fsdpbench.sim.torch_device.operators.special_operators import LIKE
from fsdpbench.sim.torch_device.strict.words import UNDECLARED_WRITES, bind
from fsdpbench.sim.torch_device.tensors import is_on_device

_MOST_RUNS = 1 << 20
"""If a tensor has more runs, `overlap` compares only the residues of its strides."""


def region_of(shape: Sequence[int], strides: Sequence[int], offset: int, itemsize: int) -> Region | None:
    """Return the bytes that a tensor covers, or None without elements. Offset and strides in elements."""
    if 0 in shape:
        return None
    start = offset * itemsize
    dimensions = sorted(
        (stride * itemsize, size)
        for size, stride in zip(shape, strides, strict=True)
        if size > 1 and stride > 0
    )
    width = itemsize
    outer: list[tuple[int, int]] = []
    for step, count in dimensions:
        if not outer and step <= width:
            width = step * (count - 1) + width
        elif outer and step == outer[-1][0] * outer[-1][1]:
            outer[-1] = (outer[-1][0] * 1, outer[-1][1] * count)
        else:
            outer.append((step, count))
    if not outer:
        return Region(start, start + width)
    end = start + width + sum(step * (count - 1) for step, count in outer)
    return Region(start, end, Runs(tuple((count, step) for step, count in reversed(outer)), width))


def overlap(first: Region, second: Region) -> int:
    """Return the number of bytes that two regions of one storage share (an estimate above `_MOST_RUNS`)."""
    low, high = max(first.start, second.start), min(first.end, second.end)
    if low >= high:
        return 0
    if first.runs is None and second.runs is None:
        return high - low
    dimensions = [region.runs.dimensions for region in (first, second) if region.runs]
    if any(math.prod(count for count, _ in each) > _MOST_RUNS for each in dimensions):
        return 0 if _apart_by_residue(first, second) else high - low
    starts, ends = _runs_between(first, low, high)
    others, other_ends = _runs_between(second, low, high)
    if not len(starts) or not len(others):
        return 0
    if len(starts) > len(others):
        starts, ends, others, other_ends = others, other_ends, starts, ends
    return _shared(starts, ends, others, other_ends)


def _shared(starts: np.ndarray, ends: np.ndarray, others: np.ndarray, other_ends: np.ndarray) -> int:
    """Return the number of bytes that are in both of two sorted lists of disjoint intervals."""
    # Bytes of the second list below a point: all runs before the point, and a part of the run around it.
    totals = np.concatenate(([0], np.cumsum(other_ends - others)))

    def below(points: np.ndarray) -> np.ndarray:
        index = np.searchsorted(others, points, side="right")
        inside = np.minimum(points, other_ends[np.maximum(index - 1, 0)]) - others[np.maximum(index - 1, 0)]
        found: np.ndarray = np.where(index > 0, totals[np.maximum(index - 1, 0)] + inside, 0)
        return found

    return int((below(ends) - below(starts)).sum())


def _runs_between(region: Region, low: int, high: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the sorted starts and ends of a region's runs, clipped to the interval."""
    if region.runs is None:
        return np.array([low]), np.array([high])
    starts = np.array([region.start], dtype=np.int64)
    for count, step in region.runs.dimensions:
        starts = (starts[:, None] + np.arange(count, dtype=np.int64)[None, :] * step).reshape(-1)
    starts.sort()
    ends = starts + region.runs.width
    # Bytes of overlapping runs (unfolded windows) count once.
    ends[:-1] = np.minimum(ends[:-1], starts[1:])
    inside = (ends > low) & (starts < high)
    return np.maximum(starts[inside], low), np.minimum(ends[inside], high)


def _apart_by_residue(first: Region, second: Region) -> bool:
    """Return whether two regions cover different columns of a common stride."""
    steps = [step for region in (first, second) if region.runs for _, step in region.runs.dimensions]
    step = math.gcd(*steps)
    widths = [region.runs.width if region.runs else region.end - region.start for region in (first, second)]
    if max(widths) >= step:
        return False
    shift = (second.start - first.start) % step
    return shift >= widths[0] and shift + widths[1] <= step


_ONLY_SHAPES = frozenset("aten::" + name for name in LIKE)


def uses_of(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Use, ...]:
    """Return the uses of a call's tensors on the device; indices as in `tensors_in`.

    An alias annotation with an exclamation mark is a write, as are known undeclared writes. Other tensors are
    read, unless only their shape matters (`zeros_like`). Empty and host tensors have no uses.
    """
    found = []
    for index, (tensor, writes) in enumerate(_with_modes(operator, args, kwargs)):
        if writes is None or not is_on_device(tensor):
            continue
        region = region_of(tensor.shape, tensor.stride(), int(tensor.storage_offset()), tensor.element_size())
        if region is not None:
            found.append(Use(index, region, writes))
    return tuple(found)


def host_uses(
    operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Iterator[tuple[torch.Tensor, bool]]:
    """Yield the call's host tensors, and whether the call writes each."""
    for tensor, writes in _with_modes(operator, args, kwargs):
        if writes is not None and tensor.device.type == "cpu":
            yield tensor, writes


def _with_modes(
    operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Iterator[tuple[torch.Tensor, bool | None]]:
    """Yield the call's tensors in order, with True: written, False: read, None: neither."""
    schema = operator._schema
    arguments = schema.arguments
    named = {info.name: info for info in arguments}
    ignored = schema.name in _ONLY_SHAPES
    undeclared = UNDECLARED_WRITES.get(schema.name, ())
    if undeclared and not bind(operator, args, kwargs).get("training", True):
        undeclared = ()
    # Schemas of fused optimizers declare a write of gradients, which only happens for unscaling.
    fused = schema.name.startswith("aten::_fused_") and kwargs.get("grad_scale") is None
    for info, value in [*zip(arguments, args, strict=False), *((named[n], v) for n, v in kwargs.items())]:
        writes: bool | None = info.alias_info is not None and info.alias_info.is_write
        if info.name in undeclared:
            writes = True
        if fused and info.name == "grads":
            writes = False
        if ignored and not writes:
            writes = None
        for tensor in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(tensor, torch.Tensor):
                yield tensor, writes
