"""Streams of backward: each node runs on the stream of its forward, as in CUDA.

Autograd's engine runs each node on the stream that was current when forward created the node, and makes this
stream wait for those of the preceding nodes. At the end, the caller's stream waits for all streams on which
gradients were accumulated. The C++ engine gets streams from a device guard. Devices written in Python have no
such guard, so this module does its work.

    forward    stream 0: f1 (node 7)      stream 3: f2 (node 8)
    backward   stream 3: f2's node  ──event──>  stream 0: f1's node  ──event──> caller's stream

Autograd numbers nodes in forward order, so the switches of the current stream (`note_switch`) determine each
node's stream. Each node that runs hooks the nodes after it, so all nodes are seen, even those that launch
nothing. Programs that compute on one stream pay for one comparison.

If a gradient has several contributions, they are summed after the last of their nodes, whose stream waits for
the others. Gradients of parameters are accumulated on the stream that was current when their node was
created: by the first forward that uses the parameter, or by DDP's constructor (`keep_accumulators`).
Gradients that move to another stream are kept alive for that stream, as by `record_stream`.

Source: torch/csrc/autograd/engine.cpp and input_buffer.cpp. Simplification: gradients are summed on the
stream of the node that produces the last contribution, not on the consumer's stream.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from fsdpbench.base.torch_internals import (
    current_autograd_node,
    get_sequence_nr,
    queue_callback,
    tree_leaves,
    tree_map_only,
)
from fsdpbench.sim.model.timeline import DEFAULT_STREAM, Marker, Timeline


class _Device(Protocol):
    """The device that has the streams."""

    stream: int
    timeline: Timeline


_ACCUMULATES = 1 << 62
"""Autograd nodes that accumulate gradients have numbers from here on."""
_STREAM = "fsdpbench_stream"


@dataclass
class _Run:
    """One call of backward: the caller's stream and the current node."""

    caller: int
    node: Any = None
    leaves: set[int] = field(default_factory=set)
    # By id of a node: the numbers of the nodes before it, and the markers to wait for.
    before: dict[int, list[tuple[int, Marker]]] = field(default_factory=dict)
    # By id of a pending node: the node, and the hook that reports it.
    hooks: dict[int, tuple[Any, Any]] = field(default_factory=dict)
    # Whether the current node's gradients come from another stream, and whether they are being summed.
    crosses: bool = False
    adds: bool = False
    ends_well: bool = False


_NOTHING: Iterator[object] = iter(())


def take_error() -> BaseException | None:
    """Clear the error that is set in Python and return it; while it is set, only globals are accessible."""
    try:
        next(_NOTHING, None)  # with a default, this raises the error that is set
    except BaseException as error:  # a `SystemError` if a profile function was called with the error set
        return (error.__cause__ or error) if isinstance(error, SystemError) else error
    return None


class BackwardStreams:
    """Assignment of backward nodes to streams.

    `is_active`: several streams are in use. `keep` is called with each tensor that moves to another stream.
    """

    def __init__(
        self, accelerator: _Device, keep: Callable[[torch.Tensor, int], None] = lambda tensor, stream: None
    ) -> None:
        self._accelerator = accelerator
        self._keep = keep
        self.is_active = False
        self._runs: list[_Run] = []
        self.errors: list[BaseException] = []
        """Errors of hooks; if not kept here, the engine would fail with a `SystemError`."""
        # Node numbers from which another stream was current, and these streams.
        self._numbers = [0]
        self._streams = [DEFAULT_STREAM]

    def note_switch(self, stream: int) -> None:
        """Record that another stream becomes current; new nodes belong to it."""
        number = get_sequence_nr()
        if self._numbers[-1] == number:  # no node was created in between
            self._numbers.pop()
            self._streams.pop()
        if not self._streams or self._streams[-1] != stream:
            self._numbers.append(number)
            self._streams.append(stream)

    @contextmanager
    def made_on(self, stream: int) -> Iterator[None]:
        """Assign nodes created inside to `stream`, whatever the current stream is."""
        self.note_switch(stream)
        try:
            yield
        finally:
            self.note_switch(self._accelerator.stream)

    def stream_of(self, number: int) -> int:
        """Return the stream on which forward created a node."""
        return self._streams[max(bisect_right(self._numbers, number) - 1, 0)]

    def keep_accumulators(self, parameters: Iterable[torch.Tensor]) -> None:
        """Assign gradient-accumulating nodes, which the program holds, to the current stream."""
        for parameter in parameters:
            if parameter.requires_grad and parameter.is_leaf:
                node: Any = parameter.expand_as(parameter).grad_fn
                node.next_functions[0][0].metadata[_STREAM] = self._accelerator.stream

    def run(self, backward: Callable[..., Any], roots: Any, *args: Any, **kwargs: Any) -> Any:
        """Call the engine; afterwards the caller's stream waits for all gradients."""
        caller = self._accelerator.stream
        if caller == DEFAULT_STREAM and len(self._streams) == 1 and not self._runs:
            return backward(roots, *args, **kwargs)  # the program uses one stream
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
            if not current.ends_well:  # it raised, or no node ran
                self._finish(current)
            for _, hook in current.hooks.values():
                hook.remove()

    def arrive(self, tensors: Sequence[Any] = ()) -> None:
        """Switch to the current node's stream, after the nodes before it; `tensors`: the node's inputs."""
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
        """Hook a node that will run."""
        if node is None:
            return
        if id(node) not in run.hooks:
            run.hooks[id(node)] = (node, node.register_prehook(self._begin))
        if marker is not None:
            run.before.setdefault(id(node), []).append((number, marker))

    def _begin(self, gradients: Sequence[Any]) -> None:
        """Begin a node; keep inputs from other streams alive until the node's stream has used them."""
        self.arrive()
        if self._runs[-1].crosses:
            self._keep_on_this_stream(gradients)

    def _keep_on_this_stream(self, tensors: Sequence[Any]) -> None:
        for tensor in tensors:
            if isinstance(tensor, torch.Tensor):
                self._keep(getattr(tensor, "_local_tensor", tensor), self._accelerator.stream)

    def _wait_before_adding(self, run: _Run, node: Any) -> None:
        """Wait for the other gradients of the same node: the engine sums them after this node."""

        def wait(*gradients: Any) -> None:
            handle.remove()
            run.adds = True
            for following, _ in node.next_functions:
                for _, marker in run.before.get(id(following), ()):
                    self._accelerator.timeline.make_wait(self._accelerator.stream, marker)

        handle = node.register_hook(wait)

    def _left(self, run: _Run) -> None:
        """End a node: the consumers of its gradients wait for this point of its stream."""
        accelerator, marker = self._accelerator, None
        number = run.node._sequence_nr()
        for following, _ in run.node.next_functions:
            if following is not None:
                if marker is None:
                    marker = accelerator.timeline.record(accelerator.stream)
                run.before.setdefault(id(following), []).append((number, marker))

    def _end_well(self, run: _Run) -> None:
        """Return to the caller's stream after the last node, before other callbacks."""
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


def reaching_unused(are_static: bool) -> Callable[..., Any]:
    """Return a hook for DDP models that makes backward also reach parameters on which no result depends."""
    found: list[torch.Tensor] = []

    def hook(model: Any, args: Any, output: Any) -> Any:
        if torch.compiler.is_compiling() or not (
            torch.is_grad_enabled() and model.require_backward_grad_sync
        ):
            return output
        if not (found and are_static):
            nodes = [leaf.grad_fn for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]
            seen = set(nodes)
            for node in nodes:  # the list grows
                new = {each for each, _ in getattr(node, "next_functions", ())} - seen
                seen |= new
                nodes += new
            used = {id(getattr(node, "variable", None)) for node in seen}
            found[:] = [
                each for each in model.module.parameters() if each.requires_grad and id(each) not in used
            ]
        return tree_map_only(
            torch.Tensor, lambda leaf: _Reaching.apply(leaf, *found) if leaf.requires_grad else leaf, output
        )

    return hook


class _Reaching(torch.autograd.Function):
    """Identity view whose backward also reaches unused parameters, without giving them gradients."""

    @staticmethod
    def forward(ctx: Any, result: torch.Tensor, *parameters: torch.Tensor) -> torch.Tensor:
        ctx.parameters, ctx.fresh = parameters, [each for each in parameters if each.grad is None]
        return result.view_as(result)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        def forget() -> None:
            for parameter in ctx.fresh:
                parameter.grad = None  # DDP's C++ code has set zeros

        queue_callback(lambda: queue_callback(forget))  # runs after the callback that DDP's C++ code queues
        return gradient, *[None] * len(ctx.parameters)
