"""The order of allocations and frees that have the same time, by the totals that each of them tells.

    time  bytes  total after     |  the total before an event (after less bytes) is the one after the event
    5 ms   +512          512     |  before it, so that the three of 7 ms follow one another in one way
    7 ms   +256         1024  3. |
    7 ms  +1024         1536  1. |
    7 ms   -768          768  2. |

A file may have them in any order; where their totals do not show one, the file's stays.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields

import numpy as np

from fsdpbench.reports.trace.model import Int64, MemoryEvents

_MOST = 40
_TRIED_AN_EVENT = 2
_TRIED_AT_LEAST = 2000

_Event = tuple[int, int, int, int]
"""Row, bytes, the total after it, address."""


def in_order(memory: MemoryEvents) -> MemoryEvents:
    """The events (which are in order of time) with those of the same time and device in order."""
    order = np.arange(len(memory))
    rows = np.lexsort((memory.device_id, memory.device_type))
    search = _Search(memory)
    for low, high, begins in _out_of_order(memory, rows):
        before = None if begins else int(memory.allocated[order[rows[low - 1]]])
        found = search.order(rows[low:high], before)
        if found:
            order[rows[low:high]] = found
    return MemoryEvents(*(getattr(memory, each.name)[order] for each in fields(memory)))


def _out_of_order(memory: MemoryEvents, rows: Int64) -> Iterator[tuple[int, int, bool]]:
    """Stretches of `rows` of one device and time, of which one does not continue from the total before it;
    and whether they are the device's first."""
    kind, device, time = memory.device_type[rows], memory.device_id[rows], memory.time[rows]
    of_another = np.append(True, (kind[1:] != kind[:-1]) | (device[1:] != device[:-1]))[: len(rows)]
    begins = np.flatnonzero(of_another | np.append(True, time[1:] != time[:-1])[: len(rows)])
    ends = np.append(begins[1:], len(rows))
    after = memory.allocated[rows]
    broken = ~of_another
    broken[1:] &= after[1:] - memory.bytes[rows][1:] != after[:-1]
    chosen = (ends - begins > 1) & (ends - begins <= _MOST)
    for low, high in zip(begins[chosen].tolist(), ends[chosen].tolist(), strict=True):
        if broken[low:high].any():
            yield low, high, bool(of_another[low])


class _Search:
    """Finds orders of a few events in which each continues from the total of the one before."""

    def __init__(self, memory: MemoryEvents) -> None:
        self._memory = memory
        self._left = _TRIED_AN_EVENT * len(memory) + _TRIED_AT_LEAST

    def order(self, rows: Int64, before: int | None) -> list[int] | None:
        """The rows in order, from the total `before`; None where there is none, or it takes too long."""
        memory = self._memory
        columns = (rows, memory.bytes[rows], memory.allocated[rows], memory.address[rows])
        # In an order of its own, so that what is found does not depend on the file's.
        events = sorted(zip(*(column.tolist() for column in columns), strict=True), key=lambda each: each[1:])
        begins = [before] if before is not None else sorted({after - size for _, size, after, _ in events})
        return next(filter(None, (self._from(total, events, {}) for total in begins)), None)

    def _from(self, total: int, events: list[_Event], alive: dict[int, bool]) -> list[int] | None:
        if not events:
            return []
        for place, (row, size, after, address) in enumerate(events):
            # What is alive is not allocated again, and what was freed not freed.
            if after - size != total or alive.get(address) is (size > 0) or not self._left:
                continue
            self._left -= 1
            rest = self._from(after, events[:place] + events[place + 1 :], {**alive, address: size > 0})
            if rest is not None:
                return [row, *rest]
        return None
