"""Pinned memory of the host: who reads or writes it before the copy is done."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.simulated

READS: dict[str, Callable[[torch.Tensor], Any]] = {
    "operator": lambda host: host.sum(),
    "item": lambda host: host[0].item(),
    "numpy": lambda host: host.numpy(),
    "tolist": lambda host: host.tolist(),
    "save": lambda host: torch.save({"x": [host]}, io.BytesIO()),
    "view": lambda host: host.view(2, -1)[1].clone(),
}


@pytest.mark.parametrize("read", list(READS))
def test_read_before_the_copy_is_done(read: str) -> None:
    from sanitized import kinds, matrix, start

    sanitizer = start()
    host = matrix().view(-1).to("cpu", non_blocking=True)
    assert host.is_pinned()
    READS[read](host)
    assert kinds(sanitizer) == ["read_before_ready"]


def test_read_after_the_copy_is_waited_for() -> None:
    from sanitized import kinds, matrix, start

    sanitizer = start()
    device = matrix()
    host = device.to("cpu", non_blocking=True)
    torch.sim.current_stream().synchronize()
    host.sum()
    event = torch.sim.Event()
    host.copy_(device, non_blocking=True)
    event.record()
    event.synchronize()
    host.sum()
    device.to("cpu").sum()
    assert kinds(sanitizer) == []


def test_pinned_memory_rewritten_while_it_is_copied() -> None:
    from sanitized import kinds, start

    sanitizer = start()
    host = torch.zeros(1024).pin_memory()
    assert host.is_pinned()
    host.to("sim", non_blocking=True)
    host.fill_(1)
    assert kinds(sanitizer) == ["read_before_ready"]


def test_copies_of_pageable_memory_hold_the_cpu() -> None:
    from sanitized import kinds, start

    sanitizer = start()
    host = torch.zeros(1 << 20)
    assert not host.is_pinned()
    host.to("sim", non_blocking=True)
    host.fill_(1)
    pinned = host.pin_memory()
    pinned.to("sim", non_blocking=True)
    host.fill_(2)  # the pinned copy is another memory
    assert kinds(sanitizer) == []


def test_activations_on_the_host() -> None:
    """Copied both ways on one stream: nothing reads on the CPU in between."""
    from sanitized import kinds, start

    sanitizer = start()
    hooks = torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: tensor.to("cpu", non_blocking=True), lambda host: host.to("sim", non_blocking=True)
    )
    layer = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 64)).to("sim")
    for _ in range(3):
        with hooks:
            loss = layer(torch.randn(8, 64, device="sim")).sum()
        loss.backward()
    assert kinds(sanitizer) == []


def test_a_buffer_used_in_turns() -> None:
    """Two buffers for three batches in flight."""
    from sanitized import kinds, start

    sanitizer = start()
    buffers, side = [torch.zeros(1024).pin_memory() for _ in range(2)], torch.sim.Stream()
    events = [torch.sim.Event(), torch.sim.Event()]
    for batch in range(4):
        host, event = buffers[batch % 2], events[batch % 2]
        event.synchronize()
        host.fill_(batch)
        with torch.sim.stream(side):
            host.to("sim", non_blocking=True)
            event.record()
    assert kinds(sanitizer) == []
    buffers[0].fill_(5)
    assert kinds(sanitizer) == ["read_before_ready"]


def test_freed_host_memory_is_forgotten() -> None:
    from sanitized import kinds, matrix, start

    sanitizer = start()
    device = matrix()
    for _ in range(4):
        host = device.to("cpu", non_blocking=True)
        del host  # torch's host allocator hands it out again only when the copy is done
        torch.ones(device.shape).sum()
    assert sanitizer.host_memory.is_empty
    assert kinds(sanitizer) == []
