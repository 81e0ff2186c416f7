"""Where brackets of JSON stand, without decoding it: quickly over whole blocks, by their bytes alone."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fsdpbench.reports.trace.model import Bool, Int64

_QUOTE, _BACKSLASH = ord('"'), ord("\\")
# `[` and `{`, `]` and `}` differ in one bit, so that a comparison finds both.
_BIT, _OPENING, _CLOSING = 0x20, ord("{"), ord("}")
_OTHERS = bytes(sorted(set(range(256)) - set(b'"[]{}')))
_STEPS = bytes.maketrans(b"[{]}", b"\x01\x01\xff\xff")

Bytes = npt.NDArray[np.uint8]


def nesting(text: bytes) -> int:
    """How deep objects and lists nest in JSON; brackets in strings do not count."""
    if b"\\" in text:
        text = text.replace(b"\\\\", b"").replace(b'\\"', b"")
    # Steps up and down and quotes only, and of most strings not even the quotes: a fortieth of the text.
    marks = text.translate(_STEPS, _OTHERS).replace(b'""', b"")
    steps = np.frombuffer(marks, np.int8)
    if b'"' in marks:
        quotes = steps == _QUOTE
        outside = np.cumsum(quotes, dtype=np.uint8) & 1 == 0
        steps = steps[outside & ~quotes]
    return int(np.cumsum(steps, dtype=np.int64).max(initial=0))


@dataclass(frozen=True, eq=False)
class Brackets:
    """The brackets of a block outside of strings: place, what is nested after each, and which they are."""

    at: Int64
    depth: Int64
    opens: Bool
    byte: Bytes


class BracketFinder:
    """Finds the brackets of a text that comes in blocks; keeps what one block means for the next."""

    def __init__(self) -> None:
        self.depth = 0
        self.in_string = False
        self._held = b""

    def take(self, block: bytes) -> tuple[bytes, Brackets]:
        """The block to continue with (a backslash at its end waits for what it escapes), and its brackets."""
        block = self._held + block
        run = len(block) - len(block.rstrip(b"\\"))
        self._held = b"\\" if run % 2 else b""
        block = block[: len(block) - len(self._held)]
        codes = np.frombuffer(block, np.uint8)
        quotes = np.flatnonzero(codes == _QUOTE)
        if b"\\" in block:
            quotes = np.setdiff1d(quotes, _escaped(codes), assume_unique=True)
        at, self.in_string = _outside_strings(codes, quotes, within=self.in_string)
        opens = (codes[at] | _BIT) == _OPENING
        depth = self.depth + np.cumsum(np.where(opens, 1, -1))
        self.depth = int(depth[-1]) if len(depth) else self.depth
        return block, Brackets(at, depth, opens, codes[at])


def _outside_strings(codes: Bytes, quotes: Int64, *, within: bool) -> tuple[Int64, bool]:
    """The brackets that are in no string, and whether the text ends in one; `within`: begins in one."""
    folded = codes | _BIT
    brackets = np.flatnonzero((folded == _OPENING) | (folded == _CLOSING))
    inside = (np.searchsorted(quotes, brackets) + within) % 2 == 1
    return brackets[~inside], (len(quotes) + within) % 2 == 1


def _escaped(codes: Bytes) -> Int64:
    """Places right after a backslash that is not itself escaped: of a run, every second one escapes."""
    at = np.flatnonzero(codes == _BACKSLASH)
    number = np.arange(len(at))
    begins = np.append(True, np.diff(at) != 1)
    first = np.maximum.accumulate(np.where(begins, number, 0))
    return at[(number - first) % 2 == 0] + 1
