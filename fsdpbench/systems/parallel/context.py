"""Context parallelism: ranks share each sequence, and attention sends keys and values around their ring.

    query of this rank x (key, value) of this rank | of the one before | ...   merged by their log-sum-exp
                          sent on meanwhile ───────>

That is torch's own `context_parallel` (a prototype there): it takes the place of
`F.scaled_dot_product_attention` and cuts the batch so that each rank has a part from the head and one from
the tail of the sequence, which balances causal attention. The models count positions from a part's own start,
so that the work is right and the numbers are not: it is for simulated GPUs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.experimental import context_parallel

from fsdpbench.torch_internals import set_rotate_method

_SEQUENCE = 1
"""Dimension of [batch, seq]."""


@contextmanager
def ring(mesh: DeviceMesh, batch: tuple[torch.Tensor, ...]) -> Iterator[tuple[torch.Tensor, ...]]:
    """Forward and backward of one microbatch, int64 of [batch, seq] each: this rank's part of it, while
    attention goes around `mesh`."""
    set_rotate_method("alltoall")
    parts = tuple(tensor.clone() for tensor in batch)
    dims = [_SEQUENCE] * len(parts)
    with context_parallel(mesh, buffers=list(parts), buffer_seq_dims=dims, no_restore_buffers=set(parts)):
        yield parts
