"""Activations moved to pinned memory in forward and brought back in backward."""

from __future__ import annotations

from typing import Any

import torch
from seeded import bug
from torch import nn
from torch.autograd.graph import saved_tensors_hooks


class Offload(saved_tensors_hooks):
    """Activation offload on a copy stream. Each flag is one thing that must not be left out."""

    def __init__(self, *, out_waits: bool = True, back_waits: bool = True, keeps: bool = True) -> None:
        self.stream = torch.cuda.Stream()
        self.out_waits, self.back_waits, self.keeps = out_waits, back_waits, keeps
        super().__init__(self.pack, self.unpack)

    def pack(self, tensor: torch.Tensor) -> Any:
        if isinstance(tensor, nn.Parameter) or tensor.numel() < 1024:
            return tensor
        if self.out_waits:
            self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            held = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            held.copy_(tensor, non_blocking=True)
        if self.keeps:
            tensor.record_stream(self.stream)
        return (held,)

    def unpack(self, packed: Any) -> torch.Tensor:
        if isinstance(packed, torch.Tensor):
            return packed
        with torch.cuda.stream(self.stream):
            tensor = packed[0].to("cuda", non_blocking=True)
        if self.back_waits:
            torch.cuda.current_stream().wait_stream(self.stream)
        tensor.record_stream(torch.cuda.current_stream())
        return tensor


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            x = self.down(torch.nn.functional.gelu(self.up(x)))
        return x


def train(offload: Offload) -> None:
    model = Mlp().cuda()
    with offload:
        loss = model(torch.randn(64, 64, device="cuda")).sum()
    loss.backward()


@bug("race", "wait_stream")
def copied_out_before_it_is_computed(fixed: bool) -> None:
    offload = Offload(out_waits=fixed)
    train(offload)  # first # second


@bug("race", "wait_stream")
def used_before_it_is_back(fixed: bool) -> None:
    offload = Offload(back_waits=fixed)
    train(offload)  # first # second


@bug("use_after_free", "record_stream")
def freed_while_it_is_copied_out(fixed: bool) -> None:
    offload = Offload(keeps=fixed)
    train(offload)  # first # second


@bug("race", "wait_stream")
def prefetched_into_a_buffer_in_use(fixed: bool) -> None:
    """Two layers' optimizer states go through one device buffer."""
    main, side = torch.cuda.current_stream(), torch.cuda.Stream()
    states = [torch.zeros(4096).pin_memory() for _ in range(3)]
    buffer, grad = torch.empty(4096, device="cuda"), torch.randn(4096, device="cuda")
    side.wait_stream(main)
    for state in states:
        if fixed:
            side.wait_stream(main)
        with torch.cuda.stream(side):
            buffer.copy_(state, non_blocking=True)  # second
        main.wait_stream(side)
        grad.addcmul_(buffer, buffer)  # first


@bug("race", "wait")
def brought_back_from_memory_that_is_still_filled(fixed: bool) -> None:
    """Out on one stream and in on another: pinned memory needs an order too."""
    main, out, back = torch.cuda.current_stream(), torch.cuda.Stream(), torch.cuda.Stream()
    state, held = torch.randn(4096, device="cuda"), torch.empty(4096, pin_memory=True)
    out.wait_stream(main)
    with torch.cuda.stream(out):
        held.copy_(state, non_blocking=True)  # first
    if fixed:
        back.wait_stream(out)
    with torch.cuda.stream(back):
        again = held.to("cuda", non_blocking=True)  # second
    main.wait_stream(back)
    main.wait_stream(out)
    again.record_stream(main)
    again.sum()
