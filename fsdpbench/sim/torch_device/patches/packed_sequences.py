"""Lengths of packed sequences in the order of the batch, which is on the device and has no values there.

`pack_padded_sequence(enforce_sorted=False)` sorts lengths on the host and sends their order to the device;
`pad_packed_sequence` fetches it again. Here the order of the host is kept beside the one of the device.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.utils import rnn

from fsdpbench.sim.torch_device.operators.known_values import mark_as_placeholders
from fsdpbench.sim.torch_device.tensors import is_on_device
from fsdpbench.torch_internals import replace

_ORDER = "_sim_host_order"


def patch_packed_sequences() -> None:
    """Let both functions keep the order; once a process, before a script imports them."""
    replace(
        rnn,
        pack_padded_sequence=_packing(rnn.pack_padded_sequence),
        pad_packed_sequence=_padding(rnn.pad_packed_sequence),
    )


def _packing(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def pack_padded_sequence(sequence: torch.Tensor, lengths: Any, *args: Any, **kwargs: Any) -> Any:
        packed = original(sequence, lengths, *args, **kwargs)
        back = packed.unsorted_indices
        if back is not None and is_on_device(back):
            order = torch.as_tensor(lengths, dtype=torch.int64).sort(descending=True).indices
            setattr(back, _ORDER, rnn.invert_permutation(order))
        return packed

    return pack_padded_sequence


def _padding(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def pad_packed_sequence(sequence: Any, *args: Any, **kwargs: Any) -> Any:
        padded, lengths = original(sequence, *args, **kwargs)
        back = sequence.unsorted_indices
        if back is None or not is_on_device(back):
            return padded, lengths
        order = getattr(back, _ORDER, None)
        if order is None:  # made by hand, or moved since
            return padded, mark_as_placeholders(lengths)
        longest_first = (sequence.batch_sizes > torch.arange(len(order))[:, None]).sum(1)
        return padded, longest_first[order]

    return pad_packed_sequence
