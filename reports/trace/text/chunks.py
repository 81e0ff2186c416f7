"""Cuts the text of a trace between events, so that it can be decoded piece by piece in little memory.

    {"schemaVersion": 1, ..., "traceEvents": [ {"ph": ...}, {"ph": ...}, ... {"ph": ...} ], "traceName": ...}
    |------------- beginning ---------------||--- chunk ---|   ...       |--------------- end --------------|

A cut is made only where a closing brace, a comma, an opening brace and the key "ph" (the first key of the
file's first event) follow one another.  No string of valid JSON can hold that: the key's quotes would be
escaped.  It could stand deeper, in a list among an event's arguments; then the pieces do not decode, and the
reader begins again with `cut_exactly`, which follows every bracket.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from fsdpbench.reports.trace.limits import TraceLimits
from fsdpbench.reports.trace.text.blocks import WHITE

_EVENTS = re.compile(rb'"traceEvents"\s*:\s*\[\s*\{\s*("[^"\\]{1,32}")\s*:')
_LIST = b'"traceEvents"'
_LOOK_AROUND = 256


class UncuttableError(Exception):
    """The events cannot be distinguished by their first key."""


def cut(blocks: Iterable[bytes], limits: TraceLimits) -> Iterator[tuple[str, bytes]]:
    """Pieces as (kind, JSON): one "beginning" (a file without events), then "events" (lists), one "end" (a
    file with the last events and whatever follows them).

    Raises:
        UncuttableError: see above, or several lists of events, or an event longer than its limit.
    """
    iterator = iter(blocks)
    pending = b""
    for block in iterator:
        pending += block
        start = _EVENTS.search(pending)
        if start:
            break
        if len(pending) > limits.event:
            raise UncuttableError
    else:
        raise UncuttableError
    first = pending.index(b"{", pending.index(b"[", start.start() + len(_LIST)))
    key = start[1]
    if pending.count(_LIST, 0, first) > 1:
        raise UncuttableError
    yield "beginning", pending[:first] + b"]}"
    pending = pending[first:]
    while True:
        at = _last_boundary(pending, key)
        if at:
            yield "events", b"[" + pending[:at].rstrip(WHITE)[:-1] + b"]"
            pending = pending[at:]
        if len(pending) > limits.event:
            raise UncuttableError
        following = next(iterator, None)
        if following is None:
            break
        pending += following
    if _LIST in pending:
        raise UncuttableError
    yield "end", b'{"traceEvents": [' + pending


def _last_boundary(text: bytes, key: bytes) -> int:
    """Offset of the last event that begins in `text` right after another one; 0 where there is none."""
    end = len(text)
    while (found := text.rfind(key, 0, end)) > 0:
        end = found
        low = max(found - _LOOK_AROUND, 0)
        before = text[low:found].rstrip(WHITE)
        if before.endswith(b"{"):
            preceding = before[:-1].rstrip(WHITE)
            if preceding.endswith(b",") and preceding[:-1].rstrip(WHITE).endswith(b"}"):
                return low + len(before) - 1
    return 0
