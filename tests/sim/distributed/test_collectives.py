"""The process group "sim": streams, order of a communicator, costs, and torch.distributed's many forms."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

pytestmark = pytest.mark.simulated
MIB = 1 << 20


def empty(mebibytes: float) -> torch.Tensor:
    """A bf16 tensor of so many MiB."""
    return torch.empty(int(mebibytes * MIB) // 2, device="sim", dtype=torch.bfloat16)


def device_time(action: object, *args: object, **kwargs: object) -> int:
    """Nanoseconds from an idle device to an idle device."""
    torch.sim.synchronize()
    begin, end = torch.sim.Event(enable_timing=True), torch.sim.Event(enable_timing=True)
    begin.record()
    action(*args, **kwargs)  # type: ignore[operator]
    torch.sim.synchronize()
    end.record()
    torch.sim.synchronize()
    return round(begin.elapsed_time(end) * 1e6)


def test_synchronous_collectives_run_on_the_current_stream() -> None:
    """The CPU goes on; what the stream does next comes after the collective."""
    from device_training import start

    sim = start()
    full, shard = empty(512), empty(64)
    before = sim.cpu_ns()
    dist.all_gather_into_tensor(full, shard)
    issued = sim.cpu_ns() - before
    event = torch.sim.current_stream().record_event()
    assert not event.query()
    event.synchronize()
    assert sim.cpu_ns() - before > 5 * issued


def test_asynchronous_collectives_leave_the_current_stream_free() -> None:
    from device_training import start

    start()
    full, shard = empty(512), empty(64)
    work = dist.all_gather_into_tensor(full, shard, async_op=True)
    free = torch.sim.current_stream().record_event()
    free.synchronize()
    assert not work.is_completed()
    work.wait()
    behind = torch.sim.current_stream().record_event()
    behind.synchronize()
    assert work.is_completed()


def test_an_asynchronous_collective_waits_for_its_input() -> None:
    from device_training import start

    sim = start()
    full, shard = empty(8), empty(1)
    a = torch.empty(8192, 8192, device="sim", dtype=torch.bfloat16)
    for _ in range(4):
        torch.mm(a, a)
    ready = torch.sim.current_stream().record_event()
    work = dist.all_gather_into_tensor(full, shard, async_op=True)
    ready.synchronize()
    assert not work.is_completed()
    sim.synchronize()
    assert work.is_completed()


def test_one_communicator_serialises_and_two_do_not() -> None:
    from device_training import start

    start()
    first, second = dist.new_group(list(range(8))), dist.new_group(list(range(8)))
    full, shard = empty(512), empty(64)
    one, other = torch.sim.Stream(), torch.sim.Stream()

    def both(groups: list[dist.ProcessGroup]) -> None:
        for stream, group in zip((one, other), groups, strict=True):
            with torch.sim.stream(stream):
                dist.all_gather_into_tensor(full, shard, group=group)

    alone = device_time(both, [first, first])
    assert device_time(both, [first, second]) < 0.7 * alone


def test_works_hold_their_tensors_until_waited_for() -> None:
    from device_training import start

    start()
    shard = empty(64)
    before = torch.sim.memory_allocated()
    work = dist.all_gather_into_tensor(empty(512), shard, async_op=True)
    assert torch.sim.memory_allocated() == before + 512 * MIB
    work.wait()
    assert torch.sim.memory_allocated() == before


def test_before_2_8_collectives_leave_the_current_stream_and_record_their_tensors() -> None:
    from device_training import start

    from fsdpbench.sim.torch_device.accelerator import ACCELERATOR

    sim = start()
    ACCELERATOR.collectives_on_own_streams = True
    # The caller's copy is let go of at once: its memory is taken until the reduction has read it.
    dist.reduce_scatter_tensor(empty(64), empty(512).clone())
    held = torch.sim.memory_stats()
    assert held["allocated_bytes.all.current"] == 0
    assert held["active_bytes.all.current"] == (512 + 64) * MIB
    assert [group._lane.stream is None for group in ACCELERATOR.process_groups] == [False]
    sim.synchronize()
    empty(1)
    assert torch.sim.memory_stats()["active_bytes.all.current"] == 0


def test_uneven_lists_cost_more_than_one_tensor() -> None:
    """Fig 2a of the FSDP paper: one broadcast a rank instead of a ring."""
    from device_training import start

    start(64)
    uneven = [empty(7 + 2 * (i % 2)) for i in range(64)]
    into_one = device_time(dist.all_gather_into_tensor, empty(512), empty(8))
    assert 1.08 < device_time(dist.all_gather, uneven, uneven[0]) / into_one < 1.15


def test_costs_are_the_network_s() -> None:
    from device_training import start

    from fsdpbench.sim.model.network import Network

    sim = start(64)
    network = Network(sim.profile, 64, 8)
    inside = dist.new_group(list(range(8)))
    across = dist.new_group(list(range(0, 64, 8)))
    full, shard = empty(256), empty(32)
    for group, ranks in ((inside, range(8)), (across, range(0, 64, 8))):
        expected = network.collective_ns("all_gather", 256 * MIB, ranks)
        measured = device_time(dist.all_gather_into_tensor, full, shard, group=group)
        assert abs(measured - expected) < 200_000, (measured, expected)
    assert sim.accelerator.between_nodes_ns == expected  # of the second alone
    assert 0 < (sim.accelerator.between_nodes_since or 0) < sim.cpu_ns()
    assert network.collective_ns("all_gather", 256 * MIB, range(8)) < network.collective_ns(
        "all_gather", 256 * MIB, range(0, 64, 8)
    )


def test_every_form_runs() -> None:
    from device_training import start

    sim = start()
    full, shard = empty(8), empty(1)
    parts = [empty(1) for _ in range(8)]
    uneven = [torch.empty(10 + i, device="sim") for i in range(8)]
    works = [
        dist.all_gather_into_tensor(full, shard, async_op=True),
        dist.reduce_scatter_tensor(shard, full, async_op=True),
        dist.all_reduce(full, async_op=True),
        dist.all_reduce(full, op=dist.ReduceOp.AVG, async_op=True),
        dist.broadcast(full, src=0, async_op=True),
        dist.reduce(full, dst=0, async_op=True),
        dist.all_gather(parts, shard, async_op=True),
        dist.all_gather(uneven, uneven[0], async_op=True),
        dist.reduce_scatter(shard, parts, async_op=True),
        dist.all_to_all_single(full, full.clone(), async_op=True),
        dist.all_to_all(parts, [part.clone() for part in parts], async_op=True),
        dist.gather(shard, parts, dst=0, async_op=True),
        dist.scatter(shard, parts, src=0, async_op=True),
        dist.barrier(async_op=True),
    ]
    for work in works:
        work.wait()
    sim.synchronize()
    assert all(work.is_completed() for work in works)
    dist.barrier()
    gathered: list[object] = [None] * 8
    dist.all_gather_object(gathered, {"rank": 0})
    assert gathered == [{"rank": 0}] * 8


def test_coalesced_collectives_are_one() -> None:
    from device_training import start

    start()
    fulls, shards = [empty(64) for _ in range(4)], [empty(8) for _ in range(4)]

    def separate() -> None:
        for full, shard in zip(fulls, shards, strict=True):
            dist.all_gather_into_tensor(full, shard)

    def coalesced() -> None:
        with dist._coalescing_manager():
            separate()

    def coalesced_old() -> None:
        with dist._coalescing_manager(device=torch.device("sim", 0)):
            for full in fulls:
                dist.broadcast(full, src=0)

    assert device_time(coalesced) < device_time(separate)
    assert device_time(coalesced_old) > 100_000


def test_functional_collectives_run() -> None:
    import torch.distributed._functional_collectives as functional
    from device_training import start

    start()
    shard = torch.ones(128, device="sim")
    assert functional.all_gather_tensor(shard, 0, dist.group.WORLD).shape == (1024,)
    assert functional.reduce_scatter_tensor(shard, "sum", 0, dist.group.WORLD).shape == (16,)
    assert functional.all_reduce(shard, "sum", dist.group.WORLD).shape == (128,)


def test_point_to_point_is_refused() -> None:
    from device_training import start

    start()
    with pytest.raises(NotImplementedError, match="send and recv are not simulated"):
        dist.send(torch.ones(1, device="sim"), 1)


def exchange(*messages: tuple[str, int, int]) -> list[dist.Work]:
    """Send and receive in one batch: ("send" or "recv", the other rank, bytes)."""
    group = dist.group.WORLD
    group._start_coalescing(None)
    for kind, other, nbytes in messages:
        getattr(group, kind)([torch.empty(nbytes, dtype=torch.uint8, device="sim")], other)
    return [group._end_coalescing(None)]


def test_neighbours_exchange_in_a_ring() -> None:
    """Each rank sends to the next one: as long as its bytes take over NVLink, or over one GPU's NIC."""
    from device_training import start

    sim = start(16)
    (work,) = exchange(("send", 1, 64 * MIB), ("recv", 15, 64 * MIB))
    before = torch.sim.Event(enable_timing=True)
    before.record()
    work.wait()
    torch.sim.synchronize()
    network, ranks = sim.accelerator.network, range(16)
    across = network.collective_ns("send_recv", 64 * MIB, ranks)
    nic = sim.profile.nic.gb_s_per_node * sim.profile.nic.efficiency / sim.profile.gpus_per_node
    assert 64 * MIB / nic <= across < 64 * MIB / nic * 1.2
    inside = network.collective_ns("send_recv", 64 * MIB, range(8))
    assert 64 * MIB / sim.profile.nvlink.peak_gb_s < inside < across
    assert network.collective_ns("send_recv", 128 * MIB, range(8)) > 1.8 * inside
    exchange(("recv", 1, 8), ("send", 15, 8), ("send", 1, 16), ("recv", 15, 16))  # both ways at once
    exchange(("send", 5, 8), ("recv", 5, 8))  # in pairs


@pytest.mark.parametrize(
    "messages",
    [
        [("send", 1, 8)],
        [("recv", 7, 8)],
        [("send", 1, 8), ("recv", 7, 16)],
        [("send", 1, 8), ("recv", 6, 8)],
        [("send", 1, 8), ("send", 2, 8), ("recv", 7, 8)],
    ],
    ids=str,
)
def test_exchanges_that_ranks_cannot_make_alike_are_refused(messages: list[tuple[str, int, int]]) -> None:
    from device_training import start

    start()
    with pytest.raises(NotImplementedError, match="rings by batch_isend_irecv do run"):
        exchange(*messages)


def test_list_forms_pay_for_a_copy() -> None:
    """NCCL gathers into one flat buffer, and copies it into the list."""
    from device_training import start

    from fsdpbench.sim.model.kernel_costs import KernelCosts

    sim = start()
    full, shard = empty(512), empty(64)
    parts = [empty(64) for _ in range(8)]
    dist.all_gather(parts, shard)  # the buffer's memory comes from the driver once
    torch.sim.synchronize()
    extra = device_time(dist.all_gather, parts, shard) - device_time(dist.all_gather_into_tensor, full, shard)
    copy = KernelCosts(sim.profile).memory_bound_ns(2 * 512 * MIB, "copy")
    assert abs(extra - copy) < 100_000, (extra, copy)
