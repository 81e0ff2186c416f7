"""The units that ``fully_shard`` makes from a module's own parameters: their grouping and layout.

Parameters share a unit, and so its collectives, if they have the same dtype and mesh. Parameters with
all-gather extensions (``extended.py``) have separate units.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ..collectives import comm
from ..runtime.buffer import HostOffload
from ..runtime.gather import MakeGather, choose_gather
from ..runtime.ownership import Owned
from ..runtime.presentation import UnitParameter
from ..runtime.smaller_group import InSmallerGroup, smaller_mesh
from ..runtime.unit import Unit
from ..shared import error_text, placement
from ..shared.layout import UnitLayout, chunked_layout
from ..shared.settings import CommunicationLayout, MixedPrecisionPolicy, UnitPrecision
from .dtensor_params import DTensorPresentation, is_extended
from .extended import ByExtensions, ExtendedPresentation, Extension, padded_shape


@dataclass(frozen=True)
class _Planned:
    """One original parameter, and how it is sharded."""

    parameter: nn.Parameter
    plan: placement.ParameterPlan
    extended: bool


@dataclass(frozen=True)
class Sharding:
    """The arguments of ``fully_shard`` that concern units.

    Args:
        mesh: the 1-D or 2-D mesh of parameters for which ``shard_placement_fn`` returns no other mesh.
        offload: the CPU offload of shards, ``None`` without.
        spmd: with ``dp_mesh_dims``, the mesh with all dimensions; ``mesh`` is then its data parallel
            submesh.
        communication: whether large parameters have their own collectives.
    """

    mesh: DeviceMesh
    device: torch.device
    reshard_after_forward: bool | int | None
    policy: MixedPrecisionPolicy
    shard_placement_fn: placement.PlacementFunction | None
    offload: HostOffload | None
    spmd: placement.SpmdMesh | None
    communication: CommunicationLayout

    def plan(self, parameter: nn.Parameter, fqn: str) -> _Planned:
        """Decide how one parameter is sharded."""
        if self.spmd is None:
            plan = placement.plan_parameter(parameter, fqn, self.mesh, self.shard_placement_fn)
        else:
            plan = placement.plan_on_whole_mesh(parameter, fqn, self.spmd, self.shard_placement_fn)
        return _Planned(parameter, plan, is_extended(placement.local_tensor(parameter), fqn))

    def smallest_grouped(self, groups: comm.UnitGroups) -> float:
        """Return the minimum size in bytes of a parameter with its own collectives."""
        if groups.shard is None:
            return math.inf
        return smallest_with_own(self.communication, comm.backend_name(groups.shard, self.device))


def make_units(owned: Owned, how: Sharding) -> list[Unit]:
    """Shard the parameters of ``owned`` and mark them as taken.

    Raises:
        ValueError: an unsupported mesh, group size or parameter.
    """
    shards = how.spmd is None or bool(how.spmd.shard)
    _check_reshard(how.reshard_after_forward, groups_of_mesh(how.mesh, shards).shard_size)
    by_kind: dict[tuple[torch.dtype, DeviceMesh, bool], list[_Planned]] = {}
    for parameter, fqn in owned.fqns.items():
        if parameter.dim() == 0:
            raise ValueError(error_text("sharded_units.make_units", fqn, owned.title))
        planned = how.plan(parameter, fqn)
        by_kind.setdefault((parameter.dtype, planned.plan.mesh, planned.extended), []).append(planned)
    owned.take()
    return [_make_unit(owned, members, how) for members in by_kind.values()]


def _make_unit(owned: Owned, members: Sequence[_Planned], how: Sharding) -> Unit:
    groups = groups_of_mesh(members[0].plan.mesh, members[0].plan.shards)
    reshard, smaller_size = _check_reshard(how.reshard_after_forward, groups.shard_size)
    dtype = members[0].parameter.dtype
    precision = UnitPrecision.decide(dtype, how.policy.param_dtype, how.policy.reduce_dtype)
    packs = members[0].extended or smaller_size is not None
    members, grouped = _in_order(members, precision, math.inf if packs else how.smallest_grouped(groups))
    originals = [member.parameter for member in members]
    plans = [member.plan for member in members]
    layout = chunked_layout(
        [placement.local_tensor(parameter).shape for parameter in originals],
        groups.shard_size,
        groups.shard_rank,
        min(precision.compute.itemsize, dtype.itemsize),
        [plan.dim for plan in plans],
        grouped,
    )
    described = [owned.describe(parameter) for parameter in originals]
    for one, plan in zip(described, plans, strict=True):
        one.whole = plan.whole
    presentation: DTensorPresentation
    make_gather: MakeGather = choose_gather
    if members[0].extended:
        if smaller_size is not None:
            raise NotImplementedError(error_text("sharded_units.make_unit", smaller_size, described[0].fqn))
        layout = replace(layout, rank_major=True)
        presentation = ExtendedPresentation(plans, layout, described, originals, how.offload)
        extensions = _extensions(plans, described, layout, how.policy)
        make_gather = partial(ByExtensions, extensions=extensions, presentation=presentation)
    else:
        presentation = DTensorPresentation(plans, layout, described, originals, how.offload)
    if smaller_size is not None:
        mesh = smaller_mesh(plans[0].mesh, smaller_size)
        make_gather = partial(InSmallerGroup, parameters=described, mesh=mesh)
    return Unit(
        name=owned.title,
        parameters=described,
        layout=layout,
        shard=presentation.shard,
        groups=groups,
        precision=precision,
        device=how.device,
        reshard_after_forward=reshard,
        presentation=presentation,
        offload=how.offload,
        make_gather=make_gather,
    )


def _in_order(
    members: Sequence[_Planned], precision: UnitPrecision, smallest: float
) -> tuple[list[_Planned], int]:
    """Return the parameters in layout order, and how many of them have their own collectives."""
    sizes = [
        placement.local_tensor(member.parameter).numel() * precision.compute.itemsize for member in members
    ]
    order, grouped = order_for_groups(sizes, [member.plan.dim for member in members], smallest)
    return [members[index] for index in order], grouped


def _extensions(
    plans: Sequence[placement.ParameterPlan],
    described: Sequence[UnitParameter],
    layout: UnitLayout,
    policy: MixedPrecisionPolicy,
) -> list[Extension]:
    return [
        Extension(
            one.fqn,
            placement.shard_mesh(plan.mesh),
            segment,
            padded_shape(segment, layout.world_size),
            segment.shape[segment.dim] % layout.world_size != 0,
            placement.contiguous_strides(torch.Size(segment.shape)),
            one.places[0].module,
            policy,
        )
        for one, plan, segment in zip(described, plans, layout.segments, strict=True)
    ]


def groups_of_mesh(mesh: DeviceMesh, shards: bool = True) -> comm.UnitGroups:
    """Return the groups of a 1-D (shard, or replicate if not ``shards``) or 2-D (replicate, shard) mesh."""
    if not shards:
        return comm.UnitGroups.of(None, mesh.get_group(0))
    if mesh.ndim == 1:
        return comm.UnitGroups.of(mesh.get_group(0))
    if mesh.ndim == 2:
        return comm.UnitGroups.of(mesh.get_group(1), mesh.get_group(0))
    raise ValueError(f"fully_shard needs a mesh of 1 (shard) or 2 (replicate, shard) dimensions, not {mesh}")


def _check_reshard(value: bool | int | None, shard_size: int) -> tuple[bool | None, int | None]:
    """Return (whether forward frees the parameters, the size of a smaller group for backward or None)."""
    if value is None or isinstance(value, bool):
        return value, None
    if not isinstance(value, int) or value < 1 or shard_size % value:
        raise ValueError(error_text("sharded_units.check_reshard", shard_size, value))
    return value > 1, value if 1 < value < shard_size else None


# -- parameters with their own collectives -------------------------------------------------------------------
# Always packed: parameters below ``LARGE_BYTES`` or sharded on a dim other than 0, and gradients that are not
# contiguous, are cast, or have a number of rows that the ranks do not divide. veScale-FSDP and Megatron-FSDP
# also avoid copies around collectives; here parameters stay ``DTensor(Shard(0))``.

# Parameters of at least this size have their own collective. Copying this much takes 3 to 6 us on A100 and
# H100 (read and write at 1.4 to 2.6 TB/s), about the cost of one more collective in a group.
LARGE_BYTES = 4 << 20

# At most 1 / _SMALL_SHARE of a unit may be packed beside grouped parameters; otherwise all are packed.
_SMALL_SHARE = 8

# Backends that run a group of collectives as one launch.
_COALESCING = ("nccl", "sim")


def smallest_with_own(layout: CommunicationLayout, backend: str) -> float:
    """Return the minimum size in bytes of a parameter with its own collective; infinite if none has one.

    Args:
        backend: the name of the backend that gathers.
    """
    if layout is CommunicationLayout.GROUPED:
        return 0
    packs = layout is CommunicationLayout.PACKED or backend not in _COALESCING
    return math.inf if packs else LARGE_BYTES


def order_for_groups(sizes: Sequence[int], dims: Sequence[int], smallest: float) -> tuple[list[int], int]:
    """Return the layout order of parameters, and how many of the first ones have their own collective.

    Args:
        sizes: bytes of each unsharded parameter.
        dims: the sharded dim of each parameter.
        smallest: minimum bytes of a parameter with its own collective.

    Returns:
        Indices (large, then small; or by dim), and the number of large ones. The number is 0 if some
        parameter is sharded on a dim other than 0, or if the small ones are too large a part of the unit.
    """
    large = [i for i, size in enumerate(sizes) if size >= smallest]
    rest = [i for i, size in enumerate(sizes) if size < smallest]
    if any(dims) or _SMALL_SHARE * sum(sizes[i] for i in rest) > sum(sizes):
        return sorted(range(len(sizes)), key=lambda i: dims[i] > 0), 0
    return large + rest, len(large)
