"""Rotary positions in the forms of published code: each turns pairs of a head's elements by the angle of
their position (Su et al. 2021, arXiv 2104.09864). The angles are computed once a forward, for all blocks.

    halves     element k and k + width / 2 are a pair; in the model's dtype
    complex    neighbours are one complex number in fp32 (Meta's code, TorchTitan's)
    matrices   neighbours are turned by 2 x 2 matrices in fp32 (foundation-model-stack's)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch
from torch import Tensor

Tables = tuple[Tensor, ...]


@dataclass(frozen=True)
class Rotation:
    """`tables(seq, width, theta, like)`, on `like`'s device, and `turn(x, *tables)` of x, [batch, heads, seq,
    width]."""

    tables: Callable[[int, int, int, Tensor], Tables]
    turn: Callable[..., Tensor]


def _angles(seq: int, width: int, theta: int, like: Tensor) -> Tensor:
    """[seq, width / 2] in fp32: position x theta^(-2k / width)."""
    pairs = torch.arange(0, width, 2, device=like.device, dtype=torch.float32)
    speeds = torch.exp(pairs * (-math.log(theta) / width))
    return positions(seq, like.device, torch.float32)[:, None] * speeds[None, :]


def rotary_tables(seq: int, width: int, theta: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines, [seq, width] each, in `like`'s dtype."""
    angles = _angles(seq, width, theta, like)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos().to(like.dtype), angles.sin().to(like.dtype)


def rotate(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Turn the pairs of x by the angles of their positions."""
    first, second = x.chunk(2, dim=-1)
    return x * cosines + torch.cat((-second, first), dim=-1) * sines


def _complex_tables(seq: int, width: int, theta: int, like: Tensor) -> Tables:
    angles = _angles(seq, width, theta, like)
    return (torch.complex(angles.cos(), angles.sin()),)


def _turn_complex(x: Tensor, turns: Tensor) -> Tensor:
    numbers = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(numbers * turns).flatten(-2).type_as(x)


def _matrix_tables(seq: int, width: int, theta: int, like: Tensor) -> Tables:
    """[batch, 1, seq, width / 2, 2, 2]: one for each token, as looked up by its position."""
    angles = _angles(seq, width, theta, like)
    cosines, sines = angles.cos(), angles.sin()
    matrices = torch.stack((cosines, -sines, sines, cosines), -1).unflatten(-1, (2, 2))
    return (matrices.repeat(len(like), 1, 1, 1, 1).unsqueeze(1),)


def _turn_by_matrices(x: Tensor, matrices: Tensor) -> Tensor:
    pairs = x.float().unflatten(-1, (-1, 2)).unsqueeze(-2)
    return (matrices * pairs).sum(-1).flatten(-2).type_as(x)


ROTATIONS: dict[str, Rotation] = {
    "halves": Rotation(rotary_tables, rotate),
    "complex": Rotation(_complex_tables, _turn_complex),
    "matrices": Rotation(_matrix_tables, _turn_by_matrices),
}


# Positions of the tokens that a model is given: from 0 on, or those of a rank's share of each sequence.
# Of a sequence that R ranks share in 2R equal parts, rank r has part r and part 2R-1-r, as torch's
# `context_parallel` gives them: causal attention costs late tokens more, so each has an early and a late
# part.
#     with shared_sequence(rank, ranks):
#         model(inputs, targets)          # both of this rank's parts

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
