"""Size classes: how large a block is for a request, and how large a segment for a block. All in bytes."""

from __future__ import annotations

from fsdpbench.sim.allocator.conf import POWER2_INTERVALS, AllocatorConf

MIB = 1 << 20
MIN_BLOCK = 512
SMALL_SIZE = 1 * MIB
SMALL_SEGMENT = 2 * MIB
LARGE_SEGMENT = 20 * MIB
MIN_LARGE_ALLOCATION = 10 * MIB
ROUND_LARGE = 2 * MIB
_MIB_BITS = 20


def block_size(nbytes: int, conf: AllocatorConf) -> int:
    """What a request of ``nbytes`` occupies: a multiple of 512, or a division of a power of two if set so."""
    if nbytes < MIN_BLOCK:
        return MIN_BLOCK
    table = conf.roundup_power2_divisions
    if table:
        divisions = table[min(max(nbytes.bit_length() - 1 - _MIB_BITS, 0), POWER2_INTERVALS - 1)]
        if divisions > 1 and nbytes > MIN_BLOCK * divisions:
            return _next_division(nbytes, divisions)
    return (nbytes + MIN_BLOCK - 1) & -MIN_BLOCK


def _next_division(nbytes: int, divisions: int) -> int:
    """Round up to the next of ``divisions`` equal steps between two powers of two."""
    floor = 1 << (nbytes.bit_length() - 1)
    if nbytes == floor:
        return nbytes
    step = floor // divisions
    return 2 * floor if step == 0 else -(-nbytes // step) * step


def segment_size(size: int) -> int:
    """What is asked of the driver for a block of ``size``."""
    if size <= SMALL_SIZE:
        return SMALL_SEGMENT
    if size < MIN_LARGE_ALLOCATION:
        return LARGE_SEGMENT
    return (size + ROUND_LARGE - 1) // ROUND_LARGE * ROUND_LARGE
