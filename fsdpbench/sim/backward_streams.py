"""Backward on the streams of forward, as CUDA runs it.

Autograd's engine runs every node on the stream that was current when forward made it, lets it wait for the
streams of the nodes before it, and in the end lets the caller's stream wait for those on which gradients
were accumulated. The engine does that in C++ for devices whose guards it can ask for streams; the guard of a
device written in Python has none, so it has to be done here.

    forward    stream 0: f1 (node 7)      stream 3: f2 (node 8)
    backward   stream 3: f2's node  ──event──>  stream 0: f1's node  ──event──> caller's stream

Autograd numbers nodes in the order in which forward makes them. It is enough to know where the current
stream changed (`note_switch`); `arrive` then finds a node's stream the first time that something asks for the
current stream within it. Programs that compute on one stream pay one comparison for it.

Gradients that go from one stream to another are kept for the second one, as by `record_stream`.

Source of the behaviour: torch/csrc/autograd/engine.cpp and input_buffer.cpp. What is simpler here: gradients
are accumulated on the stream of the node that makes the last of them, and nodes that launch nothing pass
their waits on to the node that runs next.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from fsdpbench.sim.timeline import DEFAULT_STREAM, Marker, Timeline
from fsdpbench.torch_internals import current_autograd_node, get_sequence_nr


class _Device(Protocol):
    """Whose streams are meant."""

    stream: int
    timeline: Timeline


_ACCUMULATES = 1 << 62


def _node_of(output: Any) -> Any:
    """The node that made a tensor, or that an edge of the graph leads to."""
    return output.grad_fn if isinstance(output, torch.Tensor) else getattr(output, "node", None)


@dataclass
class _Run:
    """One call of backward: the caller's stream, and where it is."""

    caller: int
    node: Any = None
    leaves: set[int] = field(default_factory=set)
    # By node (its identity): the streams, and the points on them, that it has to wait for.
    waits: dict[int, list[Marker]] = field(default_factory=dict)
    alive: list[Any] = field(default_factory=list)


class BackwardStreams:
    """Which stream each node of backward runs on. ``is_active``: more than one stream is in play; ``keep`` is
    told of a tensor that another stream takes over.
    """

    def __init__(
        self, accelerator: _Device, keep: Callable[[torch.Tensor, int], None] = lambda tensor, stream: None
    ) -> None:
        self._accelerator = accelerator
        self._keep = keep
        self.is_active = False
        self._runs: list[_Run] = []
        # The numbers from which on another stream was current, and those streams.
        self._numbers = [0]
        self._streams = [DEFAULT_STREAM]

    def note_switch(self, stream: int) -> None:
        """Another stream becomes current: nodes that are made from now on belong to it."""
        number = get_sequence_nr()
        if self._numbers[-1] == number:  # no node was made in between
            self._numbers.pop()
            self._streams.pop()
        if not self._streams or self._streams[-1] != stream:
            self._numbers.append(number)
            self._streams.append(stream)

    def stream_of(self, number: int) -> int:
        """The stream on which forward made a node."""
        return self._streams[max(bisect_right(self._numbers, number) - 1, 0)]

    def run(self, backward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call the engine; the caller's stream waits for all gradients in the end."""
        caller = self._accelerator.stream
        if caller == DEFAULT_STREAM and len(self._streams) == 1 and not self._runs:
            return backward(*args, **kwargs)  # one stream in all of the program
        current = _Run(caller)
        self._runs.append(current)
        handles = self._watch_crossings(args[0] if args else (), caller)
        was_active, self.is_active = self.is_active, True
        try:
            return backward(*args, **kwargs)
        finally:
            for handle in handles:
                handle.remove()
            self._runs.pop()
            self.is_active = was_active
            self._finish(current)

    def _watch_crossings(self, outputs: Any, caller: int) -> list[Any]:
        """Hooks on the nodes that take gradients from another stream than their own."""
        handles: list[Any] = []
        seen: set[Any] = set()
        pending = [(_node_of(output), caller) for output in outputs]
        crossing: set[Any] = set()
        while pending:
            node, before = pending.pop()
            if node is None or node._sequence_nr() >= _ACCUMULATES:
                continue
            stream = self.stream_of(node._sequence_nr())
            if stream != before and node not in crossing:
                crossing.add(node)
                handles.append(node.register_prehook(self._keep_on(stream)))
            if node not in seen:
                seen.add(node)
                pending += [(following, stream) for following, _ in node.next_functions]
        return handles

    def _keep_on(self, stream: int) -> Callable[[Any], None]:
        """Do not reuse gradients before the stream that takes them has come to the end of their use."""

        def keep(gradients: Any) -> None:
            self.arrive()
            for gradient in gradients:
                if gradient is not None:
                    self._keep(getattr(gradient, "_local_tensor", gradient), stream)

        return keep

    def arrive(self) -> None:
        """Be on the stream of the node that backward is in, behind the nodes before it."""
        run = self._runs[-1]
        node = current_autograd_node()
        if node is None or node is run.node:
            return
        if run.node is not None:
            self._left(run, run.node)
        accelerator = self._accelerator
        number = node._sequence_nr()
        stream = accelerator.stream if number >= _ACCUMULATES else self.stream_of(number)
        before = [accelerator.timeline.record(run.caller)] if run.node is None else []
        run.node = node
        if number >= _ACCUMULATES:
            run.leaves.add(stream)
        if stream != accelerator.stream:
            # Nodes that launch nothing are not seen: their successor waits for what ran last.
            before += run.waits.pop(id(node), []) or [accelerator.timeline.record(accelerator.stream)]
            accelerator.stream = stream
        else:
            before += run.waits.pop(id(node), [])
        for marker in before:
            accelerator.timeline.make_wait(stream, marker)

    def _left(self, run: _Run, node: Any) -> None:
        """A node is done: those that take its gradients wait for this point of its stream."""
        stream = self._accelerator.stream
        marker = None
        for following, _ in node.next_functions:
            if following is None:
                continue
            if marker is None:
                marker = self._accelerator.timeline.record(stream)
            run.waits.setdefault(id(following), []).append(marker)
            run.alive.append(following)
        run.leaves.add(stream)

    def _finish(self, run: _Run) -> None:
        accelerator = self._accelerator
        if run.node is not None:
            run.leaves.add(accelerator.stream)
        accelerator.stream = run.caller
        for stream in sorted(run.leaves):
            if stream != run.caller:
                accelerator.timeline.make_wait(run.caller, accelerator.timeline.record(stream))
