"""Expert parallelism: each rank of a group holds some of a layer's experts; rows are sent to their experts.

    rows by expert -> all-to-all -> experts of this rank, rows of all ranks -> all-to-all -> rows by expert

Loads are given (`workloads.decoder.experts`), so every rank knows how many rows each rank sends to each other
rank. With a real router, an exchange of these counts and a CPU wait would come before.

Otherwise this is data parallelism: FSDP shards experts over the ranks that hold the same ones, and other
parameters over all ranks; both are on their own meshes in one unit.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from fsdpbench.base.configuration.config import Degrees
from fsdpbench.workloads.decoder.experts import Experts, Mixture


def share_experts(model: nn.Module, mesh: DeviceMesh) -> None:
    """Give each rank of `mesh` its experts, as DTensors, and the mixtures of `model` their exchange."""
    for module in model.modules():
        if isinstance(module, Mixture):
            module.exchange = RankExchange(mesh)
        if isinstance(module, Experts):
            for name, parameter in list(module.named_parameters(recurse=False)):
                shared = distribute_tensor(parameter.detach(), mesh, [Shard(0)], src_data_rank=None)
                module.register_parameter(name, nn.Parameter(shared))


def expert_parameters(model: nn.Module) -> set[int]:
    """Return the ids of all parameters of experts."""
    return {id(p) for module in model.modules() if isinstance(module, Experts) for p in module.parameters()}


def placement_of_experts(
    model: nn.Module, meshes: "Meshes", result: Any, sharded: Any, replicated: Any
) -> Callable[[Any], Any]:
    """Return a `shard_placement_fn` that puts experts on their own mesh, and others on that of `fully_shard`.

    `result`, `sharded` and `replicated`: the classes of placement and meshes of the `fully_shard` in use.
    """
    assert meshes.expert_data is not None
    if meshes.expert_data.ndim == 2:
        info = replicated(meshes.expert_data, shard_mesh_dim=1, replicate_mesh_dim=0)
    else:
        info = sharded(meshes.expert_data, shard_mesh_dim=0)
    own = result(Shard(0), info)
    experts = expert_parameters(model)
    return lambda parameter: own if id(parameter) in experts else None


class RankExchange:
    """The exchange of rows among the ranks of a mesh: an `Exchange` of `workloads.decoder.experts`.

    On simulated GPUs rank 0 represents all ranks, so it gets the busiest experts of each layer: the others
    wait for the rank with the most rows.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self._group, self._ranks = mesh.get_group(), mesh.size()
        self._rank, self._busiest_first = mesh.get_local_rank(), mesh.device_type == "sim"

    def _sums(self, loads: list[int]) -> list[int]:
        """Return the number of rows for each rank."""
        each = len(loads) // self._ranks
        return [sum(loads[rank * each : (rank + 1) * each]) for rank in range(self._ranks)]

    def order(self, loads: list[int]) -> list[int]:
        """Return the loads; on simulated GPUs rotated so that those of the busiest rank come first."""
        if not self._busiest_first:
            return loads
        sums = self._sums(loads)
        first = sums.index(max(sums)) * (len(loads) // self._ranks)
        return loads[first:] + loads[:first]

    def _own(self, loads: list[int]) -> list[int]:
        each = len(loads) // self._ranks
        return loads[self._rank * each : (self._rank + 1) * each]

    def held(self, loads: list[int]) -> list[int]:
        """Return the number of rows for each expert of this rank."""
        return [self._ranks * load for load in self._own(loads)]

    def send(self, rows: Tensor, loads: list[int]) -> Tensor:
        """Send rows to the ranks of their experts; return received rows sorted by expert."""
        own = self._own(loads)
        arrived: Tensor = _AllToAll.apply(rows, self._sums(loads), [sum(own)] * self._ranks, self._group)
        return _transposed(arrived, [own] * self._ranks)

    def back(self, rows: Tensor, loads: list[int]) -> Tensor:
        """Send rows back to the ranks from which they came."""
        own = self._own(loads)
        by_rank = _transposed(rows, [[load] * self._ranks for load in own])
        sent: Tensor = _AllToAll.apply(by_rank, [sum(own)] * self._ranks, self._sums(loads), self._group)
        return sent


def _transposed(rows: Tensor, counts: list[list[int]]) -> Tensor:
    """Reorder rows from order (first, second index) to order (second, first index) with one copy."""
    if len({count for line in counts for count in line}) == 1:
        grid = rows.view(len(counts), len(counts[0]), counts[0][0], -1)
        return grid.transpose(0, 1).flatten(0, 2)
    flat = [count for line in counts for count in line]
    parts, width = rows.split(flat), len(counts[0])
    return torch.cat([parts[line * width + place] for place in range(width) for line in range(len(counts))])


class _AllToAll(torch.autograd.Function):
    """Exchange rows [sent, width] grouped by rank for rows [received, width]; backward in reverse."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: list[int], received: list[int], group: Any) -> Tensor:
        """Send `sent` rows to each rank; return [sum of `received`, width]."""
        ctx.sent, ctx.received, ctx.group = sent, received, group
        return _exchanged(rows, sent, received, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return _exchanged(gradient, ctx.received, ctx.sent, ctx.group), None, None, None


def _exchanged(rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
    result = rows.new_empty(sum(received), rows.shape[1])
    dist.all_to_all_single(result, rows.contiguous(), received, sent, group=group)
    return result


@dataclass(frozen=True)
class Meshes:
    """The device meshes of a configuration.

        tp        (replicate, shard, tp)          FSDP over the first two, tensor parallelism over the last
        tp, ep    also (replicate, expert_shard, ep) of all ranks, including those of one tp group
        cp        (replicate, shard)              FSDP over all ranks, including those that share a sequence
                  (groups, cp, tp)                attention: over cp, for the heads of a tp rank
        ep        (replicate, shard)              all parameters except experts
                  (replicate, expert_shard, ep)   experts: FSDP over expert_shard x replicate
    `data`: FSDP's mesh, with a replicate dimension only if a copy needs fewer than all ranks. `tensor`,
    `context` and `experts` are 1-D; `expert_data` is FSDP's mesh for experts. Unused ones are None.
    """

    data: DeviceMesh
    tensor: DeviceMesh | None = None
    context: DeviceMesh | None = None
    experts: DeviceMesh | None = None
    expert_data: DeviceMesh | None = None


def make_meshes(degrees: Degrees, shard: int, device_type: str) -> "Meshes":
    """Create the device meshes; all ranks must call it together.

    `shard`: number of ranks that share one copy of the (tensor-parallel part of the) model.
    """
    copies = degrees.sharding // shard
    data = {"replicate": copies, "shard": shard} if copies > 1 else {"shard": shard}
    whole = _mesh(device_type, data | ({"tp": degrees.tp} if degrees.tp > 1 else {}))
    names = tuple(data)
    first = whole if degrees.tp == 1 else whole[names]
    tensor = whole["tp"] if degrees.tp > 1 else None
    context = None
    if degrees.cp > 1:
        sharing = {"groups": degrees.data, "cp": degrees.cp}
        context = _mesh(device_type, sharing | ({"tp": degrees.tp} if degrees.tp > 1 else {}))["cp"]
    if degrees.ep == 1:
        return Meshes(first, tensor, context)
    sizes = data | {"shard": shard * degrees.tp // degrees.ep, "ep": degrees.ep}
    own = _mesh(device_type, {"expert_shard" if name == "shard" else name: n for name, n in sizes.items()})
    inner = tuple("expert_shard" if name == "shard" else name for name in names)
    return Meshes(first, tensor, context, own["ep"], own[inner])


def _mesh(device_type: str, sizes: dict[str, int]) -> DeviceMesh:
    return init_device_mesh(device_type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
