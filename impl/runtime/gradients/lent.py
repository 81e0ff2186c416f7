"""Memory of one stream that another one still reads while gradients are reduced, and when it is given back.

===================  ==============  ====================================  ==================================
memory               belongs to      read by                               given back
===================  ==============  ====================================  ==================================
gradients            computation     the copy in, or the collectives       before a later stage is reduced
input                computation     the reduce-scatter                    before the next stage is reduced
output               reduce stream   the cast or sum that delivers it      two units later, at the end
===================  ==============  ====================================  ==================================

"Given back" with events: the owner waits for the reader's event, then forgets the memory. With
``record_stream`` the allocator is told of the reader, and nothing is kept here (``buffer.py``).

Units of one stage (one for each dtype and mesh) are reduced one after the other, and lend together: were the
first one's memory given back before the second is reduced, computation would wait for that collective.
"""

from __future__ import annotations

from collections import deque

import torch

from ...shared.settings import MemoryHandover
from ..streams import Event, Stream, Streams


class LentMemory:
    """What the units of a tree lent and not yet have back."""

    def __init__(self, streams: Streams, mode: MemoryHandover) -> None:
        self._streams = streams
        self._records = mode is MemoryHandover.RECORD_STREAM
        self.lends_inputs = streams.has_streams and not self._records
        """Whether inputs are memory of computation: with ``record_stream`` that would come back too late."""
        self._stage = 0
        self._gradients: deque[tuple[int, list[torch.Tensor], Event | None]] = deque()
        self._inputs: deque[tuple[torch.Tensor, Event | None]] = deque()
        self._outputs: deque[tuple[torch.Tensor, Stream, Event | None]] = deque()

    def lend_gradients(self, gradients: list[torch.Tensor], stream: Stream) -> None:
        """``stream`` reads the gradients up to here; the caller's list is emptied."""
        if self._streams.has_streams and gradients:
            if self._records:
                for gradient in gradients:
                    stream.keep(gradient)
            else:
                self._gradients.append((self._stage, list(gradients), stream.record()))
        gradients.clear()

    def lend_input(self, source: torch.Tensor | None, stream: Stream) -> None:
        """``stream`` reads ``source``, memory of computation, up to here."""
        if source is not None:
            self._inputs.append((source, stream.record()))

    def lend_output(self, output: torch.Tensor, owner: Stream, stream: Stream, event: Event | None) -> None:
        """``stream`` read ``output`` up to ``event``; it is memory of ``owner`` that nothing else holds."""
        if self._records:
            stream.keep(output)
            return
        while len(self._outputs) > 1:
            _, other, done = self._outputs.popleft()
            other.wait(done)
        self._outputs.append((output, owner, event))

    def take_back(self, stages_held: int) -> None:
        """Before a stage is reduced: inputs, and gradients except those of the last so many stages."""
        compute = self._streams.compute
        while self._gradients and self._gradients[0][0] <= self._stage - stages_held:
            _, _, event = self._gradients.popleft()
            compute.wait(event)
        while self._inputs:
            _, event = self._inputs.popleft()
            compute.wait(event)
        self._stage += 1

    def finish(self) -> None:
        """Everything: the end of backward, where computation has waited for all streams."""
        self.take_back(0)
        self._outputs.clear()
