"""The sharding of one parameter by ``fully_shard``: its dimension, its mesh, and the sharded parameter.

::

    parameter                 this rank chunks          sharded parameter (and its gradient)
    plain tensor              the tensor, on ``dim``    DTensor on the mesh: Shard(dim), replicas before it
    DTensor on a mesh of      its local tensor          DTensor on both meshes, ours first: Shard(dim), then
    its own (tensor                                     the parameter's own placements. _StridedShard(dim)
    parallelism)                                        if those shard ``dim`` too

A strided shard means that the other mesh sharded first. With two ranks of tensor parallelism t and two of
data parallelism d, rows 0 to 7 of a parameter are placed as below; ``Shard(0), Shard(0)`` would put d first::

    t0: 0 1 2 3   t1: 4 5 6 7    ->    d0 t0: 0 1   d0 t1: 4 5   d1 t0: 2 3   d1 t1: 6 7

During forward and backward a parameter has its original form: plain, or a ``DTensor`` on its own mesh.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from . import error_text
from .torch_internals import AsyncCollectiveTensor, DTensorSpec, StridedShard, TensorMeta, concatenate_meshes

# Wrap a local tensor by its spec. Skips ``DTensor.__init__``, which only checks for the compiler.
new_dtensor: Callable[..., DTensor] = partial(DTensor.__new__, DTensor, requires_grad=False)


@dataclass(frozen=True)
class FSDPMeshInfo:
    """A mesh with the dimension that shards and, for replicas, ``replicate_mesh_dim``."""

    mesh: DeviceMesh
    shard_mesh_dim: int = 0
    replicate_mesh_dim: int | None = None


@dataclass(frozen=True)
class HSDPMeshInfo(FSDPMeshInfo):
    """A 2-D mesh (replicate, shard)."""

    shard_mesh_dim: int = 1
    replicate_mesh_dim: int | None = 0


@dataclass(frozen=True)
class ShardPlacementResult:
    """A result of ``shard_placement_fn``: a placement, and the mesh for this parameter."""

    placement: Shard | None
    mesh_info: FSDPMeshInfo


@dataclass(frozen=True)
class TensorParallel:
    """The unsharded form of a parameter that was a ``DTensor`` before ``fully_shard``.

    ``spec`` is the spec of the original parameter.
    """

    spec: DTensorSpec

    def unsharded(self, local: torch.Tensor) -> torch.Tensor:
        """Return the ``DTensor`` over the gathered ``local`` tensor, with its dtype."""
        spec, meta = self.spec, self.spec.tensor_meta
        if meta is not None and meta.dtype != local.dtype:
            spec = replace(spec, tensor_meta=TensorMeta(meta.shape, meta.stride, local.dtype))
        return new_dtensor(local, spec)

    def wanted(self, gradient: DTensor) -> tuple[Placement, ...]:
        """Return the placements that ``gradient`` needs so that FSDP can reduce its local tensor."""
        return self.spec.placements

    def local_gradient(self, gradient: torch.Tensor) -> torch.Tensor:
        """Return the local tensor of ``gradient``, redistributed to the placements of ``wanted``."""
        if isinstance(gradient, AsyncCollectiveTensor):
            gradient = gradient.wait()
        if not isinstance(gradient, DTensor):
            raise TypeError(f"the gradient of a DTensor parameter is a {type(gradient).__name__}")
        wanted = self.wanted(gradient)
        if gradient.placements != wanted:
            gradient = gradient.redistribute(placements=wanted)
        local = gradient._local_tensor
        return local.wait() if isinstance(local, AsyncCollectiveTensor) else local


@dataclass(frozen=True)
class ParameterPlan:
    """The resolved sharding of one parameter.

    Attributes:
        mesh: 1-D (shard) or 2-D (replicate, shard) mesh over which it is gathered and reduced.
        dim: the dimension of the local tensor that is sharded.
        spec: spec of the sharded parameter and its gradient.
        whole: its unsharded form if that is not a plain tensor.
        shards: false if the mesh is 1-D over replicas.
    """

    mesh: DeviceMesh
    dim: int
    spec: DTensorSpec
    whole: TensorParallel | None = None
    shards: bool = True


PlacementFunction = Callable[[nn.Parameter], Any]


def plan_parameter(
    parameter: nn.Parameter, fqn: str, mesh: DeviceMesh, choose: PlacementFunction | None
) -> ParameterPlan:
    """Decide how ``parameter`` is sharded.

    Args:
        mesh: the mesh to shard over unless ``choose`` returns another one.
        choose: the ``shard_placement_fn`` of ``fully_shard``: returns ``None``, a ``Shard`` or a
            ``ShardPlacementResult`` (ours or torch's).

    Raises:
        ValueError: ``choose`` returned something else, or the meshes do not fit together.
        AssertionError: the parameter lacks the dimension.
        NotImplementedError: the number of ranks does not divide a dimension other than the first.
    """
    placement, mesh = (None, mesh) if choose is None else _resolve(choose(parameter), fqn, mesh)
    dim = 0 if placement is None else placement.dim
    if not -parameter.ndim <= dim < parameter.ndim:
        raise AssertionError(error_text("placement.plan_parameter", placement, fqn, tuple(parameter.shape)))
    dim %= parameter.ndim
    local = local_tensor(parameter)
    ranks = mesh.size(mesh.ndim - 1)
    check_even(local, fqn, dim, ranks)
    if isinstance(parameter, DTensor):
        return _plan_dtensor(parameter, fqn, mesh, dim)
    meta = TensorMeta(parameter.shape, contiguous_strides(parameter.shape), parameter.dtype)
    return ParameterPlan(mesh, dim, DTensorSpec(mesh, _with_replicas(mesh, Shard(dim)), tensor_meta=meta))


def check_even(local: torch.Tensor, fqn: str, dim: int, ranks: int) -> None:
    """Raise NotImplementedError if ``ranks`` does not divide a dimension other than the first."""
    if dim > 0 and local.shape[dim] % ranks:
        raise NotImplementedError(
            error_text("placement.check_even", dim, fqn, local.shape[dim], tuple(local.shape), ranks)
        )


def local_tensor(parameter: torch.Tensor) -> torch.Tensor:
    """Return the tensor that this rank holds before sharding: a ``DTensor``'s local tensor, or all of it."""
    return parameter._local_tensor if isinstance(parameter, DTensor) else parameter


def shard_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Return the 1-D shard mesh of a 1-D (shard) or 2-D (replicate, shard) ``mesh``."""
    if mesh.ndim == 1:
        return mesh
    if mesh.mesh_dim_names is None:
        raise AssertionError(error_text("placement.names", mesh))
    return mesh[mesh.mesh_dim_names[-1]]


def _resolve(result: Any, fqn: str, mesh: DeviceMesh) -> tuple[Any, DeviceMesh]:
    if result is None or isinstance(result, Shard):
        return result, mesh
    info: Any = getattr(result, "mesh_info", None)
    placement = getattr(result, "placement", None)
    own = getattr(info, "mesh", None)
    if not isinstance(own, DeviceMesh) or not isinstance(placement, Shard | None):
        raise ValueError(error_text("placement.resolve", result, fqn))
    if info.shard_mesh_dim != own.ndim - 1:
        raise ValueError(error_text("placement.last_dimension", info.shard_mesh_dim, own.ndim, fqn))
    return placement, own


def _with_replicas(mesh: DeviceMesh, *placements: Placement) -> tuple[Placement, ...]:
    return placements if mesh.ndim == 1 else (Replicate(), *placements)


def _plan_dtensor(parameter: DTensor, fqn: str, mesh: DeviceMesh, dim: int) -> ParameterPlan:
    spec = parameter._spec
    if spec.mesh.device_type != mesh.device_type:
        raise ValueError(error_text("placement.dtensor", fqn, spec.mesh.device_type, mesh.device_type))
    if len(spec.placements) > 2:
        raise NotImplementedError(error_text("placement.mesh_dimensions", fqn, len(spec.placements)))
    both = _join(mesh, spec.mesh, fqn)
    splits = spec.num_shards_map[dim]
    shard: Placement = StridedShard(dim, split_factor=splits) if splits > 1 else Shard(dim)
    placements = (*_with_replicas(mesh, shard), *spec.placements)
    sharded = DTensorSpec(both, placements, tensor_meta=spec.tensor_meta)
    return ParameterPlan(mesh, dim, sharded, TensorParallel(spec))


def _join(mesh: DeviceMesh, own: DeviceMesh, fqn: str) -> DeviceMesh:
    try:
        if mesh.mesh_dim_names is None or own.mesh_dim_names is None:
            raise RuntimeError("a mesh without names")
        return concatenate_meshes([mesh, own])
    except RuntimeError as error:
        raise ValueError(error_text("placement.join", fqn, own, mesh)) from error


def contiguous_strides(shape: torch.Size) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor of this shape."""
    return torch.empty(shape, device="meta").stride()


# ``dp_mesh_dims``: the parameters are ``DTensor`` objects on one mesh that has all dimensions, data parallel
# and others.
#
# ::
#
#     mesh       ("replicate", "shard", "tensor")      mesh of the parameters: replicated over the first two
#     data mesh  ("replicate", "shard")                mesh over which FSDP gathers and reduces
#     sharded    (Replicate, Shard(dim), unchanged)    the same mesh, one placement changed
#
# Several dimensions that shard together are flattened into one, both in the data mesh and in the mesh of the
# sharded parameters. A gradient that is Partial over data parallel dimensions stays so: FSDP reduces it.


def _names(given: str | tuple[str, ...] | None) -> tuple[str, ...]:
    if given is None:
        return ()
    return (given,) if isinstance(given, str) else tuple(given)


@dataclass(frozen=True)
class DataParallelMeshDims:
    """The names of the data parallel dimensions of a mesh. Several names are flattened into one dimension.

    Attributes:
        shard: the dimensions over which parameters are sharded.
        replicate: the dimensions over which parameters are replicated.
    """

    shard: str | tuple[str, ...] | None = None
    replicate: str | tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if self.shard is None and self.replicate is None:
            raise ValueError("At least one of shard or replicate must be set in DataParallelMeshDims")

    @property
    def shard_names(self) -> tuple[str, ...]:
        """Return ``shard`` as a tuple."""
        return _names(self.shard)

    @property
    def replicate_names(self) -> tuple[str, ...]:
        """Return ``replicate`` as a tuple."""
        return _names(self.replicate)


@dataclass(frozen=True)
class SpmdMesh:
    """A mesh with all dimensions and its data parallel submesh.

    Attributes:
        mesh: the mesh of the parameters.
        data: the submesh: 1-D (shard or replicate) or 2-D (replicate, shard).
        shard, replicate: names of the dimensions of ``mesh``.
    """

    mesh: DeviceMesh
    data: DeviceMesh
    shard: tuple[str, ...]
    replicate: tuple[str, ...]

    @classmethod
    def of(cls, mesh: DeviceMesh, dims: DataParallelMeshDims) -> "SpmdMesh":
        """Return ``mesh`` with its data parallel submesh. Collective if it flattens dimensions.

        Raises:
            ValueError: the mesh has no dimension names, or lacks one of the names in ``dims``.
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
        """Return the indices of the named dimensions in the mesh."""
        return [(self.mesh.mesh_dim_names or ()).index(name) for name in names]


def _part(mesh: DeviceMesh, names: tuple[str, ...]) -> DeviceMesh:
    return mesh[names[0]] if len(names) == 1 else mesh[names]._flatten("_".join(names))


@dataclass(frozen=True)
class OnWholeMesh(TensorParallel):
    """The unsharded form of a parameter on a mesh of all dimensions; FSDP reduces over ``data_dims``."""

    data_dims: frozenset[int] = frozenset()

    def wanted(self, gradient: DTensor) -> tuple[Placement, ...]:
        pairs = enumerate(zip(gradient.placements, self.spec.placements, strict=True))
        return tuple(given if index in self.data_dims else own for index, (given, own) in pairs)


def plan_on_whole_mesh(
    parameter: nn.Parameter, fqn: str, spmd: "SpmdMesh", choose: PlacementFunction | None
) -> ParameterPlan:
    """Decide how a parameter on a mesh of all dimensions is sharded.

    Raises:
        ValueError: it is not a ``DTensor`` on that mesh, is not replicated over the data parallel
            dimensions, or ``choose`` returned something other than ``None`` or a ``Shard``.
        NotImplementedError: the number of ranks does not divide a dimension other than the first.
    """
    if not isinstance(parameter, DTensor):
        raise ValueError(error_text("placement.plan_on_whole_mesh", fqn))
    spec = parameter._spec
    if spec.mesh != spmd.mesh:
        raise ValueError(f"parameter '{fqn}' is on {spec.mesh}, and fully_shard was given {spmd.mesh}")
    data_dims = spmd.dims((*spmd.shard, *spmd.replicate))
    for index in data_dims:
        if not isinstance(spec.placements[index], Replicate):
            name = spmd.mesh.mesh_dim_names[index]  # type: ignore[index]
            raise ValueError(error_text("placement.data_dim", name, index, fqn, spec.placements[index]))
    whole = OnWholeMesh(spec, frozenset(data_dims))
    if not spmd.shard:
        return ParameterPlan(spmd.data, 0, spec, whole, shards=False)
    chosen = choose(parameter) if choose is not None else None
    if chosen is not None and not isinstance(chosen, Shard):
        raise ValueError(error_text("placement.whole_mesh", chosen, fqn))
    dim = 0 if chosen is None else chosen.dim % parameter.ndim
    check_even(local_tensor(parameter), fqn, dim, spmd.data.size(spmd.data.ndim - 1))
    return ParameterPlan(spmd.data, dim, _sharded_spec(spec, spmd, dim), whole)


def _sharded_spec(spec: DTensorSpec, spmd: "SpmdMesh", dim: int) -> DTensorSpec:
    """Return ``spec`` with shard placements on the data parallel dimensions that shard."""
    placements = list(spec.placements)
    sharding = spmd.dims(spmd.shard)
    for index in sharding:
        # Mesh dimensions further right already shard ``dim``, so they come first.
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
