"""torch.sim.Stream and torch.sim.Event behave as torch.cuda's."""

from __future__ import annotations

import threading

import pytest
import torch

pytestmark = pytest.mark.simulated


def big_kernel() -> None:
    """About 0.2 ms on the current stream."""
    a = torch.empty(4096, 4096, device="sim", dtype=torch.bfloat16)
    torch.mm(a, a)


def test_operators_return_before_the_device_has_done_them() -> None:
    from device_training import start

    sim = start()
    began = sim.cpu_ns()
    for _ in range(10):
        big_kernel()
    issued = sim.cpu_ns() - began
    sim.synchronize()
    assert sim.cpu_ns() - began > 5 * issued


def test_streams_run_beside_each_other_and_share_the_gpu() -> None:
    from device_training import start

    sim = start()

    def duration(streams: list[torch.Stream]) -> int:
        sim.synchronize()
        began = sim.cpu_ns()
        for stream in streams:
            with torch.sim.stream(stream):
                for _ in range(8):
                    big_kernel()
        sim.synchronize()
        return sim.cpu_ns() - began

    one, other = torch.sim.Stream(), torch.sim.Stream()
    duration([one, other])  # each stream takes memory of its own from the driver
    share = sim.profile.contention.kernel_share
    assert 0 < share < 1
    assert duration([one, other]) == pytest.approx((1 + share) / 2 * duration([one, one]), rel=0.02)


def test_waiting_streams_wait() -> None:
    from device_training import start

    sim = start()
    side = torch.sim.Stream()
    for _ in range(8):
        big_kernel()
    side.wait_stream(torch.sim.current_stream())
    with torch.sim.stream(side):
        event = torch.sim.Event()
        event.record()
    assert not event.query()
    assert not torch.sim.current_stream().query()
    event.synchronize()
    assert torch.sim.current_stream().query()
    before = sim.cpu_ns()
    sim.synchronize()
    assert sim.cpu_ns() - before < 100_000, "nothing was left to wait for"


def test_current_stream_nests() -> None:
    from device_training import start

    start()
    first, second = torch.sim.Stream(), torch.sim.Stream(priority=-1)
    default = torch.sim.default_stream()
    assert torch.sim.current_stream() is default
    with torch.sim.stream(first):
        assert torch.sim.current_stream() is first
        with second, torch.sim.stream(None):
            assert torch.sim.current_stream() is second
        assert torch.sim.current_stream() == first
    assert torch.sim.current_stream() is default
    torch.sim.set_stream(second)
    assert torch.accelerator.current_stream() is second
    assert len({first, second, default}) == 3


def test_events_measure_time() -> None:
    from device_training import start

    sim = start()
    begin, end = torch.sim.Event(enable_timing=True), torch.sim.Event(enable_timing=True)
    begin.record()
    big_kernel()
    end.record()
    with pytest.raises(RuntimeError, match="synchronize first"):
        begin.elapsed_time(end)
    sim.synchronize()
    assert 0.1 < begin.elapsed_time(end) < 5.0
    with pytest.raises(RuntimeError, match="enable_timing"):
        torch.sim.Event().elapsed_time(end)


def test_unrecorded_events_have_passed() -> None:
    from device_training import start

    start()
    event = torch.sim.Event()
    assert event.query()
    event.wait()
    event.synchronize()


def test_item_waits_for_the_device_and_answers_zero() -> None:
    from device_training import start

    sim = start()
    total = torch.ones(4, device="sim").sum()
    for _ in range(8):
        big_kernel()
    before = sim.cpu_ns()
    assert total.item() == 0.0
    assert sim.cpu_ns() - before > 1_000_000
    assert float(total) == 0.0
    assert not bool(total > 0)
    assert torch.ones(3, device="sim").tolist() == [0.0, 0.0, 0.0]
    assert torch.ones(3, device="sim", dtype=torch.int64).cpu().tolist() == [0, 0, 0]
    assert "size=(3,)" in repr(torch.ones(3, device="sim"))


def test_host_copies_take_the_link_s_time() -> None:
    from device_training import start

    sim = start()
    host = torch.empty(64 * 1024 * 1024, dtype=torch.uint8)
    began = sim.cpu_ns()
    host.to("sim")
    blocking = sim.cpu_ns() - began
    seconds = host.numel() / (sim.profile.host_link.gb_s * 1e9)
    assert blocking > seconds * 1e9
    began = sim.cpu_ns()
    host.pin_memory().to("sim", non_blocking=True)
    assert sim.cpu_ns() - began < blocking / 10


def test_each_thread_of_a_program_has_its_own_current_stream() -> None:
    """As in CUDA: a checkpoint's or a loader's thread does not move the training to its stream."""
    from device_training import start

    start()
    main, other = torch.sim.Stream(), torch.sim.Stream()
    entered, looked = threading.Event(), threading.Event()
    seen = []

    def beside() -> None:
        with torch.sim.stream(other):
            entered.set()
            looked.wait(10)
            seen.append(torch.sim.current_stream() == other)

    with torch.sim.stream(main):
        thread = threading.Thread(target=beside)
        thread.start()
        entered.wait(10)
        seen.append(torch.sim.current_stream() == main)
        looked.set()
        thread.join()
        seen.append(torch.sim.current_stream() == main)
    assert seen == [True, True, True]


def test_a_new_thread_does_not_begin_on_the_stream_of_one_that_ended() -> None:
    """Whose number it often has."""
    from device_training import start

    start()
    own, seen = torch.sim.current_stream(), []

    def work() -> None:
        seen.append(torch.sim.current_stream() == own)
        torch.sim.set_stream(torch.sim.Stream())

    for _ in range(3):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert seen == [True, True, True]
