"""Styles of tensor parallelism for modules that compute with what their rank has (`held` of the workloads):
layers with adapters, and those of mixtures.

    columns   W, B by outputs, A whole     y of a rank's outputs                    no communication
    rows      W, A by inputs, B whole      y of a rank's inputs, summed over ranks  one reduce-scatter

An adapter adds nothing to what is sent: its share of the sum travels in the frozen layer's.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle


def distribute(module: nn.Module, name: str, mesh: DeviceMesh, placement: Placement) -> None:
    """Make the parameter `name` of `module` a DTensor on `mesh`; one that is shared already stays."""
    parameter = getattr(module, name)
    if parameter is not None and not isinstance(parameter, DTensor):
        shared = distribute_tensor(parameter.detach(), mesh, [placement], src_data_rank=None)
        module.register_parameter(name, nn.Parameter(shared, requires_grad=parameter.requires_grad))


class Replicated(ParallelStyle):
    """Every rank has all of the module, and computes with its own tokens."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for part in module.modules():
            for name in [name for name, _ in part.named_parameters(recurse=False)]:
                distribute(part, name, device_mesh, Replicate())
        return module


class AdaptedColumns(ParallelStyle):
    """A layer with an adapter, cut by outputs: of the whole input, its rank's outputs."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name in [name for name, _ in module.named_parameters(recurse=False)]:
            distribute(module, name, device_mesh, Replicate() if name == "lora_a" else Shard(0))
        module.register_forward_pre_hook(_own_input)
        return module


def _own_input(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """The whole input as every rank has it; its gradient is the sum of theirs."""
    return (inputs[0].to_local(grad_placements=[Partial()]), *inputs[1:])


class AdaptedRows(ParallelStyle):
    """A layer with an adapter, cut by inputs: the ranks' results are summed, each keeps its share of
    dimension `sequence`."""

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
