"""A unit whose parameters are tensor subclasses that say what is gathered (``extensions.py``).

It differs from its base in what it gathers and how that becomes parameters; states, schedule and reduction
are the same. There is no flat shard: each sharded local tensor has memory of its own. What all parameters
give is laid into one buffer, of their common dtype or else of bytes, for one all-gather::

    gathered   | rank 0: a.data  a.scale  b.data  b.scale | rank 1: ... |
    outputs    a.data of all ranks · a.scale of all ranks · b.data ...   one buffer each, freed with the unit
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ..collectives import comm
from ..collectives.custom_comm import AllGather
from ..runtime.buffer import FlatBuffer, make_buffer
from ..runtime.offload import HOST, new_shard
from ..runtime.unit import Unit
from ..shared.layout import Segment
from ..shared.placement import ParameterPlan, local_tensor, new_dtensor
from ..shared.pytree import map_tensors
from ..shared.torch_internals import foreach_copy_
from .dtensor_params import DTensorPresentation
from .extensions import Extension, is_extended


class ExtendedPresentation(DTensorPresentation):
    """Shows ``DTensor``s whose local tensors are subclasses."""

    extended = True

    def _cut(self, originals: Sequence[nn.Parameter]) -> torch.Tensor:
        # Nothing, where a unit keeps its flat shard: it tells device and dtype.
        like = local_tensor(originals[0])
        return new_shard(0, like.dtype, like.device, self._offload)

    @torch.no_grad()
    def _make_sharded(self, plan: ParameterPlan, segment: Segment, original: nn.Parameter) -> nn.Parameter:
        # Only operators that torch's own FSDP2 uses here: it is those that subclasses implement.
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
        sharded = new_dtensor(padded.narrow(dim, 0, length), plan.spec, requires_grad=False)
        return nn.Parameter(sharded, requires_grad=original.requires_grad)

    def _take_up(self) -> torch.Tensor | None:
        for index, parameter in enumerate(self._parameters):
            if not is_extended(self.local(index), parameter.fqn):
                raise ValueError(
                    f"parameter '{parameter.fqn}' was replaced by one without all-gather extensions; load "
                    "into it instead (load_state_dict without assign)"
                )
        local = self.local(0)
        if local.device == self.shard.device and local.dtype == self.shard.dtype:
            return None
        self.shard = torch.empty(0, dtype=local.dtype, device=local.device)
        return self.shard

    def local(self, index: int) -> torch.Tensor:
        """The sharded local tensor of one parameter."""
        parameter: Any = self.sharded[index]
        return parameter._local_tensor


def padded_shape(segment: Segment, world_size: int) -> tuple[int, ...]:
    """The shape of the largest part of a parameter; every rank pads its own to it."""
    largest = -(-segment.shape[segment.dim] // world_size)
    return (*segment.shape[: segment.dim], largest, *segment.shape[segment.dim + 1 :])


class ExtendedUnit(Unit):
    """See the head of this file.

    Args:
        extensions: one for each parameter, in order.
        others: the arguments of ``Unit``; the layout is rank-major also for one rank.
    """

    presentation: ExtendedPresentation

    def __init__(self, *, extensions: Sequence[Extension], **others: Any) -> None:
        super().__init__(**others)
        self.owns_memory = True
        self.plain = False
        self.fetches = self.gathers  # one rank lays out its inputs where they are needed
        self._extensions = list(extensions)
        self._forget()

    def _forget(self) -> None:
        self._outputs: list[list[FlatBuffer]] = []
        self._bytes: FlatBuffer | None = None
        self._sizes: list[int] = []

    def readopt(self) -> None:
        """Take up the sharded parameters; see ``Unit.readopt``."""
        super().readopt()
        self.owns_memory = True
        for extension in self._extensions:
            extension.compute = self.precision.compute  # converted (``.to``)

    def _forget_buffers(self) -> None:
        super()._forget_buffers()
        self._forget()

    @property
    def unsharded_bytes(self) -> int:
        """Bytes that unsharding takes; known after the first time."""
        return sum(buffer.nbytes for buffers in self._outputs for buffer in buffers)

    def local_gradients(self, which: Sequence[int], gradients: list[torch.Tensor]) -> list[torch.Tensor]:
        """See ``Unit.local_gradients``; in one dtype, where each extension may compute in one of its own."""
        gradients = super().local_gradients(which, gradients)
        if self.groups.ranks > 1 and len({gradient.dtype for gradient in gradients}) < 2:
            return gradients  # cast while they are laid out
        return [gradient.to(self.precision.reduce) for gradient in gradients]

    # -- gather ----------------------------------------------------------------------------------------------

    def _peer_gather(self) -> None:
        """What is gathered is not the shard."""

    def _issue_all_gather(self) -> None:
        streams, group = self.context.streams, self.groups.shard
        assert group is not None
        with streams.all_gather, torch.no_grad():
            gathered = self._lay_out([tensor for inputs in self._inputs() for tensor in inputs])
            size = gathered.numel() // self.layout.world_size
            own = gathered[self.layout.rank * size : (self.layout.rank + 1) * size]
            self._work = comm.all_gather(gathered, own, group, not streams.has_streams, self.custom_gather)
            self._event = streams.all_gather.record()
            if self.offload is not None:
                self.context.host_reads[streams.all_gather] = self._event

    def _inputs(self) -> list[list[torch.Tensor]]:
        return [
            extension.inputs(self.presentation.local(index).to(self.device, non_blocking=True))
            for index, extension in enumerate(self._extensions)
        ]

    def _lay_out(self, inputs: list[torch.Tensor]) -> torch.Tensor:
        """Copy this rank's inputs to their place in the buffer of the all-gather; returns the buffer."""
        dtypes = {tensor.dtype for tensor in inputs}
        dtype = dtypes.pop() if len(dtypes) == 1 else torch.uint8
        self._make_outputs(inputs)
        inputs = [tensor.view(dtype) for tensor in inputs]
        self._sizes = [tensor.numel() for tensor in inputs]
        gathered = self._take_bytes(sum(self._sizes) * self.layout.world_size, dtype)
        start = self.layout.rank * sum(self._sizes)
        own = gathered[start : start + sum(self._sizes)]
        foreach_copy_(list(own.split(self._sizes)), inputs)
        return gathered

    def _take_bytes(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        streams, buffer = self.context.streams, self._bytes
        stream = streams.all_gather if self.gathers else streams.compute
        if buffer is not None and buffer.tensor.numel() == numel and buffer.tensor.dtype == dtype:
            self.context.handover.reclaim(buffer)
            buffer.take()
        else:
            buffer = self._bytes = make_buffer(numel, dtype, self.device, stream, self.custom_gather)
        return buffer.tensor

    def use_all_gather(self, custom: AllGather | None) -> None:
        """Gather with ``custom`` from now on; see ``Unit.use_all_gather``."""
        super().use_all_gather(custom)
        self._bytes = None

    def _make_outputs(self, inputs: list[torch.Tensor]) -> None:
        """Buffers for the outputs, at the first time; whoever computes allocates their memory later."""
        if self._outputs:
            return
        rest, stream = iter(inputs), self.context.streams.compute
        for extension in self._extensions:
            own = [next(rest) for _ in extension.shapes]
            buffers = [
                FlatBuffer(tensor.numel() * self.layout.world_size, tensor.dtype, self.device, stream)
                for tensor in own
            ]
            for buffer in buffers:
                buffer.free()
            self._outputs.append(buffers)

    # -- unshard ---------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _copy_out_parameters(self, hold: int) -> None:
        runtime = self.context
        if hold:
            runtime.handover.trim()
        if not self.gathers:
            self._lay_out([tensor for inputs in self._inputs() for tensor in inputs])
        assert self._bytes is not None
        for buffers in self._outputs:
            for buffer in buffers:
                buffer.take()
        self._copy_outputs(self._bytes.tensor.view(self.layout.world_size, -1))
        runtime.handover.release(self._bytes, runtime.streams.compute, hold)
        for extension in self._extensions:
            for tensor in extension.inner:
                storage = tensor.untyped_storage()
                if storage.size() == 0:
                    storage.resize_(tensor.numel() * tensor.itemsize)
        if self.unsharded:
            for index, parameter in enumerate(self.unsharded):
                self._unshard(index, parameter)

    def _copy_outputs(self, rows: torch.Tensor) -> None:
        targets: list[torch.Tensor] = []
        parts: list[torch.Tensor] = []
        columns = iter(rows.split(self._sizes, dim=1))
        for extension, buffers in zip(self._extensions, self._outputs, strict=True):
            for index, buffer in enumerate(buffers):
                # The outputs are seen as bytes where the row is: a part of that may lie at any byte.
                whole, part = buffer.tensor.view(self.layout.world_size, -1).view(rows.dtype), next(columns)
                if extension.interleaves(index):
                    pieces, size = extension.segment.blocks
                    whole = buffer.tensor.view(pieces, -1, size).view(rows.dtype).transpose(0, 1)
                    part = part.unflatten(1, (pieces, -1))
                targets.append(whole)
                parts.append(part)
        foreach_copy_(targets, parts)

    def _unshard(self, index: int, unsharded: torch.Tensor | None) -> torch.Tensor:
        # `.data`, so that the next gather's writes are none to autograd (see the head of `unit.py`).
        outputs = [buffer.tensor.data for buffer in self._outputs[index]]
        local, extension = self.presentation.local(index), self._extensions[index]
        # What pre_all_gather made on the stream of gathers is used here, and dropped.
        map_tensors(self._keep_for_computation, extension.metadata)
        return extension.unshard(local, outputs, unsharded)

    def _keep_for_computation(self, tensor: torch.Tensor) -> torch.Tensor:
        self.context.streams.compute.keep(tensor)
        return tensor

    @torch.inference_mode(False)
    @torch.no_grad()
    def _make_parameters(self) -> None:
        for index, parameter in enumerate(self.parameters):
            tensor = self._unshard(index, None)
            if parameter.whole is not None:
                tensor = parameter.whole.unsharded(tensor)
            self.unsharded.append(nn.Parameter(tensor, requires_grad=parameter.requires_grad))
        self.presentation.adopt_unsharded(self.unsharded)

    # -- reshard ---------------------------------------------------------------------------------------------

    def _free_parameters(self, hold: int) -> None:
        for buffers in self._outputs:
            for buffer in buffers:
                buffer.free()
        for extension in self._extensions:
            for tensor in extension.inner:
                tensor.untyped_storage().resize_(0)
        if self.gathers:
            self.context.limiter.freed(self.context.streams.compute)

    def _abandon(self) -> None:
        if self.gathers:
            self._finish_gather()
            assert self._bytes is not None
            self.context.handover.release(self._bytes, self.context.streams.compute)
