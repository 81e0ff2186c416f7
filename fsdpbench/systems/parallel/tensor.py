"""Tensor parallelism: a workload's plan as torch's, with the sequence shared out between blocks and the loss
taken on shares of the vocabulary (Korthikanti et al. 2022, arXiv 2205.05198; the plan of TorchTitan).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from fsdpbench.workloads.tensor_plan import BlockPlan, TensorPlan

_SEQUENCE, _HEADS = 1, 1
"""Dimensions of [batch, seq, features] and of [batch, heads, seq, width]."""


def cut(
    model: nn.Module, plan: TensorPlan, block_classes: tuple[type[nn.Module], ...], mesh: DeviceMesh
) -> None:
    """Make the parameters of `model` DTensors on the 1-D `mesh`, in place. Every rank holds the same
    parameters before, or they are on meta."""
    outside: dict[str, Any] = {
        name: RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(sequence))
        for name, sequence in plan.embeddings.items()
    }
    outside[plan.final_norm] = SequenceParallel(use_local_output=True)
    outside[plan.head] = ColwiseParallel(
        input_layouts=Shard(_SEQUENCE), output_layouts=Shard(-1), use_local_output=False
    )
    # Without a source every rank cuts its own, and nothing is sent.
    parallelize_module(model, mesh, outside, src_data_rank=None)
    if plan.tied:
        model.get_submodule(plan.head).weight = model.get_submodule(next(iter(plan.embeddings))).weight
    styles = _block_styles(plan.block)
    for block in [module for module in model.modules() if isinstance(module, block_classes)]:
        for name, widths in plan.block.columns.items():
            _side_by_side(block.get_submodule(name), widths, mesh.size())
        parallelize_module(block, mesh, styles, src_data_rank=None)


class _WholeSequence(ParallelStyle):
    """A module whose first argument is gathered: `PrepareModuleInput` for any number of others."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def gather(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
            share = DTensor.from_local(inputs[0], device_mesh, (Shard(_SEQUENCE),), run_check=False)
            return (share.redistribute(placements=(Replicate(),)), *inputs[1:])

        module.register_forward_pre_hook(gather)
        return module


def _block_styles(plan: BlockPlan) -> dict[str, Any]:
    styles: dict[str, Any] = {}
    styles |= {name: _WholeSequence() for name in plan.readers}
    styles |= {name: ColwiseParallel() for name in plan.columns}
    styles |= {name: RowwiseParallel(output_layouts=Shard(_SEQUENCE)) for name in plan.rows}
    styles |= {name: SequenceParallel(use_local_output=True) for name in plan.norms}
    styles |= {name: SequenceParallel(sequence_dim=_HEADS, use_local_output=True) for name in plan.head_norms}
    return styles


@torch.no_grad()
def _side_by_side(layer: nn.Module, widths: tuple[int, ...], ranks: int) -> None:
    """Order the outputs of a layer that computes several things, so that an even cut gives each rank its
    share of each: of queries | keys | values, two ranks get q0 k0 v0 and q1 k1 v1."""
    if len(widths) == 1:
        return
    for parameter in layer.parameters(recurse=False):
        if not parameter.is_meta:
            parts = [part.chunk(ranks) for part in parameter.split(widths)]
            parameter.copy_(torch.cat([share for shares in zip(*parts, strict=True) for share in shares]))
