"""``dp_mesh_dims``: parameters that are ``DTensor`` objects on one mesh of all dimensions, data parallel and
others.

::

    mesh       ("replicate", "shard", "tensor")      what the parameters are on, replicated over the first two
    data mesh  ("replicate", "shard")                what FSDP gathers and reduces over
    sharded    (Replicate, Shard(dim), as it was)    the same mesh, one placement changed

Several dimensions that shard together are flattened into one, in the data mesh and in that of the sharded
parameters. A gradient that is partial over data parallel dimensions is left so: to reduce it is FSDP's part.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from ..shared.placement import ParameterPlan, PlacementFunction, TensorParallel, check_even, local_tensor
from ..shared.torch_internals import DTensorSpec, StridedShard, concatenate_meshes


def _names(given: str | tuple[str, ...] | None) -> tuple[str, ...]:
    if given is None:
        return ()
    return (given,) if isinstance(given, str) else tuple(given)


@dataclass(frozen=True)
class DataParallelMeshDims:
    """Which dimensions of a mesh, by name, are data parallel. Several names are taken as one dimension.

    Attributes:
        shard: the dimensions that share one copy.
        replicate: the dimensions over copies.
    """

    shard: str | tuple[str, ...] | None = None
    replicate: str | tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if self.shard is None and self.replicate is None:
            raise ValueError("At least one of shard or replicate must be set in DataParallelMeshDims")

    @property
    def shard_names(self) -> tuple[str, ...]:
        """``shard`` as a tuple."""
        return _names(self.shard)

    @property
    def replicate_names(self) -> tuple[str, ...]:
        """``replicate`` as a tuple."""
        return _names(self.replicate)


@dataclass(frozen=True)
class SpmdMesh:
    """A mesh of all dimensions and its data parallel part.

    Attributes:
        mesh: what the parameters are on.
        data: 1-D, over shards or over replicas alone, or 2-D (replicate, shard).
        shard, replicate: the dimensions of ``mesh`` by name.
    """

    mesh: DeviceMesh
    data: DeviceMesh
    shard: tuple[str, ...]
    replicate: tuple[str, ...]

    @classmethod
    def of(cls, mesh: DeviceMesh, dims: DataParallelMeshDims) -> SpmdMesh:
        """The data parallel part of ``mesh``, whose dimensions need names. Collective where it flattens.

        Raises:
            ValueError: a name that the mesh does not have, or no names at all.
        """
        if not hasattr(dims, "shard_names"):
            raise ValueError(f"dp_mesh_dims must be a DataParallelMeshDims, not {dims!r}")
        shard, replicate = dims.shard_names, dims.replicate_names
        known = mesh.mesh_dim_names
        if known is None:
            raise ValueError("mesh must have mesh_dim_names when dp_mesh_dims is provided")
        for name in (*shard, *replicate):
            if name not in known:
                raise ValueError(f"Mesh dim name '{name}' not found in mesh.mesh_dim_names {known}")
        parts = [_part(mesh, names) for names in (replicate, shard) if names]
        data = parts[0] if len(parts) == 1 else concatenate_meshes(parts)
        return cls(mesh, data, shard, replicate)

    def dims(self, names: tuple[str, ...]) -> list[int]:
        """The positions of dimensions in the mesh."""
        known = self.mesh.mesh_dim_names
        assert known is not None
        return [known.index(name) for name in names]


def _part(mesh: DeviceMesh, names: tuple[str, ...]) -> DeviceMesh:
    return mesh[names[0]] if len(names) == 1 else mesh[names]._flatten("_".join(names))


@dataclass(frozen=True)
class OnWholeMesh(TensorParallel):
    """How a parameter looks while it is gathered; ``data_dims`` are those that FSDP reduces over."""

    data_dims: frozenset[int] = frozenset()

    def wanted(self, gradient: DTensor) -> tuple[Placement, ...]:
        own = self.spec.placements
        return tuple(
            given if index in self.data_dims else own[index]
            for index, given in enumerate(gradient.placements)
        )


def plan_on_whole_mesh(
    parameter: nn.Parameter, fqn: str, spmd: SpmdMesh, choose: PlacementFunction | None
) -> ParameterPlan:
    """Decide how a parameter on the whole mesh is sharded.

    Raises:
        ValueError: it is not a ``DTensor`` on that mesh, is not replicated where data is parallel, or
        ``choose``
            returned something other than ``None`` or a ``Shard``.
        NotImplementedError: a dimension other than the first that does not divide by the ranks.
    """
    if not isinstance(parameter, DTensor):
        raise ValueError(
            "When dp_mesh_dims is provided, all parameters must be DTensors on the full SPMD mesh (e.g. via "
            f"distribute_module). Got plain tensor for parameter '{fqn}'"
        )
    spec = parameter._spec
    if spec.mesh != spmd.mesh:
        raise ValueError(f"parameter '{fqn}' is on {spec.mesh}, and fully_shard was given {spmd.mesh}")
    data_dims = spmd.dims((*spmd.shard, *spmd.replicate))
    for index in data_dims:
        if not isinstance(spec.placements[index], Replicate):
            name = spmd.mesh.mesh_dim_names[index]  # type: ignore[index]
            raise ValueError(
                f"Expected Replicate() on DP dim '{name}' (index {index}) of parameter '{fqn}' "
                f"but got {spec.placements[index]}"
            )
    whole = OnWholeMesh(spec, frozenset(data_dims))
    if not spmd.shard:
        return ParameterPlan(spmd.data, 0, spec, whole, shards=False)
    chosen = choose(parameter) if choose is not None else None
    if chosen is not None and not isinstance(chosen, Shard):
        raise ValueError(
            f"shard_placement_fn returned {chosen!r} for parameter '{fqn}'; with dp_mesh_dims it may "
            "return None or Shard(dim)"
        )
    dim = 0 if chosen is None else chosen.dim % parameter.ndim
    check_even(local_tensor(parameter), fqn, dim, spmd.data.size(spmd.data.ndim - 1))
    return ParameterPlan(spmd.data, dim, _sharded_spec(spec, spmd, dim), whole)


def _sharded_spec(spec: DTensorSpec, spmd: SpmdMesh, dim: int) -> DTensorSpec:
    """The same placements except those dimensions of the mesh that shard now."""
    placements = list(spec.placements)
    sharding = spmd.dims(spmd.shard)
    for index in sharding:
        # What dimensions further right shard already was cut first.
        splits = 1
        for later in range(index + 1, spmd.mesh.ndim):
            if spec.placements[later].is_shard(dim) or isinstance(spec.placements[later], StridedShard):
                splits *= spmd.mesh.size(later)
        placements[index] = StridedShard(dim, split_factor=splits) if splits > 1 else Shard(dim)
    if len(sharding) == 1:
        return DTensorSpec(spmd.mesh, tuple(placements), tensor_meta=spec.tensor_meta)
    parts: list[DeviceMesh] = []
    kept: list[Placement] = []
    for index, name in enumerate(spmd.mesh.mesh_dim_names or ()):
        if index == sharding[0]:
            parts.append(spmd.data)
            kept += [Replicate()] * (spmd.data.ndim - 1) + [placements[index]]
        elif index not in sharding and name not in spmd.replicate:
            parts.append(spmd.mesh[name])
            kept.append(placements[index])
    mesh = parts[0] if len(parts) == 1 else concatenate_meshes(parts)
    return DTensorSpec(mesh, tuple(kept), tensor_meta=spec.tensor_meta)
