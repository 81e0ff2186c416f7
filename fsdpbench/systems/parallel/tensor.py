"""Tensor parallelism: a workload's plan in torch's styles, with sequence parallelism between blocks and a
loss over the sharded vocabulary (Korthikanti et al. 2022, arXiv 2205.05198; the plan of TorchTitan)."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from fsdpbench.base.configuration.config import Config, Degrees
from fsdpbench.systems.parallel.experts import Meshes, share_experts
from fsdpbench.workloads import Workload
from fsdpbench.workloads.lora_layers import AdaptedProjection
from fsdpbench.workloads.tensor_plan import BlockPlan, HasTensorPlan, TensorPlan

_SEQUENCE, _HEADS = 1, 1
"""The sequence dimension of [batch, seq, features], and the heads dimension of [batch, heads, seq, width]."""


def cut(
    model: nn.Module, plan: TensorPlan, block_classes: tuple[type[nn.Module], ...], mesh: DeviceMesh
) -> None:
    """Make the parameters of `model` DTensors on the 1-D `mesh`, in place. Before, all ranks must have equal
    parameters, or they are on the meta device."""
    frozen = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
    outside: dict[str, ParallelStyle] = {
        name: RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(sequence))
        for name, sequence in plan.embeddings.items()
    }
    outside |= {name: SequenceParallel(use_local_output=True) for name in plan.final_norms}
    outside |= {name: ColwiseParallel() for name in plan.columns}
    outside |= {name: _WholeResult() for name in plan.gathered}
    outside[plan.head] = ColwiseParallel(
        input_layouts=Shard(_SEQUENCE), output_layouts=Shard(-1), use_local_output=False
    )
    # Without a source rank every rank shards its own copy, and nothing is sent.
    parallelize_module(model, mesh, outside, src_data_rank=None)
    if plan.tied:
        model.get_submodule(plan.head).weight = model.get_submodule(next(iter(plan.embeddings))).weight
    blocks = [module for module in model.modules() if isinstance(module, block_classes)]
    for index, block in enumerate(blocks):
        of_block = plan.of(index)
        for name, widths in of_block.columns.items():
            _side_by_side(block.get_submodule(name), widths, mesh.size())
        parallelize_module(block, mesh, _block_styles(of_block, block), src_data_rank=None)
        for name in of_block.by_head:
            parent, _, last = name.rpartition(".")
            distribute(block.get_submodule(parent), last, mesh, Shard(0))
    for name in frozen:  # torch's styles create trainable parameters
        model.get_parameter(name).requires_grad_(False)


def _whole(share: torch.Tensor, mesh: DeviceMesh) -> DTensor:
    """All-gather a sequence that is sharded over ranks; backward is a reduce-scatter."""
    shared = DTensor.from_local(share, mesh, (Shard(_SEQUENCE),), run_check=False)
    return shared.redistribute(placements=(Replicate(),))


class _WholeSequence(ParallelStyle):
    """A style that gathers the first argument: `PrepareModuleInput` for any number of other arguments."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def gather(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
            return (_whole(inputs[0], device_mesh), *inputs[1:])

        module.register_forward_pre_hook(gather)
        return module


class _WholeResult(ParallelStyle):
    """A style that gathers the result once for all readers; their gradients are summed and then reduced."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def gather(_: nn.Module, inputs: tuple[Any, ...], result: torch.Tensor) -> DTensor:
            return _whole(result, device_mesh)

        module.register_forward_hook(gather)
        return module


def _block_styles(plan: BlockPlan, block: nn.Module) -> dict[str, ParallelStyle]:
    def adapted(name: str) -> bool:
        return isinstance(block.get_submodule(name), AdaptedProjection)

    styles: dict[str, ParallelStyle] = {}
    styles |= {name: _WholeSequence() for name in plan.readers}
    styles |= {name: AdaptedColumns() if adapted(name) else ColwiseParallel() for name in plan.columns}
    rows = RowwiseParallel(output_layouts=Shard(_SEQUENCE))
    styles |= {name: AdaptedRows(_SEQUENCE) if adapted(name) else rows for name in plan.rows}
    styles |= {
        name: Replicated() if adapted(name) else SequenceParallel(sequence_dim=0, use_local_output=True)
        for name in plan.by_token
    }
    styles |= {name: Replicated() for name in plan.whole}
    styles |= {name: SequenceParallel(use_local_output=True) for name in plan.norms}
    styles |= {name: SequenceParallel(sequence_dim=_HEADS, use_local_output=True) for name in plan.head_norms}
    return styles


@torch.no_grad()
def _side_by_side(layer: nn.Module, widths: tuple[int, ...], ranks: int) -> None:
    """Reorder the outputs of a layer that computes several things, so that even shards have a part of each:
    for queries | keys | values, two ranks get q0 k0 v0 and q1 k1 v1."""
    if len(widths) == 1:
        return
    for name, parameter in layer.named_parameters(recurse=False):
        if not parameter.is_meta and name != "lora_a":  # `lora_a` is shared by all outputs
            parts = [part.chunk(ranks) for part in parameter.split(widths)]
            parameter.copy_(torch.cat([share for shares in zip(*parts, strict=True) for share in shares]))


def distribute(module: nn.Module, name: str, mesh: DeviceMesh, placement: Placement) -> None:
    """Make the parameter `name` of `module` a DTensor on `mesh`, unless it is one already."""
    parameter = getattr(module, name)
    if parameter is not None and not isinstance(parameter, DTensor):
        shared = distribute_tensor(parameter.detach(), mesh, [placement], src_data_rank=None)
        module.register_parameter(name, nn.Parameter(shared, requires_grad=parameter.requires_grad))


class Replicated(ParallelStyle):
    """A style in which every rank has the whole module and applies it to its own tokens."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for part in module.modules():
            for name in [name for name, _ in part.named_parameters(recurse=False)]:
                distribute(part, name, device_mesh, Replicate())
        return module


class AdaptedColumns(ParallelStyle):
    """Column-parallel layer with an adapter: computes its rank's outputs from the whole input.

        columns   W, B by outputs, A whole     y of a rank's outputs                    no communication
        rows      W, A by inputs, B whole      y of a rank's inputs, summed over ranks  one reduce-scatter
    An adapter needs no additional communication: its part is in the frozen layer's sum.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name in [name for name, _ in module.named_parameters(recurse=False)]:
            distribute(module, name, device_mesh, Replicate() if name == "lora_a" else Shard(0))
        module.register_forward_pre_hook(_own_input)
        return module


def _own_input(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the whole input, which every rank has. Its gradient is summed over the ranks."""
    return (inputs[0].to_local(grad_placements=[Partial()]), *inputs[1:])


class AdaptedRows(ParallelStyle):
    """Row-parallel layer with an adapter: results are reduce-scattered along the dimension `sequence`."""

    def __init__(self, sequence: int) -> None:
        super().__init__()
        self._sequence = sequence

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        whole = ("lora_b", "bias")
        for name in [name for name, _ in module.named_parameters(recurse=False)]:
            distribute(module, name, device_mesh, Replicate() if name in whole else Shard(1))
        module.bias_share = 1 / device_mesh.size()  # type: ignore[assignment]

        def summed(_: nn.Module, inputs: tuple[Any, ...], result: torch.Tensor) -> Tensor:
            parts = DTensor.from_local(result, device_mesh, (Partial(),), run_check=False)
            local: Tensor = parts.redistribute(placements=(Shard(self._sequence),)).to_local()
            return local

        module.register_forward_hook(summed)
        return module


def parallelise(model: nn.Module, workload: Workload, meshes: Meshes) -> None:
    """Parallelize `model` in place over the meshes of experts and tensors, if there are any."""
    if meshes.experts is not None:
        share_experts(model, meshes.experts)
    if meshes.tensor is not None:
        assert isinstance(workload, HasTensorPlan), "refused before"
        cut(model, workload.tensor_plan(), workload.block_classes, meshes.tensor)


def context_of(config: Config) -> AbstractContextManager[object]:
    """Return a context manager for forward and backward: `loss_parallel` with tensor parallelism."""
    return loss_parallel() if Degrees.of(config).tp > 1 else nullcontext()
