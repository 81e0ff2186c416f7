"""Positions of the tokens that a model is given: from 0 on, or those of a rank's share of each sequence.

Of a sequence that R ranks share in 2R equal parts, rank r has part r and part 2R-1-r, as torch's
`context_parallel` gives them: causal attention costs late tokens more, so each has an early and a late part.

    with shared_sequence(rank, ranks):
        model(inputs, targets)          # both of this rank's parts
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

_SHARE: ContextVar[tuple[int, int]] = ContextVar("share", default=(0, 1))


@contextmanager
def shared_sequence(rank: int, ranks: int) -> Iterator[None]:
    """The models of this thread see the share of `rank`, one of `ranks`, of each sequence."""
    token = _SHARE.set((rank, ranks))
    try:
        yield
    finally:
        _SHARE.reset(token)


def positions(seq: int, device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
    """Those of `seq` tokens that the model is given, [seq]."""
    rank, ranks = _SHARE.get()
    if ranks == 1:
        return torch.arange(seq, device=device, dtype=dtype)
    part = seq // 2
    starts = (rank * part, (2 * ranks - 1 - rank) * part)
    return torch.cat([torch.arange(start, start + part, device=device, dtype=dtype) for start in starts])


def whole_length(seq: int) -> int:
    """Tokens of the sequence that `seq` tokens are this rank's share of."""
    return seq * _SHARE.get()[1]
