"""Context parallelism: ranks share each sequence, and attention sends keys and values around their ring.

    query of this rank x (key, value) of this rank | of the one before | ...   merged by their log-sum-exp
                          sent on meanwhile ───────>

That is torch's own `context_parallel` (a prototype there): it takes the place of
`F.scaled_dot_product_attention` and cuts the batch so that each rank has a part from the head and one from
the tail of the sequence, which balances causal attention; the models take positions of these parts. On CPU
ranks the batch is cut here, and attention is torch's ring over the CPU's kernel (`cpu_ring.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.experimental import context_parallel

from fsdpbench.systems.parallel.cpu_ring import attention_by_ring
from fsdpbench.torch_internals import set_rotate_method
from fsdpbench.workloads.rotations import shared_sequence

_SEQUENCE = 1
"""Dimension of [batch, seq]."""


@contextmanager
def ring(mesh: DeviceMesh, batch: tuple[torch.Tensor, ...]) -> Iterator[tuple[torch.Tensor, ...]]:
    """Forward and backward of one microbatch, int64 of [batch, seq] each: this rank's part of it, while
    attention goes around `mesh`."""
    set_rotate_method("alltoall")
    rank, ranks = mesh.get_local_rank(), mesh.size()
    with shared_sequence(rank, ranks):
        if mesh.device_type == "cpu":
            with attention_by_ring(mesh.get_group()):
                yield tuple(_head_and_tail(tensor, rank, ranks) for tensor in batch)
            return
        parts = tuple(tensor.clone() for tensor in batch)
        dims = [_SEQUENCE] * len(parts)
        with context_parallel(mesh, buffers=list(parts), buffer_seq_dims=dims, no_restore_buffers=set(parts)):
            yield parts


def _head_and_tail(tensor: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
    parts = tensor.chunk(2 * ranks, _SEQUENCE)
    return torch.cat((parts[rank], parts[2 * ranks - 1 - rank]), _SEQUENCE)
