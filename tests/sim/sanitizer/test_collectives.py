"""Collectives in flight: their inputs, their outputs, futures."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

pytestmark = pytest.mark.simulated


def test_output_used_without_wait() -> None:
    from sanitized import kinds, matrix, start

    sanitizer = start(with_group=True)
    shard, whole = matrix(), torch.empty(8 * 256, 256, device="sim")
    work = dist.all_gather_into_tensor(whole, shard, async_op=True)
    whole.sum()
    assert kinds(sanitizer) == ["read_before_ready"]
    (finding,) = sanitizer.findings
    assert finding.role == "all-gather output"
    assert "wait()" in finding.hint
    work.wait()
    whole.sum()
    assert len(sanitizer.findings) == 1


def test_input_changed_while_in_flight() -> None:
    from sanitized import kinds, matrix, start

    sanitizer = start(with_group=True)
    gradients, shard = torch.zeros(8 * 256, 256, device="sim"), matrix()
    work = dist.reduce_scatter_tensor(shard, gradients, async_op=True)
    gradients.sum()  # reading is no harm
    gradients.zero_()
    assert kinds(sanitizer) == ["read_before_ready"]
    work.wait()
    gradients.zero_()
    assert len(sanitizer.findings) == 1


def test_calls_that_are_not_asynchronous_need_no_wait() -> None:
    from sanitized import kinds, matrix, start

    sanitizer = start(with_group=True)
    tensor = matrix()
    dist.all_reduce(tensor)
    tensor.add_(1)
    dist.broadcast(tensor, 0)
    tensor.add_(1)
    assert kinds(sanitizer) == []


def test_waited_for_on_another_stream() -> None:
    from sanitized import kinds, matrix, start

    sanitizer = start(with_group=True)
    tensor, side = matrix(), torch.sim.Stream()
    work = dist.all_reduce(tensor, async_op=True)
    with torch.sim.stream(side):
        work.wait()
        tensor.add_(1)
    assert kinds(sanitizer) == []
    tensor.add_(1)
    assert kinds(sanitizer) == ["race"]


def test_callbacks_of_a_future_run_behind_the_collective() -> None:
    from sanitized import kinds, matrix, start

    sanitizer = start(with_group=True)
    tensor = matrix()
    future = dist.all_reduce(tensor, async_op=True).get_future().then(lambda done: done.value()[0].div_(8))
    result = future.wait()
    result.add_(1)
    assert kinds(sanitizer) == []


def test_a_future_that_is_not_waited_for() -> None:
    from sanitized import kinds, matrix, start

    sanitizer = start(with_group=True)
    tensor = matrix()
    dist.all_reduce(tensor, async_op=True).get_future().then(lambda done: done.value()[0].div_(8))
    tensor.add_(1)
    assert kinds(sanitizer)[-1:] == ["race"]


@pytest.mark.parametrize("hook", [None, "fp16_compress_hook", "allreduce_hook"])
def test_ddp_is_clean(hook: str | None) -> None:
    from sanitized import kinds, start
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    sanitizer = start(with_group=True)
    layers = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(4)]).to("sim")
    model = torch.nn.parallel.DistributedDataParallel(layers, bucket_cap_mb=1)
    if hook is not None:
        model.register_comm_hook(None, getattr(default_hooks, hook))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        with model.no_sync():
            model(torch.randn(4, 64, device="sim")).sum().backward()
        model(torch.randn(4, 64, device="sim")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert kinds(sanitizer) == []


def test_an_order_that_changes_between_like_steps_is_a_hint() -> None:
    from sanitized import matrix, start

    sanitizer = start(with_group=True)
    first, second = matrix(64), matrix(128)
    parameter = torch.nn.Parameter(torch.zeros(4, device="sim"))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    for order in ((first, second), (first, second), (second, first)):
        for tensor in order:
            dist.all_reduce(tensor)
        optimizer.step()
    hints = [hint for hint in sanitizer.to_dict()["hints"] if hint["kind"] == "collective_order"]
    assert len(hints) == 1
    assert "call 1 of the step is all_reduce of 16384 elements" in hints[0]["hint"]


def test_a_synchronisation_that_orders_nothing_is_a_hint() -> None:
    from sanitized import matrix, start

    sanitizer = start()
    tensor = matrix()
    for _ in range(3):
        tensor.add_(1)
        torch.sim.synchronize()
        torch.sim.synchronize()
    hints = [hint for hint in sanitizer.to_dict()["hints"] if hint["kind"] == "needless_synchronisation"]
    assert [hint["count"] for hint in hints] == [3]
