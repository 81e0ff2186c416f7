"""Memory that is handed out again: the first use of the new owner must come after the last of the old one."""

from __future__ import annotations

import pytest
import torch

pytestmark = pytest.mark.simulated

SIZE = 1 << 20


def used_on_a_side_stream() -> tuple[torch.Tensor, torch.Stream]:
    side = torch.sim.Stream()
    tensor = torch.zeros(SIZE, device="sim")
    side.wait_stream(torch.sim.current_stream())
    with torch.sim.stream(side):
        tensor.mul_(2)
    return tensor, side


def test_freed_while_another_stream_uses_it() -> None:
    from sanitized import kinds, start

    sanitizer = start()
    tensor, _ = used_on_a_side_stream()
    where = tensor.data_ptr()
    del tensor
    again = torch.zeros(SIZE, device="sim")
    assert again.data_ptr() == where
    assert kinds(sanitizer) == ["use_after_free"]


def test_record_stream_keeps_it() -> None:
    from sanitized import kinds, start

    sanitizer = start()
    tensor, side = used_on_a_side_stream()
    tensor.record_stream(side)
    where = tensor.data_ptr()
    del tensor
    made = [torch.zeros(SIZE, device="sim") for _ in range(3)]
    from fsdpbench.sim.torch_device.accelerator import ACCELERATOR

    ACCELERATOR.timeline.cpu += 10**9  # now the allocator sees that the event has passed
    made += [torch.zeros(SIZE, device="sim") for _ in range(8)]
    assert where in [tensor.data_ptr() for tensor in made]
    assert kinds(sanitizer) == []


def test_record_stream_orders_that_block_alone() -> None:
    from sanitized import kinds, start

    from fsdpbench.sim.torch_device.accelerator import ACCELERATOR

    sanitizer = start()
    kept, side = used_on_a_side_stream()
    freed = torch.zeros(SIZE, device="sim")
    freed.record_stream(side)
    del freed
    ACCELERATOR.timeline.cpu += 10**9
    torch.zeros(SIZE, device="sim")
    kept.sum()
    assert kinds(sanitizer) == ["race"]


def test_handing_out_alone_is_no_use() -> None:
    """`empty` touches nothing: it is enough to wait before the first write."""
    from sanitized import kinds, start

    sanitizer = start()
    tensor, side = used_on_a_side_stream()
    del tensor
    again = torch.empty(SIZE, device="sim")
    torch.sim.current_stream().wait_stream(side)
    again.zero_()
    assert kinds(sanitizer) == []


def test_parts_of_a_block_that_was_freed() -> None:
    from sanitized import kinds, start

    sanitizer = start()
    side = torch.sim.Stream()
    tensor = torch.zeros(8 * SIZE, device="sim")
    side.wait_stream(torch.sim.current_stream())
    with torch.sim.stream(side):
        tensor[: 2 * SIZE].mul_(2)
    where = tensor.data_ptr()
    del tensor
    first, second = torch.empty(4 * SIZE, device="sim"), torch.empty(4 * SIZE, device="sim")
    assert (first.data_ptr(), second.data_ptr()) == (where, where + first.nbytes)
    second.zero_()
    first[2 * SIZE :].zero_()
    assert kinds(sanitizer) == []
    first[: 2 * SIZE].zero_()
    assert kinds(sanitizer) == ["use_after_free"]


def test_resized_storage_and_set() -> None:
    from sanitized import kinds, start

    sanitizer = start()
    tensor, _ = used_on_a_side_stream()
    tensor.untyped_storage().resize_(0)
    other = torch.empty(0, device="sim")
    other.set_(torch.empty(SIZE, device="sim"))
    other.zero_()
    assert kinds(sanitizer) == ["use_after_free"]


def test_a_new_owner_on_another_stream_than_it_was_allocated_on() -> None:
    from sanitized import kinds, start

    sanitizer = start()
    side = torch.sim.Stream()
    tensor = torch.zeros(SIZE, device="sim")
    del tensor
    again = torch.empty(SIZE, device="sim")
    with torch.sim.stream(side):
        again.zero_()
    assert kinds(sanitizer) == ["use_after_free"]


def test_dropped_works_keep_their_tensors() -> None:
    """As NCCL's: without `wait()` the tensors are held until the device has done the collective."""
    import torch.distributed as dist
    from sanitized import kinds, start

    sanitizer = start(with_group=True)
    tensor = torch.zeros(SIZE, device="sim")
    dist.all_reduce(tensor, async_op=True)
    where = tensor.data_ptr()
    del tensor
    again = torch.zeros(SIZE, device="sim")
    assert again.data_ptr() != where
    assert kinds(sanitizer) == []


def test_dropped_works_are_done_before_their_memory_is_handed_out() -> None:
    """The process group lets go of tensors only when it has seen the collective done."""
    import torch.distributed as dist
    from sanitized import kinds, start

    from fsdpbench.sim.torch_device.accelerator import ACCELERATOR

    sanitizer = start(with_group=True)
    tensor = torch.zeros(SIZE, device="sim")
    where = tensor.data_ptr()
    dist.all_reduce(tensor, async_op=True)
    del tensor
    ACCELERATOR.timeline.cpu += 10**9
    dist.all_reduce(torch.zeros(8, device="sim"), async_op=True).wait()
    again = torch.zeros(SIZE, device="sim")
    assert again.data_ptr() == where
    assert kinds(sanitizer) == []
