"""One split that hands out all parts of a flat buffer, instead of a slice and a view for each part."""

from __future__ import annotations

from collections.abc import Sequence

import torch


class Cuts:
    """Where parts are in a 1-D buffer, and what shape each has: in any order, with gaps.

    Args:
        numel: elements of the buffer.
        starts: where each part starts.
        shapes: of the parts, which do not overlap.
    """

    def __init__(self, numel: int, starts: Sequence[int], shapes: Sequence[tuple[int, ...]]) -> None:
        numels = [torch.Size(shape).numel() for shape in shapes]
        self._sizes: list[int] = []
        self._which = [0] * len(starts)
        end = 0
        for index in sorted(range(len(starts)), key=lambda index: (starts[index], numels[index])):
            if starts[index] > end:
                self._sizes.append(starts[index] - end)
            self._which[index] = len(self._sizes)
            self._sizes.append(numels[index])
            end = max(end, starts[index] + numels[index])
        if numel > end:
            self._sizes.append(numel - end)
        self._as_split = self._which == list(range(len(self._sizes)))
        self._shaped = [(index, shape) for index, shape in enumerate(shapes) if len(shape) != 1]

    def __call__(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        """The parts in their order: memory of ``buffer``, but to autograd no views of it."""
        pieces = buffer.unsafe_split_with_sizes(self._sizes)
        parts = list(pieces) if self._as_split else [pieces[index] for index in self._which]
        for index, shape in self._shaped:
            parts[index] = parts[index].view(shape)
        return parts
