"""Memory that is lent to another stream while gradients are reduced, and when it is taken back.

===================  ==============  ====================================  ==================================
memory               owned by        read by                               taken back
===================  ==============  ====================================  ==================================
gradients            compute stream  the copy-in, or the collectives       before a later stage is reduced;
                                                                           copied: at its first gradient
input                compute stream  the reduce-scatter                    before the next stage is reduced
output               reduce stream   the cast or sum that delivers it      two units later, at the end
===================  ==============  ====================================  ==================================

To take memory back with events, the owner waits for the reader's event and drops the reference. With
``record_stream`` the allocator tracks the reader, and nothing is kept here (``buffer.py``).

Units of one stage (one for each dtype and mesh) are reduced one after the other and lend memory together.
Taking back the first unit's memory before the second is reduced would make compute wait for a collective.
"""

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch

from ..shared.settings import MemoryHandover
from .buffer import HOST
from .streams import Event, Stream, Streams
from .unit import Unit

# Above this many bytes, the placement of the input's block decides how much memory is reserved. Gaps left by
# gradients that are freed early fragment it: with a tied embedding of 5 GiB, 5 GiB more were reserved.
_HUGE_INPUT = 4 << 30


class _Gradients(NamedTuple):
    """Gradients of one unit of stage number ``stage``. At ``event`` they have been read."""

    stage: int
    tensors: list[torch.Tensor]
    event: Event | None
    # Whether only the copy-in reads them; otherwise the collectives do.
    copied: bool


class LentMemory:
    """The memory that the units of a tree have lent and not taken back."""

    def __init__(self, streams: Streams, mode: MemoryHandover) -> None:
        self._streams = streams
        self._records = mode is MemoryHandover.RECORD_STREAM
        # Whether the compute stream owns inputs; with ``record_stream`` they would be freed too late.
        self.lends_inputs = streams.has_streams and not self._records
        self._stage = 0
        self._largest_input = 0
        self._gradients: deque[_Gradients] = deque()
        self._inputs: deque[tuple[torch.Tensor, Event | None]] = deque()
        self._outputs: deque[tuple[torch.Tensor, Stream, Event | None]] = deque()

    def lend_gradients(self, gradients: list[torch.Tensor], stream: Stream, *, copied: bool = False) -> None:
        """Record that work queued on ``stream`` up to now reads the gradients. Empties the caller's list."""
        if self._streams.has_streams and gradients:
            if self._records:
                for gradient in gradients:
                    stream.keep(gradient)
            else:
                self._gradients.append(_Gradients(self._stage, list(gradients), stream.record(), copied))
        gradients.clear()

    def lend_input(self, source: torch.Tensor, stream: Stream) -> None:
        """Record that work queued on ``stream`` up to now reads ``source``, which the compute stream owns."""
        self._largest_input = max(self._largest_input, source.nbytes)
        self._inputs.append((source, stream.record()))

    def lend_output(self, output: torch.Tensor, owner: Stream, stream: Stream, event: Event | None) -> None:
        """Record that ``stream`` reads ``output``, which ``owner`` allocated, until ``event``."""
        if self._records:
            stream.keep(output)
            return
        while len(self._outputs) > 1:
            _, other, done = self._outputs.popleft()
            # The block returns to the pool of ``other``: its next reduction may write only after the reader.
            other.wait(done)
        self._outputs.append((output, owner, event))

    def take_back(self, stages_held: int) -> None:
        """Before a reduction, take back inputs, and gradients except those of the last ``stages_held``."""
        compute = self._streams.compute
        while self._gradients and self._gradients[0].stage <= self._stage - stages_held:
            compute.wait(self._gradients.popleft().event)
        while self._inputs:
            compute.wait(self._inputs.popleft()[1])
        self._stage += 1

    def is_copying(self, stages_held: int) -> bool:
        """Return whether gradients of stages before the last `stages_held` only wait for their copy-in."""
        if not self._gradients or self._largest_input > _HUGE_INPUT:
            return False
        first = self._gradients[0]
        return first.copied and first.stage <= self._stage - stages_held

    def take_back_copied(self, stages_held: int) -> None:
        """Take back gradients whose copy-in is done, in the middle of a stage's backward."""
        while self.is_copying(stages_held):
            self._streams.compute.wait(self._gradients.popleft().event)

    def finish(self) -> None:
        """Take back everything at the end of backward, when compute has waited for all streams."""
        self.take_back(0)
        self._outputs.clear()


# -- CPU offload: copies of reduced gradients to the host (``buffer.py`` has the diagram) -------------------


class GradientReturns:
    """Copies reduced gradients to the host and delivers them there, in order."""

    def __init__(self, streams: Streams, mode: MemoryHandover) -> None:
        self._streams = streams
        self._mode = mode
        # Functions that deliver a gradient, each with the event of its copy.
        self._on_the_way: deque[tuple[Callable[[], None], Event | None]] = deque()
        self._read: deque[tuple[torch.Tensor, Event | None]] = deque()

    def start(
        self, unit: Unit, gradient: torch.Tensor, which: Sequence[int], offsets: Sequence[int], stream: Stream
    ) -> None:
        """Start the copy of ``gradient`` (1-D, on the device, written on ``stream``) to the host."""
        assert unit.offload is not None
        back = self._streams.to_host
        back.follow(stream)
        with back:
            host = gradient.to(HOST, non_blocking=unit.offload.pins)
            event = back.record()
        self._keep(gradient, event)
        self._on_the_way.append((partial(unit.presentation.deliver, host, which, offsets), event))
        while self._on_the_way and ((first := self._on_the_way[0][1]) is None or first.query()):
            arrived, _ = self._on_the_way.popleft()
            arrived()

    def finish(self, *, deliver: bool = True) -> None:
        """Wait for all copies, because the optimizer may run next, and ``deliver`` or drop them."""
        while self._on_the_way:
            arrived, event = self._on_the_way.popleft()
            if event is not None:
                event.synchronize()
            if deliver:
                arrived()
        self._read.clear()

    def _keep(self, gradient: torch.Tensor, event: Event | None) -> None:
        """Keep ``gradient`` until the next copy starts; then the reduction streams wait for ``event``."""
        if self._mode is MemoryHandover.RECORD_STREAM:
            self._streams.to_host.keep(gradient)
            return
        self._read.append((gradient, event))
        while len(self._read) > 1:
            _, event = self._read.popleft()
            # One of the two streams allocated the gradient and reuses its memory after the copy to the host.
            self._streams.reduce_scatter.wait(event)
            self._streams.all_reduce.wait(event)
