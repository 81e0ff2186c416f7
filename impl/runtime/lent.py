"""Memory of one stream that another one still reads while gradients are reduced, and when it is given back.

===================  ==============  ====================================  ==================================
memory               belongs to      read by                               given back
===================  ==============  ====================================  ==================================
gradients            computation     the copy in, or the collectives       before a later stage is reduced;
                                                                           copied: at its first gradient
input                computation     the reduce-scatter                    before the next stage is reduced
output               reduce stream   the cast or sum that delivers it      two units later, at the end
===================  ==============  ====================================  ==================================

"Given back" with events: the owner waits for the reader's event, then forgets the memory. With
``record_stream`` the allocator knows of the reader, and nothing is kept here (``buffer.py``).

Units of one stage (one for each dtype and mesh) are reduced one after the other, and lend together: were the
first one's memory given back before the second is reduced, computation would wait for that collective.
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

# Bytes of an input beside which gradients are small: it decides what is reserved, by where it finds room.
# What gradients given back early leave between others spoils that: a tied embedding of 5 GiB took 5 GiB more.
_HUGE_INPUT = 4 << 30


class _Gradients(NamedTuple):
    """Gradients of one unit of stage number ``stage``, read up to ``event``."""

    stage: int
    tensors: list[torch.Tensor]
    event: Event | None
    # Whether they are only copied, not read by the collectives themselves.
    copied: bool


class LentMemory:
    """The memory that a tree's units lent and do not have back yet."""

    def __init__(self, streams: Streams, mode: MemoryHandover) -> None:
        self._streams = streams
        self._records = mode is MemoryHandover.RECORD_STREAM
        # Whether inputs are memory of computation: with ``record_stream`` that would come back too late.
        self.lends_inputs = streams.has_streams and not self._records
        self._stage = 0
        self._largest_input = 0
        self._gradients: deque[_Gradients] = deque()
        self._inputs: deque[tuple[torch.Tensor, Event | None]] = deque()
        self._outputs: deque[tuple[torch.Tensor, Stream, Event | None]] = deque()

    def lend_gradients(self, gradients: list[torch.Tensor], stream: Stream, *, copied: bool = False) -> None:
        """Note that ``stream`` reads the gradients up to here; the caller's list is emptied."""
        if self._streams.has_streams and gradients:
            if self._records:
                for gradient in gradients:
                    stream.keep(gradient)
            else:
                self._gradients.append(_Gradients(self._stage, list(gradients), stream.record(), copied))
        gradients.clear()

    def lend_input(self, source: torch.Tensor, stream: Stream) -> None:
        """Note that ``stream`` reads ``source``, memory of computation, up to here."""
        self._largest_input = max(self._largest_input, source.nbytes)
        self._inputs.append((source, stream.record()))

    def lend_output(self, output: torch.Tensor, owner: Stream, stream: Stream, event: Event | None) -> None:
        """Note that ``stream`` read ``output``, memory that ``owner`` alone holds, up to ``event``."""
        if self._records:
            stream.keep(output)
            return
        while len(self._outputs) > 1:
            _, other, done = self._outputs.popleft()
            # The block goes back to ``other``'s pool: its next reduction may write there after the reader.
            other.wait(done)
        self._outputs.append((output, owner, event))

    def take_back(self, stages_held: int) -> None:
        """Take back inputs, and gradients but those of the last ``stages_held``, before a reduction."""
        compute = self._streams.compute
        while self._gradients and self._gradients[0].stage <= self._stage - stages_held:
            compute.wait(self._gradients.popleft().event)
        while self._inputs:
            compute.wait(self._inputs.popleft()[1])
        self._stage += 1

    def is_copying(self, stages_held: int) -> bool:
        """Return whether gradients of stages but the last `stages_held` can be given back once copied."""
        if not self._gradients or self._largest_input > _HUGE_INPUT:
            return False
        first = self._gradients[0]
        return first.copied and first.stage <= self._stage - stages_held

    def take_back_copied(self, stages_held: int) -> None:
        """Take back gradients that are copied by now, in the middle of a stage's backward."""
        while self.is_copying(stages_held):
            self._streams.compute.wait(self._gradients.popleft().event)

    def finish(self) -> None:
        """Take back everything at the end of backward, where computation has waited for all streams."""
        self.take_back(0)
        self._outputs.clear()


# -- with CPU offload: reduced gradients on their way to the host (``buffer.py`` has the picture) -----------


class GradientReturns:
    """Copies reduced gradients to the host and delivers them there, in their order."""

    def __init__(self, streams: Streams, mode: MemoryHandover) -> None:
        self._streams = streams
        self._mode = mode
        # What delivers a gradient, and when it has arrived.
        self._on_the_way: deque[tuple[Callable[[], None], Event | None]] = deque()
        self._read: deque[tuple[torch.Tensor, Event | None]] = deque()

    def start(
        self, unit: Unit, gradient: torch.Tensor, which: Sequence[int], offsets: Sequence[int], stream: Stream
    ) -> None:
        """Send off ``gradient`` (1-D, on the device, written on ``stream``)."""
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
        """Wait for all of them and ``deliver`` them, as the optimizer may come, or nothing."""
        while self._on_the_way:
            arrived, event = self._on_the_way.popleft()
            if event is not None:
                event.synchronize()
            if deliver:
                arrived()
        self._read.clear()

    def _keep(self, gradient: torch.Tensor, event: Event | None) -> None:
        """Keep what the copy still reads for one more turn, then let the reduction streams wait for it."""
        if self._mode is MemoryHandover.RECORD_STREAM:
            self._streams.to_host.keep(gradient)
            return
        self._read.append((gradient, event))
        while len(self._read) > 1:
            _, event = self._read.popleft()
            # Whichever of the two made it gets its memory back, after the copy to the host.
            self._streams.reduce_scatter.wait(event)
            self._streams.all_reduce.wait(event)
