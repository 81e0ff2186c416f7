"""Context parallelism: ranks share each sequence, and attention sends keys and values around a ring of ranks.

    query of this rank x (key, value) of this rank | of the one before | ...   merged by their log-sum-exp
                          sent on concurrently ────>

This is torch's own `context_parallel` (a prototype). It replaces `F.scaled_dot_product_attention` and splits
the batch so that each rank has one part from the head and one from the tail of the sequence, which balances
causal attention; the models compute positions of these parts. On CPU ranks the batch is split here, and
attention is torch's ring with the CPU's kernel (`attention_by_ring`).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.experimental import context_parallel
from torch.nn import functional as F

from fsdpbench.base.torch_internals import (
    replaced,
    ring_attention,
    ring_attention_backward,
    set_rotate_method,
)
from fsdpbench.workloads.rotations import shared_sequence

_SEQUENCE = 1
"""The sequence dimension of [batch, seq]."""


@contextmanager
def ring(mesh: DeviceMesh, batch: tuple[torch.Tensor, ...]) -> Iterator[tuple[torch.Tensor, ...]]:
    """Shard one microbatch (int64 tensors of [batch, seq]) for forward and backward: yield this rank's part,
    and run attention as a ring over `mesh`."""
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


_SEQ_OF_HEADS = 2
"""The sequence dimension of [batch, heads, seq, width]."""
_FORWARD = partial(torch.ops.aten._scaled_dot_product_flash_attention_for_cpu, dropout_p=0.0)
_BACKWARD = partial(torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward, dropout_p=0.0)


@contextmanager
def attention_by_ring(group: dist.ProcessGroup) -> Iterator[None]:
    """Run causal `F.scaled_dot_product_attention` without dropout as a ring over the ranks of `group`.

    torch's ring has no kernel for the CPU. The order of the ring, the merging of partial results and the
    parts that causal attention skips are torch's code, so CPU ranks verify the plan that simulated GPUs run.
    """

    def attend(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """Return causal attention of `query` to all ranks' keys and values, [batch, heads, seq, width]."""
        assert is_causal, "refused before"
        assert attn_mask is None, "refused before"
        assert not dropout_p, "refused before"
        if enable_gqa:
            key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
        result: Tensor = _Ring.apply(query, key, value, group, scale)
        return result

    with replaced(F, scaled_dot_product_attention=attend):
        yield


class _Ring(torch.autograd.Function):
    """Attention of this rank's queries to the keys and values of all ranks, and its backward."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, group: Any, scale: float | None
    ) -> Tensor:
        """Return attention of `query` to the keys and values of all ranks of `group`."""
        out, logsumexp, *_ = ring_attention(
            group, _SEQ_OF_HEADS, _FORWARD, query=query, key=key, value=value, is_causal=True, scale=scale
        )
        ctx.save_for_backward(query, key, value, out, logsumexp)
        ctx.group, ctx.scale = group, scale
        result: Tensor = out
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, logsumexp = ctx.saved_tensors
        kept = {"query": query, "key": key, "value": value, "out": out, "logsumexp": logsumexp}
        gradients = ring_attention_backward(
            ctx.group, _SEQ_OF_HEADS, _BACKWARD, grad_out=gradient, grad_out_name="grad_out", is_causal=True,
            scale=ctx.scale, **kept,
        )  # fmt: skip
        return (*gradients[:3], None, None)
