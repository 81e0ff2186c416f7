"""What orders two accesses, and what does not, whatever the times of this run."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

pytestmark = pytest.mark.simulated


def write_then_read(order: Callable[[torch.Stream, torch.Stream], None]) -> list[str]:
    """One stream writes, ``order(writer, reader)`` is asked for, another stream reads."""
    from sanitized import kinds, matrix, start

    sanitizer = start()
    shared, writer, reader = matrix(), torch.sim.Stream(), torch.sim.Stream()
    with torch.sim.stream(writer):
        shared.add_(1)
    order(writer, reader)
    with torch.sim.stream(reader):
        shared.sum()
    return kinds(sanitizer)


def test_nothing_orders() -> None:
    assert write_then_read(lambda writer, reader: None) == ["race"]


def test_a_stream_that_waits_for_another_one() -> None:
    assert write_then_read(lambda writer, reader: reader.wait_stream(writer)) == []


def test_waiting_the_wrong_way_round() -> None:
    assert write_then_read(lambda writer, reader: writer.wait_stream(reader)) == ["race"]


def test_an_event_after_the_write() -> None:
    assert write_then_read(lambda writer, reader: reader.wait_event(writer.record_event())) == []


def test_an_event_on_another_stream() -> None:
    def order(writer: torch.Stream, reader: torch.Stream) -> None:
        reader.wait_event(torch.sim.Stream().record_event())

    assert write_then_read(order) == ["race"]


def test_the_cpu_between_two_streams() -> None:
    assert write_then_read(lambda writer, reader: writer.synchronize()) == []
    assert write_then_read(lambda writer, reader: torch.sim.synchronize()) == []
    assert write_then_read(lambda writer, reader: reader.synchronize()) == ["race"]


def test_a_query_orders_if_it_says_yes() -> None:
    def asks_until_it_is_done(writer: torch.Stream, reader: torch.Stream) -> None:
        event = writer.record_event()
        while not event.query():
            pass

    def asks_once(writer: torch.Stream, reader: torch.Stream) -> None:
        with torch.sim.stream(writer):
            torch.mm(torch.empty(4096, 4096, device="sim"), torch.empty(4096, 4096, device="sim"))
        assert not writer.record_event().query()

    assert write_then_read(asks_until_it_is_done) == []
    assert write_then_read(asks_once) == ["race"]


def test_order_is_passed_on_by_a_third_stream() -> None:
    def order(writer: torch.Stream, reader: torch.Stream) -> None:
        between = torch.sim.Stream()
        between.wait_stream(writer)
        reader.wait_stream(between)

    assert write_then_read(order) == []


def test_that_the_first_stream_is_done_by_then_orders_nothing() -> None:
    def order(writer: torch.Stream, reader: torch.Stream) -> None:
        from fsdpbench.sim.torch_device.accelerator import ACCELERATOR

        ACCELERATOR.timeline.cpu += 10**9

    assert write_then_read(order) == ["race"]


def test_turns_of_a_communicator_order_nothing() -> None:
    """NCCL runs one communicator's kernels one after another; that is no promise to the program."""
    import torch.distributed as dist
    from sanitized import kinds, matrix, start

    sanitizer = start(with_group=True)
    shared, side = matrix(), torch.sim.Stream()
    dist.all_reduce(shared)
    with torch.sim.stream(side):
        dist.all_reduce(shared)
    assert kinds(sanitizer) == ["race"]


def test_a_full_launch_queue_orders_nothing() -> None:
    from sanitized import kinds, matrix, start

    sanitizer = start()
    shared, side, other = matrix(), torch.sim.Stream(), matrix()
    with torch.sim.stream(side):
        shared.add_(1)
        for _ in range(3000):
            other.add_(1)
    shared.sum()
    assert kinds(sanitizer) == ["race"]


def test_reads_do_not_conflict() -> None:
    from sanitized import kinds, matrix, start

    sanitizer = start()
    shared, side = matrix(), torch.sim.Stream()
    shared.sum()
    with torch.sim.stream(side):
        shared.sum()
    assert kinds(sanitizer) == []


def test_each_pair_of_places_is_told_once() -> None:
    from sanitized import start

    sanitizer = start()
    shared, side = torch.zeros(64, 64, device="sim"), torch.sim.Stream()
    side.wait_stream(torch.sim.current_stream())
    for _ in range(5):
        shared.add_(1)
        with torch.sim.stream(side):
            shared.sum()
    told = {
        (finding.first.operation.name, finding.second.operation.name): finding.count
        for finding in sanitizer.findings
    }
    assert told == {("aten::add_", "aten::sum"): 5, ("aten::sum", "aten::add_"): 4}
