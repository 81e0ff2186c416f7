"""Backward on the streams of forward, as CUDA runs it.

Autograd's engine runs every node on the stream that was current when forward made it, lets it wait for the
streams of the nodes before it, and in the end lets the caller's stream wait for those on which gradients
were accumulated. The engine does that in C++ for devices whose guards it can ask for streams; the guard of a
device written in Python has none, so it has to be done here.

    forward    stream 0: f1 (node 7)      stream 3: f2 (node 8)
    backward   stream 3: f2's node  ──event──>  stream 0: f1's node  ──event──> caller's stream

Autograd numbers nodes in the order in which forward makes them. It is enough to know where the current
stream changed (`note_switch`) to know a node's stream. Each node that runs gets a hook on those that follow
it, so that all are seen, also nodes that launch nothing. Programs that compute on one stream pay one
comparison for it.

A gradient that comes from several nodes is added up when the last of them has run. That node's stream waits
for the others before.

Gradients of parameters are accumulated on the stream that was current when the node for it was made: by the
forward that uses the parameter first, or by DDP's constructor, which keeps it (`keep_accumulators`).

Gradients that go from one stream to another are kept for the second one, as by `record_stream`.

Source of the behaviour: torch/csrc/autograd/engine.cpp and input_buffer.cpp. What is simpler here: gradients
are added up on the stream of the node that makes the last of them, not on that of the node that takes them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from fsdpbench.base.torch_internals import current_autograd_node, get_sequence_nr, queue_callback
from fsdpbench.sim.model.timeline import DEFAULT_STREAM, Marker, Timeline


class _Device(Protocol):
    """Whose streams are meant."""

    stream: int
    timeline: Timeline


_ACCUMULATES = 1 << 62
"""Nodes that accumulate gradients have the greatest number there is."""
_STREAM = "fsdpbench_stream"


@dataclass
class _Run:
    """One call of backward: the caller's stream, and where it is."""

    caller: int
    node: Any = None
    leaves: set[int] = field(default_factory=set)
    # By node (its identity): the numbers of the nodes before it, and the points that it has to wait for.
    before: dict[int, list[tuple[int, Marker]]] = field(default_factory=dict)
    # Nodes that are yet to run, with the hook that tells of it.
    hooks: dict[int, tuple[Any, Any]] = field(default_factory=dict)
    # Whether gradients of the present node come from another stream, and whether they are being added up.
    crosses: bool = False
    adds: bool = False
    ends_well: bool = False


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

    @contextmanager
    def made_on(self, stream: int) -> Iterator[None]:
        """Nodes that are made inside belong to a stream, whichever is current."""
        self.note_switch(stream)
        try:
            yield
        finally:
            self.note_switch(self._accelerator.stream)

    def stream_of(self, number: int) -> int:
        """The stream on which forward made a node."""
        return self._streams[max(bisect_right(self._numbers, number) - 1, 0)]

    def keep_accumulators(self, parameters: Iterable[torch.Tensor]) -> None:
        """A program holds the nodes that accumulate these gradients: their stream is the present one."""
        for parameter in parameters:
            if parameter.requires_grad and parameter.is_leaf:
                node: Any = parameter.expand_as(parameter).grad_fn
                node.next_functions[0][0].metadata[_STREAM] = self._accelerator.stream

    def run(self, backward: Callable[..., Any], roots: Any, *args: Any, **kwargs: Any) -> Any:
        """Call the engine; the caller's stream waits for all gradients in the end."""
        caller = self._accelerator.stream
        if caller == DEFAULT_STREAM and len(self._streams) == 1 and not self._runs:
            return backward(roots, *args, **kwargs)  # one stream in all of the program
        current = _Run(caller)
        self._runs.append(current)
        was_active, self.is_active = self.is_active, True
        start = self._accelerator.timeline.record(caller)
        for root in roots if isinstance(roots, (tuple, list)) else (roots,):
            self._expect(current, getattr(root, "grad_fn", None) or getattr(root, "node", None), -1, start)
        try:
            return backward(roots, *args, **kwargs)
        finally:
            self._runs.pop()
            self.is_active = was_active
            if not current.ends_well:  # raised, or nothing ran
                self._finish(current)
            for _, hook in current.hooks.values():
                hook.remove()

    def arrive(self, tensors: Sequence[Any] = ()) -> None:
        """Be on the stream of the node that backward is in, behind the nodes before it; ``tensors``: what it
        uses."""
        run = self._runs[-1]
        node: Any = current_autograd_node()
        if node is None or run.ends_well:
            return
        if node is run.node:
            if run.adds:
                self._keep_on_this_stream(tensors)
            return
        if run.node is None:
            queue_callback(lambda: self._end_well(run))
        else:
            self._left(run)
        timeline = self._accelerator.timeline
        run.node = node
        hook = run.hooks.pop(id(node), None)
        if hook is not None:
            hook[1].remove()
        before = run.before.pop(id(node), [])
        stream = self._stream_of_node(run, node, before)
        self._switch(stream)
        run.leaves.add(stream)
        run.adds = run.crosses = False
        for _, marker in before:
            run.crosses = run.crosses or marker.stream != stream
            timeline.make_wait(stream, marker)
        several = False
        for following, _ in node.next_functions:
            if following is not None:
                several = several or id(following) in run.before
                self._expect(run, following)
        if several:
            self._wait_before_adding(run, node)

    def _stream_of_node(self, run: _Run, node: Any, before: list[tuple[int, Marker]]) -> int:
        number = node._sequence_nr()
        if number < _ACCUMULATES:
            return self.stream_of(number)
        kept: int | None = node.metadata.get(_STREAM)
        if kept is None:
            first = min((each for each, _ in before), default=-1)
            kept = node.metadata[_STREAM] = run.caller if first < 0 else self.stream_of(first)
        return kept

    def _expect(self, run: _Run, node: Any, number: int = -1, marker: Marker | None = None) -> None:
        """A node will run: be told of it."""
        if node is None:
            return
        if id(node) not in run.hooks:
            run.hooks[id(node)] = (node, node.register_prehook(self._begin))
        if marker is not None:
            run.before.setdefault(id(node), []).append((number, marker))

    def _begin(self, gradients: Sequence[Any]) -> None:
        """A node begins. What it takes from another stream is kept until its own stream is done with it."""
        self.arrive()
        if self._runs[-1].crosses:
            self._keep_on_this_stream(gradients)

    def _keep_on_this_stream(self, tensors: Sequence[Any]) -> None:
        for tensor in tensors:
            if isinstance(tensor, torch.Tensor):
                self._keep(getattr(tensor, "_local_tensor", tensor), self._accelerator.stream)

    def _wait_before_adding(self, run: _Run, node: Any) -> None:
        """When the node has run, the engine adds its gradients to those that wait for the same node."""

        def wait(*gradients: Any) -> None:
            handle.remove()
            run.adds = True
            for following, _ in node.next_functions:
                for _, marker in run.before.get(id(following), ()):
                    self._accelerator.timeline.make_wait(self._accelerator.stream, marker)

        handle = node.register_hook(wait)

    def _left(self, run: _Run) -> None:
        """A node is done: those that take its gradients wait for this point of its stream."""
        accelerator, marker = self._accelerator, None
        number = run.node._sequence_nr()
        for following, _ in run.node.next_functions:
            if following is not None:
                if marker is None:
                    marker = accelerator.timeline.record(accelerator.stream)
                run.before.setdefault(id(following), []).append((number, marker))

    def _end_well(self, run: _Run) -> None:
        """All nodes have run; callbacks of others come next, on the caller's stream."""
        run.ends_well = True
        self._finish(run)

    def _finish(self, run: _Run) -> None:
        accelerator = self._accelerator
        self._switch(run.caller)
        for stream in sorted(run.leaves):
            if stream != run.caller:
                accelerator.timeline.make_wait(run.caller, accelerator.timeline.record(stream))

    def _switch(self, stream: int) -> None:
        if self._accelerator.stream != stream:
            self._accelerator.stream = stream
            self.note_switch(stream)
