"""Norms whose kernels are limited by threads: batch norms, and layer norms of short rows.

Figures are of traces of one H200 with torch 2.11 (ci/measured/gpu/h200), of kernels that every chip runs.
"""

from __future__ import annotations

import torch

from fsdpbench.sim.model.kernel_costs import KernelCosts
from fsdpbench.sim.torch_device.prices.memory import at_least, moves
from fsdpbench.sim.torch_device.prices.products import Call, OperatorCost, Price, tensor_bytes

# Instructions an element: a division in each step of Welford's mean and variance; two sums backward.
_STATISTICS, _GRADIENTS, _GRADIENTS_LAST = 115, 180, 85
_A_BLOCK = 0.6
"""The share of a multiprocessor that one block, which has one channel, keeps busy."""
# A row has a block of four warps, whose sums go through shuffles and shared memory.
_THREADS_A_ROW, _A_ROW, _A_ROW_BACKWARD = 128, 286, 155
# Up to so many rows a block of the weights' gradient goes through all of them, at so many ns.
_ROWS_OF_ONE_BLOCK, _A_ROW_OF_ONE_BLOCK_NS = 65536, 4.0


def _batch_norm(x_at: int, instructions: float, channels_last: float) -> Price:
    """Return the rule of ATen's batch norm of 16 bits; others move bytes.

    `x_at`: position of the input. A pass computes sums, another one the result. Sums are of a block for each
    channel; with channels last they are divided among blocks.
    """
    by_bytes = moves("reduction")

    def price(call: Call, costs: KernelCosts) -> OperatorCost:
        found, x = by_bytes(call, costs), call.args[x_at]
        if x.dim() < 3 or x.element_size() != 2:
            return found
        if x.is_contiguous():
            alone = max(1.0, costs.profile.sm_count / (_A_BLOCK * x.shape[1]))
            sums = costs.issued_ns(x.numel() * alone, instructions)
        else:
            sums = costs.issued_ns(x.numel(), channels_last)
        written = costs.memory_bound_ns(2 * tensor_bytes(x)) if x_at == 0 else 0
        return at_least(found, sums + written)

    return price


def layer_norm(call: Call, costs: KernelCosts) -> OperatorCost:
    """Price a layer norm or its backward: by bytes or by rows, whichever takes longer."""
    backward = "backward" in call.func._schema.name
    found = (_BACKWARD if backward else _FORWARD)(call, costs)
    x = call.args[1 if backward else 0]
    width = 1
    for size in call.args[2 if backward else 1]:
        width *= size
    rows = x.numel() // max(1, width) if isinstance(x, torch.Tensor) else 0
    limit = costs.issued_ns(rows * _THREADS_A_ROW, _A_ROW_BACKWARD if backward else _A_ROW)
    if backward and rows <= _ROWS_OF_ONE_BLOCK:
        limit += round(rows * _A_ROW_OF_ONE_BLOCK_NS)
    return at_least(found, limit)


_FORWARD, _BACKWARD = moves("reduction"), moves("reduction", reread=True)
BATCH_NORM = _batch_norm(0, _STATISTICS, _STATISTICS)
BATCH_NORM_BACKWARD = _batch_norm(1, _GRADIENTS, _GRADIENTS_LAST)
