"""``reshard_after_forward`` as a group size: keep a larger shard after forward, gathered by fewer ranks.

With 8 ranks and a group size of 2, forward gathers over all 8 ranks. Then each rank keeps one half of every
parameter instead of an eighth, so backward gathers over pairs, e.g. inside a node. This costs memory::

    shard of 8 --all-gather 8--> full --keep--> shard of 2 --all-gather 2--> full --> backward

The kept shard is in the compute dtype and exists only from forward to backward. During this time the modules
show its parameters: ``DTensor``s on a mesh (groups, ranks of a group), for reading. ``reshard`` shows the
parameters that the optimizer updates.
"""

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
from ..shared.layout import chunked_layout
from ..shared.placement import contiguous_strides, new_dtensor
from ..shared.settings import UnitPrecision
from ..shared.torch_internals import DTensorSpec, TensorMeta, foreach_copy_
from .buffer import FlatBuffer
from .context import Context
from .gather import Gather, Packed, Sharded, choose_gather
from .presentation import Assignments, UnitParameter, assignments, show


class InSmallerGroup(Gather):
    """Gathers as usual in forward, and over fewer ranks into the same full buffer in backward.

    Args:
        sharded: its layout must need a copy-out (rank-major).
        parameters: the parameters of the unit, in the order of the layout.
        mesh: (groups, ranks of a group). Backward gathers over a group; its size divides the unit's.
    """

    fetches = owns_memory = keeps = True

    def __init__(self, sharded: Sharded, parameters: Sequence[UnitParameter], mesh: DeviceMesh) -> None:
        super().__init__(sharded)
        self._usual = choose_gather(sharded)
        self._parameters = parameters
        self._mesh = mesh
        self.group = group = mesh.get_group(1)
        itemsize = sharded.precision.compute.itemsize
        layout = chunked_layout(
            [segment.shape for segment in sharded.layout.segments], group.size(), group.rank(), itemsize
        )
        # Same places of the parameters in the full buffer as in the usual gather.
        self._kept_layout = layout.placed([segment.full_offset for segment in sharded.layout.segments])
        # The gather of the larger shard, and the buffer of that shard.
        self._smaller: Packed | None = None
        self._kept: FlatBuffer | None = None
        self._parts: list[torch.Tensor] = []
        self._kept_at: Any = None
        self._show: Assignments = []
        self._shown: dict[int, nn.Parameter] = {}
        self.holds = False

    # -- delegate to the usual gather, or to the one of the larger shard -------------------------------------

    @property
    def _now(self) -> Gather:
        """Return the gather that is next, or in flight."""
        return self._smaller if self.holds and self._smaller is not None else self._usual

    def start(self, context: Context) -> None:
        if self.holds:
            # A custom collective's input is written on the copy-in stream.
            for stream in (context.streams.copy_in, context.streams.all_gather):
                stream.wait(self._kept_at)
        self._now.start(context)

    def finish(self, context: Context) -> None:
        self._now.finish(context)
        self.work, self.event = self._now.work, self._now.event

    def fill(self, context: Context, hold: int) -> None:
        self._now.fill(context, hold)
        self.drop()  # the compute stream owns the kept shard and has waited for the gather that read it

    def memory(self) -> torch.Tensor:
        return self._usual.memory()

    def free(self, context: Context, hold: int) -> None:
        self._usual.free(context, hold)

    def abandon(self, context: Context) -> None:
        self._now.abandon(context)
        self.drop()

    def take_over(self, before: Gather) -> bool:
        return isinstance(before, InSmallerGroup) and self._usual.take_over(before._usual)

    def drop(self) -> None:
        """Free the larger shard, if there is one."""
        if self._kept is not None:
            self._kept.free()
        self.holds = False

    # -- the larger shard ------------------------------------------------------------------------------------

    def keep(self, context: Context) -> None:
        """Copy this rank's part out of the full buffer before that is freed."""
        full, layout, compute = self._usual.memory(), self._kept_layout, context.streams.compute
        if self._kept is None:
            self._kept = FlatBuffer(layout.shard_numel, full.dtype, full.device, compute)
            self._smaller = self._gather_of(self._kept.tensor)
            for segment in layout.segments:
                own = segment.own_part(segment.in_full(full))
                self._parts += [segment.in_shard(self._kept.tensor), own]
        self._kept.take()
        foreach_copy_(self._parts[::2], self._parts[1::2])
        # Written on the compute stream and read by backward's gather, which waits for this event (``start``).
        self._kept_at = compute.record()
        self.holds = True

    def _gather_of(self, shard: torch.Tensor) -> Packed:
        """Return the gather of the larger shard into the parameters' memory of the usual gather."""
        groups = comm.UnitGroups.of(self.group)
        precision = UnitPrecision.decide(shard.dtype, None, None)
        custom = self.sharded.custom
        made = Packed(Sharded(self._kept_layout, shard, groups, precision, shard.device, custom=custom))
        made.take_over(self._usual)
        return made

    def show_kept(self, trained: Sequence[nn.Parameter]) -> None:
        """Make the modules show the kept parameters, except those that were ``DTensor``s before wrapping."""
        if not self._show:
            self._make_kept()
        for index, shown in self._shown.items():
            if shown.requires_grad != trained[index].requires_grad:
                shown.requires_grad_(trained[index].requires_grad)
        show(self._show)

    @torch.inference_mode(False)
    def _make_kept(self) -> None:
        assert self._kept is not None
        segments = zip(self._kept_layout.segments, self._parameters, strict=True)
        for index, (segment, parameter) in enumerate(segments):
            if parameter.whole is not None:
                continue
            local = segment.in_shard(self._kept.tensor).view(segment.shard_shape).data
            shape = torch.Size(segment.shape)
            meta = TensorMeta(shape, contiguous_strides(shape), local.dtype)
            spec = DTensorSpec(self._mesh, (Replicate(), Shard(0)), tensor_meta=meta)
            shown = nn.Parameter(new_dtensor(local, spec), requires_grad=parameter.requires_grad)
            self._shown[index] = shown
        described = [self._parameters[index] for index in self._shown]
        kept = list(self._shown.values())
        self._show = assignments(described, kept, lambda module: module._parameters)


# Meshes made here, so that all units of one mesh share them and their groups. The key is the shard group: a
# mesh made after these groups were destroyed may compare equal.
_meshes: MutableMapping[ProcessGroup, dict[tuple[DeviceMesh, int], DeviceMesh]] = WeakKeyDictionary()


def smaller_mesh(mesh: DeviceMesh, size: int) -> DeviceMesh:
    """Return a mesh of the ranks of ``mesh`` in rows of ``size``. The first call for a size is collective."""
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
