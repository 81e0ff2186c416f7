"""Allocations and allocator retries as columns: events without a duration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from operator import attrgetter

import numpy as np
from msgspec import Raw

from fsdpbench.reports.trace.arguments import MemoryArguments, Number, decode_arguments
from fsdpbench.reports.trace.model import MISSING, Bool, Int64, MemoryEvents, RetryEvents


class InstantColumns:
    """Takes instants in chunks; `finish` gives the columns of `kind` in order of time."""

    def __init__(self, kind: type[MemoryEvents] | type[RetryEvents]) -> None:
        self.lost = 0
        names = [each.name for each in fields(kind) if each.name != "time"]
        self._values = attrgetter(*names)
        self._width = len(names)
        self._chunks: list[list[Int64]] = []

    def add(self, time: Int64, present: Bool, arguments: Sequence[Raw]) -> None:
        """Appends those that have a time and arguments that can be read."""
        decoded, broken = decode_arguments(arguments, MemoryArguments)
        if broken:
            one_by_one = [decode_arguments([each], MemoryArguments)[1] == 0 for each in arguments]
            present = present & np.array(one_by_one, np.bool_)
        self.lost += int((~present).sum())
        if not present.all():
            time = time[present]
            decoded = [each for each, there in zip(decoded, present.tolist(), strict=True) if there]
        if decoded:
            columns = map(integers, zip(*map(self._values, decoded), strict=True))
            self._chunks.append([time, *columns])

    def finish(self) -> list[Int64]:
        empty = [np.empty(0, np.int64) for _ in range(self._width + 1)]
        columns = [np.concatenate(column) for column in zip(empty, *self._chunks, strict=True)]
        order = np.argsort(columns[0], kind="stable")
        return [column[order] for column in columns]


def integers(values: Sequence[Number]) -> Int64:
    """An int64 column; what it cannot hold is missing."""
    try:
        return np.array(values, np.int64)
    except (OverflowError, ValueError):
        fitting = [int(each) if -(2.0**62) < each < 2.0**62 else MISSING for each in values]
        return np.array(fitting, np.int64)
