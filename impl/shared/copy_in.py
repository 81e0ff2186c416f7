"""From gradients to the input of a reduce-scatter: one fused copy, the way back of ``copy_out.py``."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .torch_internals import chunk_cat


def copy_in(gradients: Sequence[torch.Tensor], out: torch.Tensor) -> None:
    """Copy ``gradients``, cut on dim 0, into ``out`` of (ranks, elements of a rank), and cast to its dtype.

    None of them may be empty.
    """
    rows = out.shape[0]
    if out.device.type == "cpu" and gradients[0].dtype != out.dtype:
        out.copy_(chunk_cat(gradients, 0, rows))  # a cast on the way is slow there: it goes row by row
    else:
        chunk_cat(gradients, 0, rows, out=out)
