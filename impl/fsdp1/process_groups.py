"""The shard and replicate groups for the arguments of the FSDP1 front end."""

from collections.abc import MutableMapping
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from ..collectives import comm
from ..shared import error_text
from .settings import ShardingStrategy

HYBRID = (ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2)

# The ``process_group`` argument: one group, or a pair (shard, replicate) for hybrid strategies.
Given = ProcessGroup | tuple[ProcessGroup, ProcessGroup] | None

# Groups made for hybrid sharding without explicit groups. All units of a process group share them.
_node_groups: MutableMapping[ProcessGroup, dict[int, tuple[ProcessGroup, ProcessGroup]]] = WeakKeyDictionary()


def given_or_by_node(
    strategy: ShardingStrategy, process_group: Given, mesh: DeviceMesh | None, by_policy: bool
) -> Given:
    """Return ``process_group``, or for a hybrid strategy without groups a pair by node, for all units.

    Args:
        by_policy: whether one call wraps the whole model, so that its units share the new groups.

    Raises:
        ValueError: both ``process_group`` and ``mesh``, or a hybrid strategy with neither and no policy.
        RuntimeError: no process group was initialised.
    """
    if not dist.is_initialized():
        raise RuntimeError("no process group: call torch.distributed.init_process_group() before wrapping")
    if process_group is not None and mesh is not None:
        raise ValueError("give process_group or device_mesh, not both")
    if strategy not in HYBRID or process_group is not None or mesh is not None:
        return process_group
    if not by_policy:
        raise ValueError(error_text("process_groups.given_or_by_node", strategy.name))
    return _groups_by_node()


def groups_of_strategy(
    strategy: ShardingStrategy, process_group: Given, mesh: DeviceMesh | None
) -> comm.UnitGroups:
    """Return the groups of one unit. Raises ``ValueError`` if the groups do not fit the strategy."""
    if strategy in HYBRID:
        return _hybrid(strategy, process_group, mesh)
    if process_group is not None and not isinstance(process_group, ProcessGroup):
        raise ValueError(error_text("process_groups.pair", strategy.name, process_group))
    if mesh is not None and mesh.ndim != 1:
        raise ValueError(f"{strategy.name} needs a mesh of one dimension, not {mesh}")
    group = group_of(process_group, mesh)
    if strategy is ShardingStrategy.NO_SHARD:
        return comm.UnitGroups.of(None, group)
    return comm.UnitGroups.of(group)


def group_of(process_group: Given, mesh: DeviceMesh | None) -> ProcessGroup:
    """Return the shard group, or the replicate group for ``NO_SHARD``."""
    if mesh is not None:
        return mesh.get_group(mesh.ndim - 1)
    group: Any = process_group[0] if isinstance(process_group, tuple) else process_group
    return cast(ProcessGroup, dist.group.WORLD if group is None else group)


def check_broadcast(groups: comm.UnitGroups, device: torch.device) -> None:
    """Raise ``ValueError`` unless the groups can broadcast tensors on ``device``."""
    for group in (groups.shard, groups.replicate):
        types = [each.type for each in group._device_types] if group is not None else [device.type]
        if device.type not in types:
            raise ValueError(error_text("process_groups.check_broadcast", device, ", ".join(types)))


def _hybrid(strategy: ShardingStrategy, pair: Any, mesh: DeviceMesh | None) -> comm.UnitGroups:
    if mesh is not None:
        if mesh.ndim != 2:
            raise ValueError(f"{strategy.name} needs a mesh of two dimensions (replicate, shard), not {mesh}")
        return comm.UnitGroups.of(mesh.get_group(1), mesh.get_group(0))
    if not (isinstance(pair, tuple) and len(pair) == 2 and all(isinstance(g, ProcessGroup) for g in pair)):
        raise ValueError(error_text("process_groups.hybrid", strategy.name, pair))
    return comm.UnitGroups.of(*pair)


def _groups_by_node() -> tuple[ProcessGroup, ProcessGroup]:
    """Return groups that shard inside a node and replicate across nodes, torch's default."""
    world: Any = dist.group.WORLD
    per_node = max(1, torch.accelerator.device_count())
    size = world.size()
    if size % per_node:
        raise ValueError(error_text("process_groups.groups_by_node", size, per_node))
    made = _node_groups.setdefault(world, {})
    if per_node not in made:
        # Collective over all ranks, so they are made once and cached for units that are wrapped later.
        shard, _ = dist.new_subgroups(per_node)
        replicate, _ = dist.new_subgroups_by_enumeration(
            [list(range(start, size, per_node)) for start in range(per_node)]
        )
        made[per_node] = (shard, replicate)
    return made[per_node]
