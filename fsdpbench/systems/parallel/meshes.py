"""The device meshes of a configuration.

    tp        (replicate, shard, tp)          FSDP over the first, tensor parallelism over the last
    tp, ep    also (replicate, expert_shard, ep), of all ranks, those of one tp group among them
    cp        (replicate, shard)              FSDP over all ranks, those that share a sequence among them
              (groups, cp, tp)                attention: over cp, of the heads of a rank of tp
    ep        (replicate, shard)              all but experts
              (replicate, expert_shard, ep)   experts: FSDP over expert_shard x replicate

A dimension of replicas is there only where a copy takes fewer ranks than there are.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fsdpbench.configuration.degrees import Degrees


@dataclass(frozen=True)
class Meshes:
    """`data`: what FSDP shards over, of one dimension or two (replicate, shard); the others where they are:
    `tensor`, `context` and `experts` 1-D, `expert_data` what FSDP shards experts over."""

    data: DeviceMesh
    tensor: DeviceMesh | None = None
    context: DeviceMesh | None = None
    experts: DeviceMesh | None = None
    expert_data: DeviceMesh | None = None


def make_meshes(degrees: Degrees, shard: int, device_type: str) -> Meshes:
    """`shard`: ranks that share one copy of the (tensor-parallel part of the) model. Collective."""
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
