"""``reshard_after_forward`` as a group size: after forward keep a larger shard, gather it among fewer ranks
in backward.

With 8 ranks and a group size of 2, forward gathers among all 8, then each rank keeps one half of every
parameter instead of an eighth. Backward gathers among pairs, for instance inside a node, at the price of
memory::

    shard of 8 --all-gather 8--> full --keep--> shard of 2 --all-gather 2--> full --> backward

The kept shard is in the dtype of computation and lives from forward to backward only. Meanwhile the modules
show its parameters: ``DTensor``s on a mesh of (groups, ranks of a group), for reading; ``reshard`` shows
those that an optimizer changes.
"""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard

from ..collectives import comm
from ..collectives.custom_comm import AllGather
from ..shared.copy_out import CopyOut
from ..shared.layout import UnitLayout, chunked_layout
from ..shared.placement import contiguous_strides, new_dtensor
from ..shared.settings import UnitPrecision
from ..shared.torch_internals import DTensorSpec, TensorMeta, foreach_copy_
from .buffer import FlatBuffer, Handover, make_buffer
from .presentation import UnitParameter
from .streams import Event, Stream, Streams


class SmallerGroup:
    """The larger shard of one unit and the layout of its gather.

    Args:
        layout: the unit's own layout, whose full buffer the parameters live in.
        parameters: those of the unit, in the order of the layout.
        mesh: (groups, ranks that gather in backward); the latter's number divides the unit's.
    """

    def __init__(
        self,
        layout: UnitLayout,
        parameters: Sequence[UnitParameter],
        mesh: DeviceMesh,
        precision: UnitPrecision,
    ) -> None:
        self._parameters = parameters
        self._mesh = mesh
        self.group = group = mesh.get_group(1)
        self.custom: AllGather | None = None
        shapes = [segment.shape for segment in layout.segments]
        self.layout = chunked_layout(shapes, group.size(), group.rank(), precision.compute.itemsize)
        self._starts = [segment.full_offset for segment in layout.segments]
        self.forget()

    def forget(self) -> None:
        """Start with new buffers, after the parameters were moved or converted."""
        self._kept: FlatBuffer | None = None
        self._gathered: FlatBuffer | None = None
        self._parts: list[torch.Tensor] = []
        self._copy_out: CopyOut | None = None
        self._show: list[tuple[dict[str, Any], str, nn.Parameter]] = []
        self._shown: dict[int, nn.Parameter] = {}
        self.holds = False
        """Whether the larger shard is there, so that the next gather is the smaller one."""
        self.serves = False
        """Whether the gather under way is the smaller one."""
        self.event: Event | None = None

    def keep(self, full: torch.Tensor, compute: Stream) -> None:
        """Copy this rank's part out of the full buffer, before that is freed."""
        layout = self.layout
        if self._kept is None:
            self._kept = FlatBuffer(layout.shard_numel, full.dtype, full.device, compute)
            for segment, start in zip(layout.segments, self._starts, strict=True):
                begin, end = segment.shard_range
                self._parts += [segment.in_shard(self._kept.tensor), full[start + begin : start + end]]
            self._copy_out = CopyOut(layout, full, self._starts)
        else:
            self._kept.take()
        foreach_copy_(self._parts[::2], self._parts[1::2])
        self.event = compute.record()
        self.holds = True

    def show(self, trained: Sequence[nn.Parameter]) -> None:
        """Let the modules show the kept parameters. Those that were ``DTensor``s before stay as they are.

        Args:
            trained: the unit's sharded parameters, which may have been frozen or thawed since.
        """
        if not self._show:
            self._make_parameters()
        for index, shown in self._shown.items():
            if shown.requires_grad != trained[index].requires_grad:
                shown.requires_grad_(trained[index].requires_grad)
        for registry, name, parameter in self._show:
            registry[name] = parameter

    @torch.inference_mode(False)
    def _make_parameters(self) -> None:
        segments = zip(self.layout.segments, self._parameters, strict=True)
        for index, (segment, parameter) in enumerate(segments):
            if parameter.whole is not None:
                continue
            local = segment.in_shard(self.shard).view(segment.shard_shape).data
            shape = torch.Size(segment.shape)
            meta = TensorMeta(shape, contiguous_strides(shape), local.dtype)
            spec = DTensorSpec(self._mesh, (Replicate(), Shard(0)), tensor_meta=meta)
            shown = nn.Parameter(
                new_dtensor(local, spec, requires_grad=False), requires_grad=parameter.requires_grad
            )
            self._shown[index] = shown
            self._show += [(place.module._parameters, place.name, shown) for place in parameter.places]

    @property
    def shard(self) -> torch.Tensor:
        """1-D, what this rank gives to the gather."""
        assert self._kept is not None
        return self._kept.tensor

    def start(self, streams: Streams) -> tuple[Any, Event | None]:
        """Issue the smaller all-gather; returns its work and its event."""
        streams.all_gather.wait(self.event)
        with streams.all_gather:
            gathered = self._take_gathered(streams.all_gather)
            work = comm.all_gather(
                gathered.tensor, self.shard, self.group, not streams.has_streams, self.custom
            )
            self.serves = True
            return work, streams.all_gather.record()

    def _take_gathered(self, owner: Stream) -> FlatBuffer:
        if self._gathered is None:
            numel = self.layout.gathered_numel
            dtype, device = self.shard.dtype, self.shard.device
            self._gathered = make_buffer(numel, dtype, device, owner, self.custom)
        else:
            self._gathered.take()
        return self._gathered

    def copy_out(self) -> None:
        """Fill the full buffer, which is taken, from what was gathered."""
        assert self._gathered is not None
        assert self._copy_out is not None
        self._copy_out(self._gathered.tensor)

    def release(self, handover: Handover, compute: Stream) -> None:
        """The gather is over: give back its buffer and the larger shard."""
        assert self._gathered is not None
        handover.release(self._gathered, compute)
        self.serves = False
        self.drop()

    def drop(self) -> None:
        """Free the larger shard."""
        if self._kept is not None:
            self._kept.free()
        self.holds = False


_meshes: MutableMapping[ProcessGroup, dict[tuple[DeviceMesh, int], DeviceMesh]] = WeakKeyDictionary()
"""Meshes made here, so that all units of one mesh share them and their groups. They belong to the group that
shards: another mesh may compare equal, of groups that were made after these were destroyed.
"""


def smaller_mesh(mesh: DeviceMesh, size: int) -> DeviceMesh:
    """The ranks of ``mesh`` in rows of ``size`` neighbours. The first call for a size is collective."""
    key, made = (mesh, size), _meshes.setdefault(mesh.get_group(mesh.ndim - 1), {})
    if key not in made:
        rows = mesh.mesh.view(-1, size)
        row, column = (int(index) for index in (rows == dist.get_rank()).nonzero()[0])
        groups = [
            dist.new_group(ranks.tolist(), use_local_synchronization=True)
            for ranks in (rows[:, column], rows[row])
        ]
        made[key] = DeviceMesh.from_group(
            groups, mesh.device_type, mesh=rows, mesh_dim_names=("group", "shard")
        )
    return made[key]
