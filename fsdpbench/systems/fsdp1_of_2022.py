"""PyTorch's FSDP1 as torch 1.13 had it, for published runs that were made with it (simulated only).

What training does is today's torch; this lays over it the two things in which memory and time differ:

* Before 2.8, collectives ran on the communicator's own stream and kept their tensors by `record_stream`: a
  buffer that Python has let go of stays taken until the collective is done.
* Before 2.0, the post-backward hook padded each unit's gradient also where there was nothing to pad, so that
  the reduce-scatter read a copy of the gradient, made on the post-backward stream, and its output was zeroed
  first.

    gradient ──copy──> input of the reduce-scatter ──(communicator's stream)──> shard
    held until the copy is done     held until the reduction is done
"""

from __future__ import annotations

import torch
from torch import nn

from fsdpbench.systems.base import BuildContext
from fsdpbench.systems.fsdp1 import TorchFsdp1


class TorchFsdp1Of2022(TorchFsdp1):
    name = "torch-fsdp1-1.13"
    summary = "PyTorch's FSDP1 with the collectives and the gradient copy of torch 1.13"
    devices = frozenset({"sim"})

    def wrap(self, context: BuildContext) -> nn.Module:
        from torch.distributed.fsdp import _runtime_utils

        from fsdpbench.sim.accelerator import ACCELERATOR

        ACCELERATOR.collectives_on_own_streams = True
        _runtime_utils._get_reduce_scatter_tensors = _padded_copy
        return super().wrap(context)


def _padded_copy(state: object, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Input and output of a unit's reduce-scatter: always a padded copy, and a zeroed shard."""
    ranks: int = state.world_size  # type: ignore[attr-defined]
    shard = -(-gradient.numel() // ranks)
    missing = ranks * shard - gradient.numel()
    padded = torch.nn.functional.pad(gradient, [0, missing]) if missing else gradient.clone()
    return padded, gradient.new_zeros(shard)
