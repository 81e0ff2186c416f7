"""Rotary positions: each pair of a head's elements is rotated by an angle proportional to the position (Su et
al. 2021, arXiv 2104.09864). The angles are computed once per forward, for all blocks.

Each pair's frequency is theta^(-2k / width), or a scaled one for longer contexts: `linear` (Chen et al.
2023), `llama3` (Llama 3.1's published code), `yarn` (Peng et al. 2023, arXiv 2309.00071), `longrope` (Ding et
al. 2024, arXiv 2402.13753: one factor per pair).

Published code rotates pairs in different forms:

    halves     elements k and k + width / 2 are a pair; in the model's dtype
    complex    neighbours are one complex number in fp32 (Meta's code, TorchTitan's)
    matrices   neighbours are multiplied by 2 x 2 matrices in fp32 (foundation-model-stack's)
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch
from torch import Tensor

from fsdpbench.workloads.shape import Rope

Tables = tuple[Tensor, ...]


def speeds(width: int, theta: float, rope: Rope, device: torch.device, seq: int = 0) -> Tensor:
    """Return the frequencies of the width / 2 pairs, in radians per position (fp32), for `seq` tokens."""
    pairs = torch.arange(0, width, 2, device=device, dtype=torch.float32)
    plain = torch.exp(pairs * (-math.log(theta) / width))
    if rope.kind == "linear":
        return plain / rope.factor
    if rope.kind == "longrope":
        factors = rope.long if seq > rope.original else rope.short
        return plain / torch.tensor(factors, device=device, dtype=torch.float32)
    if rope.kind == "llama3":
        turns = plain * (rope.original / (2 * math.pi))
        keep = ((turns - rope.low) / (rope.high - rope.low)).clamp(0.0, 1.0)
        return plain * (keep + (1 - keep) / rope.factor)
    if rope.kind == "yarn":
        first, last = _yarn_bounds(width, theta, rope)
        slowed = ((pairs / 2 - first) / (last - first)).clamp(0.0, 1.0)
        return plain * (1 - slowed + slowed / rope.factor)
    return plain


def _yarn_bounds(width: int, theta: float, rope: Rope) -> tuple[float, float]:
    """Return the pairs between which yarn changes from original to divided frequencies."""

    def pair_that_turns(times: float) -> float:
        return width * math.log(rope.original / (times * 2 * math.pi)) / (2 * math.log(theta))

    first, last = pair_that_turns(rope.fast), pair_that_turns(rope.slow)
    if rope.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, width - 1)
    return first, last if last > first else first + 0.001


@dataclass(frozen=True)
class Rotation:
    """A form of rotary positions: `tables(seq, width, theta, like)` computes the angles on the device of
    `like`, `turn(x, *tables)` rotates x, [batch, heads, seq, width]."""

    tables: Callable[[int, int, int, Tensor], Tables]
    turn: Callable[..., Tensor]


def _angles(seq: int, width: int, theta: float, like: Tensor, rope: Rope) -> Tensor:
    """Return the angle of each position and pair, [seq, width / 2] in fp32."""
    turning = speeds(width, theta, rope, like.device, seq * _SHARE.get()[1])
    return positions(seq, like.device, torch.float32)[:, None] * turning[None, :]


_PLAIN = Rope()


def rotary_tables(
    seq: int, width: int, theta: float, like: Tensor, rope: Rope = _PLAIN
) -> tuple[Tensor, Tensor]:
    """Return cosines and sines, [seq, width] each, in the dtype and on the device of `like`."""
    angles = _angles(seq, width, theta, like, rope)
    angles = torch.cat((angles, angles), dim=-1)
    cosines, sines = angles.cos(), angles.sin()
    if rope.attention_factor != 1.0:
        cosines, sines = cosines * rope.attention_factor, sines * rope.attention_factor
    return cosines.to(like.dtype), sines.to(like.dtype)


def rotate(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Rotate the first elements of x, [batch, heads, seq, width], up to the tables' width, [seq, turned]."""
    turned = cosines.shape[-1]
    head, rest = (x, None) if turned == x.shape[-1] else x.split((turned, x.shape[-1] - turned), dim=-1)
    first, second = head.chunk(2, dim=-1)
    result = head * cosines + torch.cat((-second, first), dim=-1) * sines
    return result if rest is None else torch.cat((result, rest), dim=-1)


def _complex_tables(seq: int, width: int, theta: int, like: Tensor) -> Tables:
    angles = _angles(seq, width, theta, like, _PLAIN)
    return (torch.complex(angles.cos(), angles.sin()),)


def _turn_complex(x: Tensor, turns: Tensor) -> Tensor:
    numbers = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(numbers * turns).flatten(-2).type_as(x)


def _matrix_tables(seq: int, width: int, theta: int, like: Tensor) -> Tables:
    """Return each token's matrices, as looked up by position: [batch, 1, seq, width / 2, 2, 2]."""
    angles = _angles(seq, width, theta, like, _PLAIN)
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


_SHARE: ContextVar[tuple[int, int]] = ContextVar("share", default=(0, 1))


@contextmanager
def shared_sequence(rank: int, ranks: int) -> Iterator[None]:
    """Give the models in this thread the share of `rank` out of `ranks` of each sequence.

    Each sequence is cut into 2R equal parts for R ranks. As in torch's `context_parallel`, rank r has parts r
    and 2R-1-r: late tokens cost more in causal attention, so each rank gets an early and a late part.
    """
    token = _SHARE.set((rank, ranks))
    try:
        yield
    finally:
        _SHARE.reset(token)


def positions(seq: int, device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
    """Return the positions of the `seq` tokens that the model receives, [seq]."""
    rank, ranks = _SHARE.get()
    if ranks == 1:
        return torch.arange(seq, device=device, dtype=dtype)
    part = seq // 2
    starts = (rank * part, (2 * ranks - 1 - rank) * part)
    return torch.cat([torch.arange(start, start + part, device=device, dtype=dtype) for start in starts])
