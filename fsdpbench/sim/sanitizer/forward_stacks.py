"""Which forward operator a node of backward belongs to: by the sequence numbers that autograd gives.

Autograd numbers the nodes that forward makes, one after another. The node that backward is in has the number
of its forward operator, whose Python stack says more than backward's own.
"""

from __future__ import annotations

from fsdpbench.sim.sanitizer.operation import Operation, Stack
from fsdpbench.torch_internals import current_autograd_node, get_sequence_nr

_MOST = 1 << 18
_ACCUMULATES = 1 << 62
"""Nodes that accumulate gradients have the greatest number there is."""


class ForwardStacks:
    """Stacks of the newest forward operators that made nodes, by sequence number."""

    def __init__(self) -> None:
        self._next = get_sequence_nr()
        self._stacks: dict[int, Stack] = {}

    def note(self, stack: Stack) -> None:
        """An operator was called; nodes that were made since the last one are its."""
        following = get_sequence_nr()
        for number in range(max(self._next, following - 8), following):
            self._stacks[number] = stack
        self._next = following
        if len(self._stacks) > _MOST:
            for number in list(self._stacks)[: _MOST // 2]:
                del self._stacks[number]

    def current_node(self, operation: Operation) -> int:
        """The number of the node that backward is in; -1 where it is in none."""
        node = current_autograd_node()
        if node is None:
            return -1
        number: int = node._sequence_nr()
        if get_sequence_nr() != self._next:  # a forward inside backward: activation checkpointing
            self.note(operation.stack)
        return number if number < _ACCUMULATES else -1

    def stack_of(self, node: int) -> Stack | None:
        """Where forward made a node, as far as it is known."""
        return self._stacks.get(node)
