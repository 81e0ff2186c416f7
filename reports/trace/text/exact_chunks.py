"""The slower way to cut a trace between events: every bracket is followed, whatever the events look like.

For files whose text has events inside of events, a list of events and nothing around it, its events' keys in
changing order, or defects that must be fixed before a piece can be decoded.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from fsdpbench.reports.trace.limits import TraceLimits, told_bytes
from fsdpbench.reports.trace.model import TraceError
from fsdpbench.reports.trace.text.blocks import WHITE
from fsdpbench.reports.trace.text.structure import BracketFinder, Brackets

TRUNCATED = "is truncated: the JSON ends in the middle; record or copy it again"
_KEY = re.compile(rb'"traceEvents"\s*:\s*\Z')
_KEY_AND_WHITE = 256


def cut_exactly(path: Path, blocks: Iterable[bytes], limits: TraceLimits) -> Iterator[tuple[str, bytes]]:
    """Pieces as (kind, text): "events" (lists), then one "beside" (the file without its events).

    Raises:
        TraceError: truncated, something after the end, no list of events or several, a limit.
    """
    cutter = _Cutter(path, limits)
    for block in blocks:
        for events in cutter.take(block):
            yield "events", events
    yield "beside", cutter.finish()


class _Cutter:
    """Takes blocks; hands out the events that are complete, as lists."""

    def __init__(self, path: Path, limits: TraceLimits) -> None:
        self._path = path
        self._limits = limits
        self._finder = BracketFinder()
        self._beside: list[bytes] = []
        self._pending = b""
        self._level = 0  # of the list of events, while in it
        self._lists = 0
        self._begins_list = False
        self._ended = False

    def take(self, block: bytes) -> Iterator[bytes]:
        block, brackets = self._finder.take(block)
        deepest = int(brackets.depth.max(initial=0))
        if deepest > self._limits.depth:
            raise TraceError(self._path, self._limits.refusal("depth", f"nests {deepest:,} levels deep"))
        at = place = 0  # in the block, and among its brackets
        while True:
            if not self._level:
                found = self._list_begins(block, brackets, at, place)
                if found is None:
                    self._keep_beside(block, brackets, at)
                    return
                self._beside.append(block[at : found[0]])
                at, place = found
                self._lists += 1
                self._begins_list = True
            ends = np.flatnonzero(brackets.depth[place:] < self._level)
            if not len(ends):
                break
            place += int(ends[0])
            yield from self._events(block[at : brackets.at[place]])
            at, place, self._level = int(brackets.at[place]), place + 1, 0
            self._pending = b""
        closed = ~brackets.opens[place:] & (brackets.depth[place:] == self._level)
        if closed.any():
            last = int(brackets.at[place:][closed][-1]) + 1
            yield from self._events(block[at:last])
            self._pending, at = b"", last
        self._pending += block[at:]
        if len(self._pending) > self._limits.event:
            found_bytes = f"holds an event of more than {told_bytes(self._limits.event)}"
            raise TraceError(self._path, self._limits.refusal("event", found_bytes))

    def finish(self) -> bytes:
        """The file without its events."""
        if self._finder.depth > 0 or self._finder.in_string:
            raise TraceError(self._path, TRUNCATED)
        if self._lists > 1:
            raise TraceError(
                self._path, f"holds {self._lists} lists 'traceEvents': which one counts is not known"
            )
        return b"".join(self._beside)

    def _list_begins(self, block: bytes, brackets: Brackets, at: int, place: int) -> tuple[int, int] | None:
        """Where the events of the next list begin: in the block, and among its brackets."""
        bare = not self._beside and not at and block[:1] == b"["
        if bare:
            self._level = 1
            return 1, 1
        level = brackets.opens[place:] & (brackets.depth[place:] == 2) & (brackets.byte[place:] == ord("["))
        for number in (np.flatnonzero(level) + place).tolist():
            begin = int(brackets.at[number])
            before = block[max(at, begin - _KEY_AND_WHITE) : begin]
            if begin - at < _KEY_AND_WHITE:
                before = b"".join(self._beside)[-_KEY_AND_WHITE:] + before
            if _KEY.search(before):
                self._level = 2
                return begin + 1, number + 1
        return None

    def _keep_beside(self, block: bytes, brackets: Brackets, at: int) -> None:
        closed = brackets.at[(brackets.depth <= 0) & (brackets.at >= at)]
        rest = block[int(closed[0]) + 1 :] if len(closed) and not self._ended else b""
        if (self._ended and block[at:].strip(WHITE)) or rest.strip(WHITE):
            raise TraceError(self._path, "is not JSON (something follows its end)")
        self._ended = self._ended or len(closed) > 0
        self._beside.append(block[at:])
        size = sum(map(len, self._beside))
        if size > self._limits.event:
            found = f"holds more than {told_bytes(self._limits.event)} beside its events"
            raise TraceError(self._path, self._limits.refusal("event", found))

    def _events(self, text: bytes) -> Iterator[bytes]:
        """A piece of the list as a list of its own, without the comma that parts it from the last one."""
        text = (self._pending + text).strip(WHITE)
        if text and not self._begins_list:
            if not text.startswith(b",") or len(text) == 1:
                raise TraceError(self._path, "is not JSON (a comma between events is missing or too many)")
            text = text[1:]
        self._begins_list = False
        if text:
            yield b"[" + text + b"]"
