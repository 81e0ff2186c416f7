"""Collectives that are not waited for, or whose memory is used for something else meanwhile."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from seeded import bug

GROUP = 8


@bug("read_before_ready", "wait()")
def all_reduce_not_waited_for(fixed: bool) -> None:
    grad = torch.randn(1024, device="cuda")
    work = dist.all_reduce(grad, async_op=True)  # first
    if fixed:
        work.wait()
    grad.div_(GROUP)  # second
    work.wait()


@bug("read_before_ready", "wait()")
def all_gather_output_read_early(fixed: bool) -> None:
    shard, full = torch.randn(128, device="cuda"), torch.empty(1024, device="cuda")
    work = dist.all_gather_into_tensor(full, shard, async_op=True)  # first
    if fixed:
        work.wait()
    full.view(32, 32).sum()  # second
    work.wait()


@bug("read_before_ready", "wait()")
def all_gather_list_read_early(fixed: bool) -> None:
    shard = torch.randn(128, device="cuda")
    parts = [torch.empty(128, device="cuda") for _ in range(GROUP)]
    work = dist.all_gather(parts, shard, async_op=True)  # first
    if fixed:
        work.wait()
    torch.cat(parts)  # second
    work.wait()


@bug("read_before_ready", "wait()")
def reduce_scatter_input_reused(fixed: bool) -> None:
    bucket, shard = torch.randn(1024, device="cuda"), torch.empty(128, device="cuda")
    work = dist.reduce_scatter_tensor(shard, bucket, async_op=True)  # first
    if fixed:
        work.wait()
    bucket.zero_()  # second
    work.wait()


@bug("read_before_ready", "wait()")
def bucket_rewritten_while_it_is_reduced(fixed: bool) -> None:
    grads = [torch.randn(256, device="cuda") for _ in range(8)]
    bucket, works = torch.empty(1024, device="cuda"), []
    for start in (0, 4):
        torch.cat(grads[start : start + 4], out=bucket)  # second
        works.append(dist.all_reduce(bucket, async_op=True))  # first
        if fixed:
            works[-1].wait()
        torch.split(bucket, 256)
    for work in works:
        work.wait()


@bug("read_before_ready", "wait()")
def waited_for_on_another_stream(fixed: bool) -> None:
    side = torch.cuda.Stream()
    grad = torch.randn(1024, device="cuda")
    work = dist.all_reduce(grad, async_op=True)  # first
    with torch.cuda.stream(side):
        work.wait()
    if fixed:
        torch.cuda.current_stream().wait_stream(side)
    grad.div_(GROUP)  # second


@bug("race", "wait_stream")
def synchronous_one_on_a_side_stream(fixed: bool) -> None:
    """Without `async_op` a collective runs on the current stream and holds nobody else."""
    main, side = torch.cuda.current_stream(), torch.cuda.Stream()
    grad = torch.randn(1024, device="cuda")
    side.wait_stream(main)
    with torch.cuda.stream(side):
        dist.all_reduce(grad)  # first
    if fixed:
        main.wait_stream(side)
    grad.norm()  # second
    main.wait_stream(side)


@bug("race", "wait_stream")
def outcome_of_then_not_waited_for(fixed: bool) -> None:
    """The callback divides on a stream of its own, behind the collective: the work's wait is too early."""
    grad = torch.randn(1024, device="cuda")
    work = dist.all_reduce(grad, async_op=True)

    def divide(future: Any) -> torch.Tensor:
        return grad.div_(GROUP)  # first

    divided = work.get_future().then(divide)
    if fixed:
        divided.wait()
    else:
        work.wait()
    grad.norm()  # second


@bug("read_before_ready", "wait()")
def two_groups_on_overlapping_buffers(fixed: bool) -> None:
    replicas = dist.new_group(list(range(0, GROUP, 2)))
    grads = torch.randn(1024, device="cuda")
    first = dist.all_reduce(grads[:640], async_op=True)  # first
    if fixed:
        first.wait()
    second = dist.all_reduce(grads[512:], group=replicas, async_op=True)  # second
    first.wait()
    second.wait()


@bug("read_before_ready", "wait()")
def hybrid_shards_reduced_before_they_are_scattered(fixed: bool) -> None:
    """Reduce-scatter among shards, then all-reduce among replicas: on the group's own streams."""
    shards, replicas = dist.new_group([0, 1, 2, 3]), dist.new_group([0, 4])
    bucket, shard = torch.randn(1024, device="cuda"), torch.empty(256, device="cuda")
    scattered = dist.reduce_scatter_tensor(shard, bucket, group=shards, async_op=True)  # first
    if fixed:
        scattered.wait()
    reduced = dist.all_reduce(shard, group=replicas, async_op=True)  # second
    scattered.wait()
    reduced.wait()


@bug("read_before_ready", "wait()")
def coalesced_and_not_waited_for(fixed: bool) -> None:
    grads = [torch.randn(256, device="cuda") for _ in range(3)]
    with dist._coalescing_manager(device=torch.device("cuda"), async_ops=True) as works:  # first
        for grad in grads:
            dist.all_reduce(grad)
    if fixed:
        works.wait()
    torch._foreach_div_(grads, GROUP)  # second
    works.wait()


@bug("read_before_ready", "wait()")
def broadcast_weights_used_at_once(fixed: bool) -> None:
    layer = torch.nn.Linear(32, 32).cuda()
    works = [dist.broadcast(p.data, 0, async_op=True) for p in layer.parameters()]  # first
    if fixed:
        for work in works:
            work.wait()
    layer(torch.randn(4, 32, device="cuda"))  # second
    for work in works:
        work.wait()


@bug("read_before_ready", "wait()")
def only_the_last_work_is_waited_for(fixed: bool) -> None:
    """Works of two groups: the last one's says nothing of the other group's."""
    other = dist.new_group(list(range(GROUP)))
    a, b = torch.randn(2, 512, device="cuda").unbind()
    first = dist.all_reduce(a, async_op=True)  # first
    second = dist.all_reduce(b, group=other, async_op=True)
    second.wait()
    if fixed:
        first.wait()
    a.add_(b)  # second
    first.wait()


@bug("race", "wait_stream")
def input_still_written_when_the_gather_starts(fixed: bool) -> None:
    """The all-gather waits for the stream that calls it, and for no other."""
    main, side = torch.cuda.current_stream(), torch.cuda.Stream()
    shard, full = torch.randn(128, device="cuda"), torch.empty(1024, device="cuda")
    side.wait_stream(main)
    with torch.cuda.stream(side):
        shard.mul_(0.5)  # first
    if fixed:
        main.wait_stream(side)
    dist.all_gather_into_tensor(full, shard, async_op=True).wait()  # second
    full.sum()


@bug("read_before_ready", "wait()")
def tokens_used_before_the_exchange_ends(fixed: bool) -> None:
    """Dispatch of a mixture of experts."""
    tokens = torch.randn(64, 32, device="cuda")
    received = torch.empty_like(tokens)
    work = dist.all_to_all_single(received, tokens, async_op=True)  # first
    if fixed:
        work.wait()
    expert = torch.randn(32, 32, device="cuda")
    received @ expert  # second
    work.wait()


@bug("read_before_ready", "wait()")
def functional_one_without_its_wait(fixed: bool) -> None:
    """The operator under the functional collectives; their own tensors wait when they are used."""
    x = torch.randn(64, device="cuda")
    reduced = torch.ops._c10d_functional.all_reduce(x, "sum", dist.group.WORLD.group_name)  # first
    if fixed:
        torch.ops._c10d_functional.wait_tensor(reduced)
    reduced.sum()  # second
    torch.ops._c10d_functional.wait_tensor(reduced)
