"""Tensor subclasses that say what is gathered: ``fsdp_pre_all_gather`` and ``fsdp_post_all_gather``.

A parameter whose local tensor has these two methods (torch's protocol, used for instance to gather in 8 bits)
is not copied into a unit's flat shard. On every gather::

    sharded local tensor --pre--> inputs (any dtypes), metadata
                  inputs --all-gather--> outputs: all ranks' inputs one after another
       outputs, metadata --post--> the unsharded tensor, and the inner tensors that hold its memory

The first post makes the unsharded tensor; every later one is called with ``out=`` and fills that one again.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ..shared.layout import Segment

_PRE, _POST = "fsdp_pre_all_gather", "fsdp_post_all_gather"


def is_extended(local: torch.Tensor, fqn: str) -> bool:
    """Whether ``local`` brings its own way of being gathered.

    Raises:
        AssertionError: it has one of the two methods only.
    """
    pre, post = hasattr(local, _PRE), hasattr(local, _POST)
    if pre != post:
        raise AssertionError(
            f"Both {_PRE} and {_POST} should be defined if using all-gather extensions: "
            f"parameter '{fqn}', a {type(local).__name__}, has only {_PRE if pre else _POST}"
        )
    return pre


@dataclass
class Extension:
    """What is needed to gather one such parameter, and what its last gather left.

    ``padded`` is the shape that all ranks give alike; ``mesh`` the 1-D mesh that shards.
    """

    fqn: str
    mesh: DeviceMesh
    segment: Segment
    padded: tuple[int, ...]
    uneven: bool
    stride: tuple[int, ...]
    module: nn.Module
    policy: Any
    compute: torch.dtype
    metadata: Any = None
    shapes: list[torch.Size] = field(default_factory=list)
    inner: Sequence[torch.Tensor] = ()
    """Tensors whose memory the unsharded one lives in; they are freed and taken with the unit."""

    def inputs(self, local: torch.Tensor) -> list[torch.Tensor]:
        """What this rank gives to the all-gather, each 1-D and as large as on all other ranks."""
        method: Any = getattr(local, _PRE)
        count = len(inspect.signature(method).parameters)
        if count == 1:  # torch's first version of the protocol
            given, self.metadata = method(self.mesh)
        elif count == 5:
            size = torch.Size(self.segment.shape)
            given, self.metadata = method(self.mesh, size, self.stride, self.module, self.policy)
        else:
            raise AssertionError(
                f"{_PRE} of parameter '{self.fqn}' takes {count} arguments; expected "
                "(mesh) or (mesh, outer_size, outer_stride, module, mp_policy)"
            )
        if self.uneven:
            given = [self._pad(tensor, local) for tensor in given]
        self.shapes = [tensor.size() for tensor in given]
        return [tensor.reshape(-1) for tensor in given]

    def _pad(self, tensor: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
        if tensor.size() == self.padded:
            return tensor
        if tensor.size() != local.size():  # refused on all ranks, since some would give less than others
            raise AssertionError(
                f"parameter '{self.fqn}' of shape {self.segment.shape} does not divide by {self.mesh.size()} "
                f"ranks, so {_PRE} must return tensors of the padded shape {self.padded} (or of its own "
                f"tensor's shape), not {tuple(tensor.shape)}"
            )
        dim = self.segment.dim
        padded = tensor.new_zeros(self.padded)
        padded.narrow(dim, 0, tensor.size(dim)).copy_(tensor)
        return padded

    def interleaves(self, index: int) -> bool:
        """Whether the ranks' inputs ``index`` are beside each other on another dim than the first."""
        return self.segment.dim > 0 and self.shapes[index] == self.padded

    def unshard(
        self, local: torch.Tensor, outputs: Sequence[torch.Tensor], unsharded: torch.Tensor | None
    ) -> torch.Tensor:
        """Make the unsharded tensor of what was gathered (1-D each), or fill it again."""
        whole = tuple(self._shape(index, output) for index, output in enumerate(outputs))
        method: Any = getattr(local, _POST)
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
