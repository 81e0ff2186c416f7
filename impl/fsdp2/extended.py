"""All-gather extensions of tensor subclasses: ``fsdp_pre_all_gather`` and ``fsdp_post_all_gather``.

A parameter whose local tensor has these two methods (torch's protocol, for example to gather in 8 bits) is
not copied into a unit's flat shard. On every gather::

    sharded local tensor --pre--> inputs (any dtypes), metadata
                  inputs --all-gather--> outputs: all ranks' inputs one after another
       outputs, metadata --post--> the unsharded tensor, and the inner tensors that hold its memory

The first call of post makes the unsharded tensor; later calls pass ``out=`` and fill it again.

Such parameters have separate units without a flat shard: each sharded local tensor has its own memory. The
inputs of all parameters are copied into one buffer, in their common dtype or as bytes, for one all-gather::

    gathered   | rank 0: a.data  a.scale  b.data  b.scale | rank 1: ... |
    outputs    a.data of all ranks · a.scale of all ranks · b.data ...   one buffer each, freed with the unit
"""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ..collectives import comm
from ..runtime.buffer import HOST, FlatBuffer, make_buffer, new_shard
from ..runtime.context import Context
from ..runtime.gather import Gather, Sharded
from ..runtime.presentation import UnitParameter
from ..shared import error_text
from ..shared.layout import Segment
from ..shared.placement import ParameterPlan, local_tensor, new_dtensor
from ..shared.pytree import map_tensors
from ..shared.torch_internals import foreach_copy_
from .dtensor_params import POST_ALL_GATHER, PRE_ALL_GATHER, DTensorPresentation, is_extended


class ExtendedPresentation(DTensorPresentation):
    """Shows ``DTensor``s whose local tensors have all-gather extensions."""

    extended = True

    def _cut(self, originals: Sequence[nn.Parameter]) -> torch.Tensor:
        # An empty tensor instead of the flat shard. It has the device and dtype.
        like = local_tensor(originals[0])
        return new_shard(0, like.dtype, like.device, self._offload)

    @torch.no_grad()
    def _make_sharded(self, plan: ParameterPlan, segment: Segment, original: nn.Parameter) -> nn.Parameter:
        # Uses only the operators that torch's FSDP2 uses here, because subclasses implement those.
        layout, dim = self._layout, segment.dim
        local = local_tensor(original)
        chunks = torch.chunk(local, layout.world_size, dim)
        length = segment.shard_shape[dim]
        padded = local.new_zeros(padded_shape(segment, layout.world_size))
        if length:
            padded.narrow(dim, 0, length).copy_(chunks[layout.rank])
        if self._offload is not None and not padded.is_meta:
            padded = padded.to(HOST)
            padded = padded.pin_memory() if self._offload.pins else padded
        sharded = new_dtensor(padded.narrow(dim, 0, length), plan.spec)
        return nn.Parameter(sharded, requires_grad=original.requires_grad)

    def _take_up(self) -> torch.Tensor | None:
        for index, parameter in enumerate(self._parameters):
            if not is_extended(self.local(index), parameter.fqn):
                raise ValueError(error_text("extended.take_up", parameter.fqn))
        local = self.local(0)
        if local.device == self.shard.device and local.dtype == self.shard.dtype:
            return None
        self.shard = torch.empty(0, dtype=local.dtype, device=local.device)
        return self.shard

    def local(self, index: int) -> torch.Tensor:
        """Return the sharded local tensor of one parameter."""
        parameter: Any = self.sharded[index]
        return parameter._local_tensor


def padded_shape(segment: Segment, world_size: int) -> tuple[int, ...]:
    """Return the shape of the largest part of a parameter. Every rank pads its part to this shape."""
    largest = -(-segment.shape[segment.dim] // world_size)
    return (*segment.shape[: segment.dim], largest, *segment.shape[segment.dim + 1 :])


@dataclass
class Extension:
    """The all-gather extension of one parameter: its methods' arguments, and the results of the last call.

    ``padded`` is the shape of an input on every rank; ``mesh`` is the 1-D shard mesh.
    """

    fqn: str
    mesh: DeviceMesh
    segment: Segment
    padded: tuple[int, ...]
    uneven: bool
    stride: tuple[int, ...]
    module: nn.Module
    policy: Any
    # The compute dtype, set by the gather.
    compute: torch.dtype | None = None
    metadata: Any = None
    shapes: list[torch.Size] = field(default_factory=list)
    # Tensors that hold the memory of the unsharded one; freed and allocated with the unit.
    inner: Sequence[torch.Tensor] = ()

    def inputs(self, local: torch.Tensor) -> list[torch.Tensor]:
        """Return this rank's inputs of the all-gather, each 1-D with the same size on all ranks."""
        method: Any = getattr(local, PRE_ALL_GATHER)
        count = len(inspect.signature(method).parameters)
        if count == 1:  # torch's first version of the protocol
            given, self.metadata = method(self.mesh)
        elif count == 5:
            size = torch.Size(self.segment.shape)
            given, self.metadata = method(self.mesh, size, self.stride, self.module, self.policy)
        else:
            raise AssertionError(error_text("extended.inputs", PRE_ALL_GATHER, self.fqn, count))
        if self.uneven:
            given = [self._pad(tensor, local) for tensor in given]
        self.shapes = [tensor.size() for tensor in given]
        return [tensor.reshape(-1) for tensor in given]

    def _pad(self, tensor: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
        if tensor.size() == self.padded:
            return tensor
        if tensor.size() != local.size():  # all ranks raise, because the input sizes would differ
            raise AssertionError(
                error_text(
                    "extended.pad",
                    self.fqn,
                    self.segment.shape,
                    self.mesh.size(),
                    PRE_ALL_GATHER,
                    self.padded,
                    tuple(tensor.shape),
                )
            )
        dim = self.segment.dim
        padded = tensor.new_zeros(self.padded)
        padded.narrow(dim, 0, tensor.size(dim)).copy_(tensor)
        return padded

    def interleaves(self, index: int) -> bool:
        """Return whether the ranks' inputs ``index`` are concatenated on a dim other than 0."""
        return self.segment.dim > 0 and self.shapes[index] == self.padded

    def unshard(
        self, local: torch.Tensor, outputs: Sequence[torch.Tensor], unsharded: torch.Tensor | None
    ) -> torch.Tensor:
        """Make the unsharded tensor from the 1-D all-gather outputs, or fill it again."""
        whole = tuple(self._shape(index, output) for index, output in enumerate(outputs))
        method: Any = getattr(local, POST_ALL_GATHER)
        metadata, self.metadata = self.metadata, None
        if unsharded is not None:
            method(whole, metadata, self.compute, out=unsharded)
            return unsharded
        made, self.inner = method(whole, metadata, self.compute)
        return torch.as_strided(made, self.segment.shape, self.stride, storage_offset=0)

    def _shape(self, index: int, output: torch.Tensor) -> torch.Tensor:
        if self.interleaves(index):
            return output.view(self.segment.shape)
        shape = self.shapes[index]
        return output.view(-1, *shape[1:])


class ByExtensions(Gather):
    """The gather of parameters with all-gather extensions.

    Args:
        extensions: one for each parameter, in order.
        presentation: holds the sharded local tensors, which loading may replace.
    """

    owns_memory = True
    makes_views = False

    def __init__(
        self, sharded: Sharded, extensions: Sequence[Extension], presentation: ExtendedPresentation
    ) -> None:
        super().__init__(sharded)
        # A single rank copies its inputs in ``fill``.
        self.fetches = self._gathers = sharded.groups.shard is not None
        self._extensions = extensions
        self._presentation = presentation
        for extension in extensions:
            extension.compute = sharded.precision.compute
        self._outputs: list[list[FlatBuffer]] = []
        self._bytes: FlatBuffer | None = None
        self._sizes: list[int] = []
        self._made: list[nn.Parameter] = []

    @property
    def nbytes(self) -> int:
        """Return the bytes that gathering allocates; 0 before the first gather."""
        return sum(buffer.nbytes for buffers in self._outputs for buffer in buffers)

    def take_over(self, before: Gather) -> bool:
        assert isinstance(before, ByExtensions)
        self._outputs, self._made = before._outputs, before._made
        return True

    # -- gather ----------------------------------------------------------------------------------------------

    def start(self, context: Context) -> None:
        streams, group = context.streams, self.sharded.groups.shard
        assert group is not None
        with streams.all_gather, torch.no_grad():
            gathered, layout = self._lay_out(context), self.layout
            size = gathered.numel() // layout.world_size
            own = gathered[layout.rank * size : (layout.rank + 1) * size]
            self.work = comm.all_gather(gathered, own, group, not streams.has_streams, self.sharded.custom)
            self.event = streams.all_gather.record()
            if self.sharded.offload is not None:
                # ``_lay_out`` copied from shards on the host, on this stream.
                context.host_reads[streams.all_gather] = self.event

    def _lay_out(self, context: Context) -> torch.Tensor:
        """Copy this rank's inputs to their place in the all-gather buffer and return the buffer."""
        inputs = [
            tensor
            for index, extension in enumerate(self._extensions)
            for tensor in extension.inputs(
                self._presentation.local(index).to(self.sharded.device, non_blocking=True)
            )
        ]
        dtypes = {tensor.dtype for tensor in inputs}
        dtype = dtypes.pop() if len(dtypes) == 1 else torch.uint8
        self._make_outputs(inputs, context)
        inputs = [tensor.view(dtype) for tensor in inputs]
        self._sizes = [tensor.numel() for tensor in inputs]
        gathered = self._take_bytes(sum(self._sizes) * self.layout.world_size, dtype, context)
        start = self.layout.rank * sum(self._sizes)
        own = gathered[start : start + sum(self._sizes)]
        foreach_copy_(list(own.split(self._sizes)), inputs)
        return gathered

    def _take_bytes(self, numel: int, dtype: torch.dtype, context: Context) -> torch.Tensor:
        streams, buffer = context.streams, self._bytes
        stream = streams.all_gather if self._gathers else streams.compute
        if buffer is None or buffer.tensor.numel() != numel or buffer.tensor.dtype != dtype:
            buffer = make_buffer(numel, dtype, self.sharded.device, stream, self.sharded.custom)
            self._bytes = buffer
        context.handover.reclaim(buffer)
        buffer.take()
        return buffer.tensor

    def _make_outputs(self, inputs: list[torch.Tensor], context: Context) -> None:
        """Make the output buffers at the first call. ``fill`` allocates their storage on compute."""
        if self._outputs:
            return
        rest, stream, device = iter(inputs), context.streams.compute, self.sharded.device
        for extension in self._extensions:
            own = [next(rest) for _ in extension.shapes]
            buffers = [
                FlatBuffer(tensor.numel() * self.layout.world_size, tensor.dtype, device, stream)
                for tensor in own
            ]
            for buffer in buffers:
                buffer.free()
            self._outputs.append(buffers)

    # -- unshard ---------------------------------------------------------------------------------------------

    @torch.no_grad()
    def fill(self, context: Context, hold: int) -> None:
        streams = context.streams
        if hold:
            context.handover.trim()
        if not self._gathers:
            self._lay_out(context)
        assert self._bytes is not None
        for buffers in self._outputs:
            for buffer in buffers:
                buffer.take()
        self._copy_outputs(self._bytes.tensor.view(self.layout.world_size, -1))
        context.handover.release(self._bytes, streams.compute, hold)
        for extension in self._extensions:
            for tensor in extension.inner:
                storage = tensor.untyped_storage()
                if storage.size() == 0:
                    storage.resize_(tensor.numel() * tensor.itemsize)

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            streams.compute.keep(tensor)
            return tensor

        for extension in self._extensions:
            # pre_all_gather made the metadata on the all-gather stream; compute uses and drops it.
            map_tensors(keep, extension.metadata)
        for index, parameter in enumerate(self._made):
            self._unshard(index, parameter)  # into its own memory, which was allocated again above

    def _copy_outputs(self, rows: torch.Tensor) -> None:
        targets: list[torch.Tensor] = []
        parts: list[torch.Tensor] = []
        columns = iter(rows.split(self._sizes, dim=1))
        for extension, buffers in zip(self._extensions, self._outputs, strict=True):
            for index, buffer in enumerate(buffers):
                # View the outputs in the dtype of the row (bytes if mixed): a part may start at any byte.
                whole, part = buffer.tensor.view(self.layout.world_size, -1).view(rows.dtype), next(columns)
                if extension.interleaves(index):
                    pieces, size = extension.segment.blocks
                    whole = buffer.tensor.view(pieces, -1, size).view(rows.dtype).transpose(0, 1)
                    part = part.unflatten(1, (pieces, -1))
                targets.append(whole)
                parts.append(part)
        foreach_copy_(targets, parts)

    def _unshard(self, index: int, unsharded: torch.Tensor | None) -> torch.Tensor:
        # `.data`, so that autograd does not see the writes of later gathers (see `unit.py`).
        outputs = [buffer.tensor.data for buffer in self._outputs[index]]
        return self._extensions[index].unshard(self._presentation.local(index), outputs, unsharded)

    @torch.inference_mode(False)
    @torch.no_grad()
    def make_parameters(self, parameters: Sequence[UnitParameter]) -> list[nn.Parameter]:
        self._made = []
        for index, parameter in enumerate(parameters):
            tensor = self._unshard(index, None)
            if parameter.whole is not None:
                tensor = parameter.whole.unsharded(tensor)
            self._made.append(nn.Parameter(tensor, requires_grad=parameter.requires_grad))
        return self._made

    # -- reshard ---------------------------------------------------------------------------------------------

    def free(self, context: Context, hold: int) -> None:
        for buffers in self._outputs:
            for buffer in buffers:
                buffer.free()
        for extension in self._extensions:
            for tensor in extension.inner:
                tensor.untyped_storage().resize_(0)
        if self._gathers:
            context.limiter.freed(context.streams.compute)

    def abandon(self, context: Context) -> None:
        self.finish(context)
        assert self._bytes is not None
        context.handover.release(self._bytes, context.streams.compute)
