"""Rotary positions: each pair of a head's elements is turned by an angle that grows with the position.

How fast each pair turns is theta^(-2k / width), or what a scaling for longer contexts makes of it: `linear`
(Chen et al. 2023), `llama3` (as Llama 3.1's published code), `yarn` (Peng et al. 2023, arXiv 2309.00071),
`longrope` (Ding et al. 2024, arXiv 2402.13753: a factor a pair).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from fsdpbench.workloads.rotations import positions, whole_length
from fsdpbench.workloads.tensor_plan import ShapeError

_KINDS = ("default", "linear", "llama3", "yarn", "longrope")
_LISTS = ("short", "long")


@dataclass(frozen=True)
class Rope:
    """How positions are scaled: `kind` and its numbers, as text `yarn:factor=32;original=4096;truncate=0`.

    `factor` stretches the context, `original` is its length before; `low`, `high`: llama3's frequency
    factors; `fast`, `slow`: yarn's betas; `truncate`: yarn's bounds are rounded to whole pairs; `mscale`:
    cosines and sines are multiplied by it (0: yarn's 0.1 ln factor + 1); `short`, `long`: longrope's factors,
    as `short=1.0|1.1|...`, the latter of sequences longer than `original`.
    """

    kind: str = "default"
    factor: float = 1.0
    original: float = 8192.0
    low: float = 1.0
    high: float = 4.0
    fast: float = 32.0
    slow: float = 1.0
    truncate: float = 1.0
    mscale: float = 0.0
    short: tuple[float, ...] = ()
    long: tuple[float, ...] = ()

    @classmethod
    def parse(cls, text: str) -> Rope:
        """Raises: ShapeError, the text names no kind or no number."""
        kind, _, rest = text.partition(":")
        known = {field.name for field in fields(cls)} - {"kind"}
        numbers: dict[str, Any] = {}
        try:
            for part in filter(None, rest.split(";")):
                name, _, value = part.partition("=")
                if name not in known:
                    raise ValueError
                found = tuple(map(float, value.split("|")))
                if not all(math.isfinite(each) and each >= 0 for each in found):
                    raise ValueError
                if name in _LISTS:
                    numbers[name] = found
                else:
                    (numbers[name],) = found
            rope = cls(kind, **numbers)
            if kind not in _KINDS or rope.factor < 1 or rope.high <= rope.low or rope.original < 1:
                raise ValueError
        except ValueError:
            raise ShapeError(
                f"shape field rope is '{text[:80]}': it is one of {', '.join(_KINDS)}, and numbers as in "
                "llama3:factor=8;original=8192"
            ) from None
        return rope

    def __str__(self) -> str:
        """The text that `parse` reads."""
        plain = Rope(self.kind)
        numbers = [
            f"{field.name}={_shown(getattr(self, field.name))}"
            for field in fields(self)
            if field.name != "kind" and getattr(self, field.name) != getattr(plain, field.name)
        ]
        return self.kind + (":" + ";".join(numbers) if numbers else "")

    @property
    def attention_factor(self) -> float:
        """What cosines and sines are multiplied by."""
        if self.mscale:
            return self.mscale
        return 0.1 * math.log(self.factor) + 1.0 if self.kind == "yarn" and self.factor > 1 else 1.0


def _shown(value: float | tuple[float, ...]) -> str:
    return "|".join(map(repr, value)) if isinstance(value, tuple) else repr(value)


def speeds(width: int, theta: float, rope: Rope, device: torch.device, seq: int = 0) -> Tensor:
    """Radians a position that each of width / 2 pairs turns in a sequence of `seq` tokens, fp32."""
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
    """The pairs between which yarn goes from keeping speeds to dividing them."""

    def pair_that_turns(times: float) -> float:
        return width * math.log(rope.original / (times * 2 * math.pi)) / (2 * math.log(theta))

    first, last = pair_that_turns(rope.fast), pair_that_turns(rope.slow)
    if rope.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, width - 1)
    return first, last if last > first else first + 0.001


def rotary_tables(seq: int, width: int, theta: float, rope: Rope, like: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines of [seq, width], in `like`'s dtype and on its device."""
    places = positions(seq, like.device, torch.float32)
    angles = places[:, None] * speeds(width, theta, rope, like.device, whole_length(seq))[None, :]
    angles = torch.cat((angles, angles), dim=-1)
    cosines, sines = angles.cos(), angles.sin()
    if rope.attention_factor != 1.0:
        cosines, sines = cosines * rope.attention_factor, sines * rope.attention_factor
    return cosines.to(like.dtype), sines.to(like.dtype)


def rotate(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Turn the first pairs of x, [batch, heads, seq, width], as many as the tables, [seq, turned], have."""
    turned = cosines.shape[-1]
    head, rest = (x, None) if turned == x.shape[-1] else x.split((turned, x.shape[-1] - turned), dim=-1)
    first, second = head.chunk(2, dim=-1)
    result = head * cosines + torch.cat((-second, first), dim=-1) * sines
    return result if rest is None else torch.cat((result, rest), dim=-1)
