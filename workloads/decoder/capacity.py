"""Buffers of one size for all experts (capacity): rows that fit are computed, those above are dropped.

    rows by expert  a a a a a b c c      capacity 3: a a a | b . . | c c .      two rows of a are dropped

(GShard, Lepikhin et al. 2020; Switch, Fedus et al. 2021.) A dropped row adds nothing to its token, which
the residual connection carries on. Empty places are zeros, and are computed like the others.
"""

from __future__ import annotations

import itertools
import math
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from fsdpbench.workloads.decoder.shape import DecoderShape


def capacity_of(shape: DecoderShape, tokens: int) -> int:
    """Rows that an expert's buffer takes: `capacity` times the balanced share, and no more than tokens."""
    share = shape.capacity * tokens * shape.experts_per_token / shape.experts
    return min(tokens, math.ceil(share))


class BufferRows(NamedTuple):
    """Rows that are sent to experts, those of them that are dropped, and empty places that are computed."""

    sent: int
    dropped: int
    empty: int


def buffer_rows_of(loads: list[int], capacity: int) -> BufferRows:
    """What becomes of the rows of one forward of a layer."""
    sent, dropped = sum(loads), sum(max(0, load - capacity) for load in loads)
    return BufferRows(sent, dropped, capacity * len(loads) - (sent - dropped))


@runtime_checkable
class HasBuffers(Protocol):
    """A workload whose experts may have buffers of a capacity."""

    def buffer_rows(self, tokens: int) -> BufferRows | None:
        """Of one forward over so many tokens, all layers together; None without a capacity."""


class Buffers:
    """Places of the rows of one forward, which are ordered expert by expert in `loads`."""

    def __init__(self, loads: list[int], capacity: int, device: torch.device) -> None:
        self.loads = [capacity] * len(loads)
        self._size = capacity * len(loads)
        self._rows: Tensor | None = None
        self._places: Tensor | None = None
        kept = [min(load, capacity) for load in loads]
        if kept != loads:
            starts = [sum(loads[:index]) for index in range(len(loads))]
            self._rows = _runs(starts, kept, device)
        if kept != self.loads:
            self._places = _runs([capacity * index for index in range(len(loads))], kept, device)

    def kept(self, by_row: Tensor) -> Tensor:
        """Of something a row, [rows, ...], that of the rows that fit."""
        return by_row if self._rows is None else by_row.index_select(0, self._rows)

    def fill(self, rows: Tensor) -> Tensor:
        """The rows that fit, [kept, width], in their experts' buffers, [experts x capacity, width]."""
        if self._places is None:
            return rows
        return rows.new_zeros(self._size, rows.shape[1]).index_copy(0, self._places, rows)

    def read(self, buffers: Tensor) -> Tensor:
        """The other way round."""
        return buffers if self._places is None else buffers.index_select(0, self._places)


def _runs(starts: list[int], lengths: list[int], device: torch.device) -> Tensor:
    """int64: `lengths[i]` numbers on end from `starts[i]`, for each i."""
    if len({*lengths}) == 1 and len({b - a for a, b in itertools.pairwise(starts)}) == 1:
        first = torch.arange(len(starts), device=device) * (starts[1] - starts[0]) + starts[0]
        return (first[:, None] + torch.arange(lengths[0], device=device)).flatten()
    runs = zip(starts, lengths, strict=True)
    return torch.cat([torch.arange(start, start + length, device=device) for start, length in runs])
