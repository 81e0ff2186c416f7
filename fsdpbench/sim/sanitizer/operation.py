"""One piece of work that touched memory: what it was, where the program stood, and in which step."""

from __future__ import annotations

import sys
from types import CodeType, FrameType

Stack = tuple[tuple[CodeType, int], ...]
"""Frames from the innermost outwards: code and the index of its instruction."""

_DEEPEST = 120


class Operation:
    """A kernel, a copy, a collective or an access of the CPU. One object stands for all tensors of a call.

    ``agent`` and ``epoch`` as in `clocks.py`. ``scopes`` are the profiler's spans around it, outermost first;
    ``node`` is the sequence number of the autograd node that backward was in, -1 outside of backward;
    ``collective`` says whether it is a collective that its caller has to wait for.
    """

    __slots__ = ("agent", "collective", "epoch", "in_backward", "name", "node", "scopes", "stack", "step")

    def __init__(self, agent: int, epoch: int, name: str, stack: Stack) -> None:
        self.agent = agent
        self.epoch = epoch
        self.name = name
        self.stack = stack
        self.scopes: tuple[str, ...] = ()
        self.step = 0
        self.node = -1
        self.in_backward = False
        self.collective = False


class Stacks:
    """Python stacks, one object for equal ones: a training loop has few that differ."""

    def __init__(self) -> None:
        self._known: dict[Stack, Stack] = {}

    def here(self, skip: int) -> Stack:
        """The stack of the caller, without its ``skip`` innermost frames."""
        frame: FrameType | None = sys._getframe(skip + 1)
        found: list[tuple[CodeType, int]] = []
        while frame is not None and len(found) < _DEEPEST:
            found.append((frame.f_code, frame.f_lasti))
            frame = frame.f_back
        stack = tuple(found)
        return self._known.setdefault(stack, stack)
