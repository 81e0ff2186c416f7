"""Units of torch's FSDP1, whose annotations do not name them: they follow from the order of the hooks.

    forward (root) > _pre_forward _post_forward of each unit, in order          unit.0 unit.1 ... unit.n
    _pre_backward_hook, in the reverse order of the units' _post_forward        root unit.n ... unit.0
    _post_backward_hook, in the reverse order of the units' _pre_forward        unit.n ... unit.0 root

One such round is one forward and backward of the model.  A prefetch is for the unit whose turn is next.  What
is found is given the names of FSDP2's events, so that the rest of the analysis is written once.  Backward is
left unnamed where it has another number of hooks than forward had units (frozen units, several losses).
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from fsdpbench.reports.trace import Category, Trace

_PREFIX = "FullyShardedDataParallel."
_FORWARD = "forward"
_NAMES = {
    "_pre_forward": "pre_forward",
    "_post_forward": "post_forward",
    "_pre_backward_hook": "pre_backward",
    "_post_backward_hook": "post_backward",
    "_pre_forward_prefetch": "forward_prefetch",
    "_pre_backward_prefetch": "backward_prefetch",
    "_post_backward_prefetch": "backward_prefetch",
    "rate_limiter": "limiter_wait",
}
_HOOKS = ("forward", "_pre_forward", "_post_forward", "_pre_backward_hook", "_post_backward_hook")
_INSIDE = ("_pre_forward_prefetch", "_pre_backward_prefetch", "_post_backward_prefetch", "rate_limiter")
_GATHERING = ("pre_forward", "pre_backward")
WAIT = "wait_all_gather"


@dataclass(frozen=True)
class Annotation:
    """An FSDP event of one unit on the CPU, [start, end] in ns on a thread (row of `Trace.lanes`)."""

    start: int
    end: int
    lane: int
    event: str
    unit: str


@dataclass(frozen=True)
class _Span:
    start: int
    end: int
    lane: int
    name: str

    def encloses(self, other: _Span) -> bool:
        return self.lane == other.lane and self.start <= other.start and other.end <= self.end


def number_units(trace: Trace, root: str) -> list[Annotation]:
    """All annotations whose unit could be found, in order of their start; `root` names the outermost unit."""
    spans = _spans(trace)
    found: list[Annotation] = []
    for spans_of_round in _rounds(spans):
        found += _name_round(spans_of_round, root)
    return sorted(found, key=lambda each: (each.start, -each.end))


def _spans(trace: Trace) -> list[_Span]:
    events = trace.events
    named = np.fromiter((name.startswith(_PREFIX) for name in trace.names), np.bool_, len(trace.names))
    rows = trace.rows(Category.USER_ANNOTATION)
    rows = rows[named[events.name[rows]]]
    rows = rows[np.lexsort((-events.end[rows], events.start[rows]))]
    columns = (events.start[rows], events.end[rows], events.lane[rows], events.name[rows])
    return [
        _Span(start, end, lane, trace.names[name].removeprefix(_PREFIX))
        for start, end, lane, name in zip(*(column.tolist() for column in columns), strict=True)
    ]


def _rounds(spans: list[_Span]) -> list[list[_Span]]:
    """The spans by round: one begins with each forward of the outermost unit.

    A checkpointed unit runs its forward again in backward; that one encloses no other unit's, as the
    outermost one does (unless the model is one unit).
    """
    forwards = [span for span in spans if span.name == _FORWARD]
    outermost: list[_Span] = []
    enclosing: set[int] = set()
    for span in forwards:
        if outermost and outermost[-1].encloses(span):
            enclosing.add(len(outermost) - 1)
        else:
            outermost.append(span)
    starts = [span.start for place, span in enumerate(outermost) if not enclosing or place in enclosing]
    edges = [*starts, max((span.end for span in spans), default=0) + 1]
    places = [bisect_left(spans, edge, key=lambda span: span.start) for edge in edges]
    return [spans[low:high] for low, high in pairwise(places)]


def _name_round(spans: list[_Span], root: str) -> list[Annotation]:
    outermost = next(span for span in spans if span.name == _FORWARD)
    first = {
        name: [span for span in spans if span.name == name and outermost.encloses(span)] for name in _HOOKS
    }
    later = {
        name: [span for span in spans if span.name == name and not outermost.encloses(span)]
        for name in _HOOKS
    }
    forwards = first[_FORWARD]
    names = [root, *(f"unit.{number}" for number in range(len(forwards) - 1))]
    by_end = [names[place] for place in sorted(range(len(forwards)), key=lambda place: forwards[place].end)]
    backwards = by_end[::-1]
    inner = [span for span in spans if span.name in _INSIDE]
    found: list[Annotation] = []
    for hooks, order in (
        (first["_pre_forward"], names),
        (first["_post_forward"], by_end),
        (later["_pre_forward"], backwards[1:]),  # Of checkpointed units, run again.
        (later["_post_forward"], backwards[1:]),
        (later["_pre_backward_hook"], backwards),
        (later["_post_backward_hook"], names[::-1]),
    ):
        if len(hooks) == len(order):
            for place, hook in enumerate(hooks):
                found += _of_turn(hook, order, place, inner)
    return found


def _of_turn(hook: _Span, order: list[str], place: int, inner: list[_Span]) -> list[Annotation]:
    """One hook's annotations: itself, what is inside it, and the wait for its all-gather at its end."""
    event, unit = _NAMES[hook.name], order[place]
    found = [Annotation(hook.start, hook.end, hook.lane, event, unit)]
    following = order[place + 1] if place + 1 < len(order) else unit
    prefetches = [span for span in inner if span.name != "rate_limiter" and hook.encloses(span)]
    found += [
        Annotation(span.start, span.end, span.lane, _NAMES[span.name], following) for span in prefetches
    ]
    for span in inner:
        if span.name == "rate_limiter" and hook.encloses(span):
            ahead = any(prefetch.encloses(span) for prefetch in prefetches)
            target = following if ahead else unit
            found.append(Annotation(span.start, span.end, span.lane, _NAMES[span.name], target))
    if event in _GATHERING:
        # FSDP1 marks no wait; its streams wait for one another as the hook ends.
        found.append(Annotation(hook.end, hook.end, hook.lane, WAIT, unit))
    return found
