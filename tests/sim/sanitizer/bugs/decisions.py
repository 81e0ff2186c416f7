"""Values that Python asks for on a stream that does not know of them, and libraries' own extensions."""

# Without postponed annotations: DDP reads those of its hook.

import torch
import torch.distributed as dist
from seeded import bug
from torch import nn
from torch.nn.parallel import DistributedDataParallel


@bug("race", "wait_stream")
def item_on_another_stream(fixed: bool) -> None:
    """`item` holds the CPU until the current stream has come, whoever computes the value."""
    main, side = torch.cuda.current_stream(), torch.cuda.Stream()
    x = torch.randn(1000, device="cuda")
    side.wait_stream(main)
    with torch.cuda.stream(side):
        norm = x.norm()  # first
    if fixed:
        main.wait_stream(side)
    norm.item()  # second
    main.wait_stream(side)


@bug("race", "wait_stream")
def compared_on_another_stream(fixed: bool) -> None:
    main, side = torch.cuda.current_stream(), torch.cuda.Stream()
    expected, x = torch.zeros(1000, device="cuda"), torch.randn(1000, device="cuda")
    side.wait_stream(main)
    with torch.cuda.stream(side):
        x.mul_(0)  # first
    if fixed:
        main.wait_stream(side)
    torch.equal(expected, x)  # second
    main.wait_stream(side)


@bug("race", "wait_stream")
def copied_to_the_host_on_another_stream(fixed: bool) -> None:
    main, side = torch.cuda.current_stream(), torch.cuda.Stream()
    x = torch.randn(1000, device="cuda")
    side.wait_stream(main)
    with torch.cuda.stream(side):
        x.mul_(2)  # first
    if fixed:
        side.synchronize()
    x.cpu()  # second


@bug("race", "wait_stream")
def scale_updated_beside_the_unscaling(fixed: bool) -> None:
    main, side = torch.cuda.current_stream(), torch.cuda.Stream()
    scale, growth = torch.ones(1, device="cuda"), torch.zeros(1, dtype=torch.int32, device="cuda")
    found, grads = torch.zeros(1, device="cuda"), [torch.randn(64, device="cuda")]
    side.wait_stream(main)
    with torch.cuda.stream(side):
        torch._amp_foreach_non_finite_check_and_unscale_(grads, found, scale.reciprocal())  # first
    if fixed:
        main.wait_stream(side)
    torch._amp_update_scale_(scale, growth, found, 2.0, 0.5, 100)  # second
    main.wait_stream(side)


@bug("race", "wait_stream")
def hook_of_ddp_that_compresses_on_a_side_stream(fixed: bool) -> None:
    side = torch.cuda.Stream()
    model = DistributedDataParallel(nn.Linear(64, 64).cuda())

    def hook(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        if fixed:
            side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            small = bucket.buffer().bfloat16()  # second
        torch.cuda.current_stream().wait_stream(side)
        small.record_stream(torch.cuda.current_stream())
        future = dist.all_reduce(small, async_op=True).get_future()
        return future.then(lambda done: bucket.buffer().copy_(done.value()[0]))

    model.register_comm_hook(None, hook)
    model(torch.randn(8, 64, device="cuda")).sum().backward()  # first


@bug("read_before_ready", "synchronize")
def host_optimizer_before_gradients_arrive(fixed: bool) -> None:
    """Parameters and gradients of the optimizer in pinned memory, as optimizer offload has them."""
    weight = torch.randn(64, 64, device="cuda", requires_grad=True)
    master = nn.Parameter(torch.zeros(64, 64, pin_memory=True))
    master.grad = torch.zeros(64, 64, pin_memory=True)
    optimizer = torch.optim.AdamW([master])
    weight.square().sum().backward()
    master.grad.copy_(weight.grad, non_blocking=True)  # first
    if fixed:
        torch.cuda.synchronize()
    optimizer.step()  # second
    weight.data.copy_(master.data, non_blocking=True)


@bug("read_before_ready", "synchronize")
def host_optimizer_writes_what_is_still_copied(fixed: bool) -> None:
    weight = torch.randn(64, 64, device="cuda")
    master = nn.Parameter(torch.zeros(64, 64, pin_memory=True))
    master.grad = torch.ones(64, 64)
    optimizer = torch.optim.SGD([master], lr=0.1)
    for _ in range(2):
        if fixed:
            torch.cuda.synchronize()
        optimizer.step()  # second
        weight.copy_(master.data, non_blocking=True)  # first
