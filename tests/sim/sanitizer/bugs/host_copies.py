"""Copies between host and device that run beside the CPU."""

from __future__ import annotations

import copy
import io
import pickle

import numpy as np
import torch
from seeded import bug


def started_copy() -> tuple[torch.Tensor, torch.cuda.Event]:
    """Values on their way to pinned memory, and the event behind them."""
    values = torch.randn(16, device="cuda")
    target = torch.empty(16, pin_memory=True)
    target.copy_(values, non_blocking=True)
    done = torch.cuda.Event()
    done.record()
    return target, done


@bug("read_before_ready", "synchronize")
def item_too_early(fixed: bool) -> None:
    loss, done = started_copy()  # first
    if fixed:
        done.synchronize()
    loss[0].item()  # second


@bug("read_before_ready", "synchronize")
def float_of_a_loss_too_early(fixed: bool) -> None:
    loss = torch.randn(8, device="cuda").mean()
    shown = loss.to("cpu", non_blocking=True)  # first
    if fixed:
        torch.cuda.current_stream().synchronize()
    float(shown)  # second


@bug("read_before_ready", "synchronize")
def numpy_too_early(fixed: bool) -> None:
    values, done = started_copy()  # first
    if fixed:
        done.synchronize()
    values.numpy()  # second


@bug("read_before_ready", "synchronize")
def tolist_too_early(fixed: bool) -> None:
    values, _ = started_copy()  # first
    if fixed:
        torch.cuda.synchronize()
    values.tolist()  # second


@bug("read_before_ready", "synchronize")
def sum_too_early(fixed: bool) -> None:
    values, done = started_copy()  # first
    if fixed:
        done.synchronize()
    values.sum()  # second


@bug("read_before_ready", "synchronize")
def saved_too_early(fixed: bool) -> None:
    values, done = started_copy()  # first
    if fixed:
        done.synchronize()
    torch.save({"model": {"weight": values}}, io.BytesIO())  # second


@bug("read_before_ready", "synchronize")
def printed_too_early(fixed: bool) -> None:
    values, done = started_copy()  # first
    if fixed:
        done.synchronize()
    str(values)  # second


@bug("read_before_ready", "synchronize")
def pinned_buffer_rewritten_too_early(fixed: bool) -> None:
    buffer = torch.empty(1024, pin_memory=True)
    for step in range(2):
        buffer.fill_(step)  # second
        batch = buffer.to("cuda", non_blocking=True)  # first
        batch.sum()
        if fixed:
            torch.cuda.current_stream().synchronize()


@bug("read_before_ready", "synchronize")
def three_batches_in_two_buffers(fixed: bool) -> None:
    side, main = torch.cuda.Stream(), torch.cuda.current_stream()
    buffers = [torch.empty(1024, pin_memory=True) for _ in range(2)]
    done = [torch.cuda.Event() for _ in buffers]
    for index in range(3):
        slot = index % 2
        if fixed:
            done[slot].synchronize()
        buffers[slot].copy_(torch.arange(1024.0))  # second
        with torch.cuda.stream(side):
            batch = buffers[slot].to("cuda", non_blocking=True)  # first
            done[slot].record()
        main.wait_stream(side)
        batch.record_stream(main)
        batch.sum()


@bug("read_before_ready", "synchronize")
def converted_on_its_way(fixed: bool) -> None:
    """A copy that runs beside the CPU converts on the GPU, so that it reads the pinned memory late."""
    buffer = torch.zeros(1024, pin_memory=True)
    batch = buffer.to("cuda", torch.bfloat16, non_blocking=True)  # first
    if fixed:
        torch.cuda.synchronize()
    buffer.fill_(1)  # second
    batch.sum()


@bug("read_before_ready", "synchronize")
def contiguous_slice_rewritten_too_early(fixed: bool) -> None:
    """Rows are copied as they are. Columns go through memory of their own, and may be rewritten at once."""
    buffer = torch.zeros(64, 64, pin_memory=True)
    part = buffer[:, :8] if fixed else buffer[:8]
    batch = part.to("cuda", non_blocking=True)  # first
    part.fill_(1)  # second
    batch.sum()


@bug("read_before_ready", "synchronize")
def foreach_copied_and_read(fixed: bool) -> None:
    values = list(torch.randn(2, 512, device="cuda").unbind())
    targets = [torch.empty(512, pin_memory=True) for _ in values]
    torch._foreach_copy_(targets, values, non_blocking=True)  # first
    if fixed:
        torch.cuda.synchronize()
    torch.stack(targets)  # second


@bug("read_before_ready", "synchronize")
def event_of_the_wrong_slot(fixed: bool) -> None:
    values = torch.randn(2, 512, device="cuda")
    targets = [torch.empty(512, pin_memory=True) for _ in range(2)]
    done = [torch.cuda.Event() for _ in targets]
    for slot in range(2):
        targets[slot].copy_(values[slot], non_blocking=True)  # first
        done[slot].record()
    done[1 if fixed else 0].synchronize()
    targets[1].max()  # second


@bug("read_before_ready", "synchronize")
def query_ignored(fixed: bool) -> None:
    values, done = started_copy()  # first
    ready = done.query()
    if fixed and not ready:
        done.synchronize()
    values.abs_()  # second


@bug("read_before_ready", "synchronize")
def numpy_array_taken_before_the_copy(fixed: bool) -> None:
    """The array is a window on pinned memory; the tensor is read again after the copy started."""
    target = torch.zeros(16, pin_memory=True)
    window = target.numpy()
    target.copy_(torch.randn(16, device="cuda"), non_blocking=True)  # first
    if fixed:
        torch.cuda.synchronize()
    bytes(target.untyped_storage())  # second
    assert window.shape == (16,)


@bug("read_before_ready", "synchronize")
def indexed_too_early(fixed: bool) -> None:
    values, done = started_copy()  # first
    if fixed:
        done.synchronize()
    [float(value) for value in values]  # second


@bug("read_before_ready", "synchronize")
def pickled_too_early(fixed: bool) -> None:
    values, done = started_copy()  # first
    if fixed:
        done.synchronize()
    pickle.dumps(values)  # second


@bug("read_before_ready", "synchronize")
def made_a_list_by_numpy_asarray(fixed: bool) -> None:
    values, done = started_copy()  # first
    if fixed:
        done.synchronize()
    np.asarray(values)  # second


@bug("read_before_ready", "synchronize")
def state_dict_copied_deeply_too_early(fixed: bool) -> None:
    values, done = started_copy()  # first
    if fixed:
        done.synchronize()
    copy.deepcopy({"weight": values})  # second


@bug("read_before_ready", "synchronize")
def decided_by_too_early(fixed: bool) -> None:
    """`found_inf` copied to the host, and asked before it is there."""
    found = torch.zeros(1, device="cuda")
    on_host = found.to("cpu", non_blocking=True)  # first
    if fixed:
        torch.cuda.synchronize()
    if on_host:  # second
        found.zero_()


@bug("race", "wait_stream")
def copied_and_waited_for_into_a_buffer_in_flight(fixed: bool) -> None:
    """The copy holds the CPU until it is done; it does not wait for the one before it on another stream."""
    main, side = torch.cuda.current_stream(), torch.cuda.Stream()
    held, values = torch.zeros(1024, pin_memory=True), torch.randn(1024, device="cuda")
    with torch.cuda.stream(side):
        batch = held.to("cuda", non_blocking=True)  # first
    if fixed:
        main.wait_stream(side)
    held.copy_(values)  # second
    main.wait_stream(side)
    batch.record_stream(main)


@bug("race", "wait_stream")
def two_streams_copy_to_one_slot(fixed: bool) -> None:
    main, side = torch.cuda.current_stream(), torch.cuda.Stream()
    slot, values = torch.zeros(1024, pin_memory=True), torch.randn(2, 1024, device="cuda")
    side.wait_stream(main)
    with torch.cuda.stream(side):
        slot.copy_(values[0], non_blocking=True)  # first
    if fixed:
        main.wait_stream(side)
    slot.copy_(values[1], non_blocking=True)  # second
