"""The timeline: what starts when, checked by hand, against plain recurrences, and for conserved work."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdpbench.sim.model.timeline import LAUNCH_QUEUE_DEPTH, UNSETTLED, Contention, Marker, Timeline, Work

Spans = dict[Any, tuple[int, int, int]]


def observed(contention: Contention | None = None, streams: int = 3) -> tuple[Timeline, Spans]:
    """A timeline and what it reports: payload -> (stream, start, end)."""
    spans: Spans = {}

    def note(stream: int, payload: Any, start: int, end: int) -> None:
        assert payload not in spans
        spans[payload] = (stream, start, end)

    timeline = Timeline(contention, note)
    for _ in range(streams):
        timeline.add_stream()
    return timeline, spans


def test_kernels_of_a_stream_follow_each_other() -> None:
    timeline, spans = observed()
    timeline.launch(0, Work.COMPUTE, 100, "a")
    timeline.cpu = 10
    timeline.launch(0, Work.COMPUTE, 50, "b")
    timeline.cpu = 500
    timeline.launch(0, Work.COMPUTE, 5, "c")
    timeline.wait_for_all()
    assert spans == {"a": (0, 0, 100), "b": (0, 100, 150), "c": (0, 500, 505)}
    assert timeline.cpu == 505


def test_streams_overlap_and_events_order_them() -> None:
    timeline, spans = observed()
    timeline.launch(0, Work.COMPUTE, 100, "a")
    done = timeline.record(0)
    timeline.launch(1, Work.COPY, 30, "beside")
    timeline.make_wait(1, done)
    timeline.launch(1, Work.COPY, 30, "behind")
    timeline.wait_for_stream(1)
    assert spans["beside"] == (1, 0, 30)
    assert spans["behind"] == (1, 100, 130)
    assert timeline.cpu == 130


def test_events_pass_when_the_cpu_gets_there() -> None:
    timeline, _ = observed()
    timeline.launch(0, Work.COMPUTE, 100)
    event = timeline.record(0)
    assert not timeline.has_passed(event)
    timeline.cpu = 99
    assert not timeline.has_passed(event)
    assert not timeline.is_idle(0)
    timeline.cpu = 100
    assert timeline.has_passed(event)
    assert timeline.is_idle(0)


def test_waiting_for_an_event_moves_the_cpu_no_further() -> None:
    timeline, spans = observed()
    timeline.launch(0, Work.COMPUTE, 100, "a")
    event = timeline.record(0)
    timeline.launch(0, Work.COMPUTE, 1000, "b")
    timeline.wait_for(event)
    assert timeline.cpu == 100
    assert "b" not in spans


def test_a_mark_recorded_late_is_not_passed_early() -> None:
    timeline, _ = observed()
    timeline.launch(0, Work.COMPUTE, 10)
    timeline.cpu = 200
    event = timeline.record(0)
    timeline.wait_for(event)
    assert event.time == 200


def test_a_collective_slows_kernels_launched_before_it() -> None:
    """200 ns beside 100 ns at 1.5 and 1.25: the collective takes 125 ns, when 125/1.5 = 83 ns are done."""
    timeline, spans = observed(Contention(1500, 1250))
    timeline.launch(0, Work.COMPUTE, 200, "compute")
    timeline.launch(1, Work.COLLECTIVE, 100, "gather")
    timeline.wait_for_all()
    assert spans["gather"] == (1, 0, 125)
    assert spans["compute"][2] == 125 + (300 - 125) * 1000 // 1500


def test_a_collective_slows_kernels_by_its_traffic() -> None:
    """At two fifths of the traffic 1.5 becomes 1.2; collectives at once add up, to full traffic at most."""
    timeline, spans = observed(Contention(1500, 1000), streams=4)
    timeline.launch(0, Work.COMPUTE, 200, "compute")
    timeline.launch(1, Work.COLLECTIVE, 120, "gather", traffic=400)
    timeline.wait_for_all()
    assert spans["compute"] == (0, 0, 120 + (200 - 100))
    began = timeline.cpu
    timeline.launch(0, Work.COMPUTE, 200, "beside two")
    timeline.launch(1, Work.COLLECTIVE, 140, "first", traffic=400)
    timeline.launch(2, Work.COLLECTIVE, 140, "second", traffic=400)
    timeline.wait_for_all()
    assert spans["beside two"] == (0, began, began + 140 + (200 - 100))
    timeline.launch(0, Work.COMPUTE, 200, "beside three")
    began = timeline.cpu
    for stream, name in ((1, "a"), (2, "b"), (3, "c")):
        timeline.launch(stream, Work.COLLECTIVE, 150, name, traffic=400)
    timeline.wait_for_all()
    assert spans["beside three"] == (0, began, began + 150 + (200 - 100))


def test_kernels_of_several_streams_share_the_gpu() -> None:
    """Two at once take twice as long; no work is won or lost, whichever began first."""
    timeline, spans = observed(Contention(beside_permille=1000))
    timeline.launch(0, Work.COMPUTE, 200, "long")
    timeline.cpu = 50
    timeline.launch(1, Work.COMPUTE, 30, "short")
    timeline.launch(1, Work.COMPUTE, 10, "next")
    timeline.wait_for_all()
    assert spans == {"short": (1, 50, 110), "next": (1, 110, 130), "long": (0, 0, 240)}
    timeline.launch(2, Work.COMPUTE, 10, "alone")
    timeline.wait_for_all()
    assert spans["alone"] == (2, 240, 250)


def test_sharing_beside_a_collective() -> None:
    """While it runs, 1.5 times as long, and twice that beside each other: 300 for 100 ns of work."""
    timeline, spans = observed(Contention(1500, 1000, beside_permille=1000))
    timeline.launch(0, Work.COLLECTIVE, 240, "gather")
    timeline.launch(1, Work.COMPUTE, 50, "a")
    timeline.launch(2, Work.COMPUTE, 80, "b")
    timeline.wait_for_all()
    assert spans["a"] == (1, 0, 150)
    assert spans["b"] == (2, 0, 150 + (80 - 50) * 1500 // 1000)
    assert spans["gather"] == (0, 0, 240)


@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(1, 50), st.integers(0, 40)), min_size=1, max_size=30)
)
@settings(max_examples=300, deadline=None)
def test_sharing_conserves_work(program: list[tuple[int, int, int]]) -> None:
    """Kernels of all streams are done when one stream would have done them, where no launch is waited for."""
    timeline, spans = observed(Contention(beside_permille=1000))
    one, _ = observed()
    for index, (stream, duration, pause) in enumerate(program):
        timeline.cpu += pause
        one.cpu += pause
        timeline.launch(stream, Work.COMPUTE, 1000 * duration, index)
        one.launch(0, Work.COMPUTE, 1000 * duration)
    timeline.wait_for_all()
    one.wait_for_all()
    assert abs(timeline.cpu - one.cpu) <= len(program)  # each rounds down to a nanosecond when rates change
    for stream in range(3):
        times = [span[1:] for _, span in sorted(spans.items()) if span[0] == stream]
        assert all(first[1] <= second[0] for first, second in pairwise(times))


def test_copies_disturb_nobody() -> None:
    timeline, spans = observed(Contention(1500, 1500))
    timeline.launch(0, Work.COMPUTE, 200, "compute")
    timeline.launch(1, Work.COPY, 100, "copy")
    timeline.wait_for_all()
    assert spans == {"copy": (1, 0, 100), "compute": (0, 0, 200)}


def test_a_full_launch_queue_blocks_the_cpu() -> None:
    timeline, _ = observed()
    for _ in range(LAUNCH_QUEUE_DEPTH + 1):  # one runs, the others wait
        timeline.launch(0, Work.COMPUTE, 10)
    assert timeline.cpu == 0
    timeline.launch(0, Work.COMPUTE, 10)
    assert timeline.cpu == 10


def test_waiting_for_what_never_comes_is_an_error() -> None:
    timeline, _ = observed()
    never = Marker(1)
    timeline.make_wait(0, never)
    timeline.launch(0, Work.COMPUTE, 10)
    with pytest.raises(RuntimeError, match="deadlock"):
        timeline.wait_for_stream(0)
    with pytest.raises(RuntimeError, match="deadlock"):
        timeline.wait_for_all()


def test_contention_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="compute_permille = 900"):
        Contention(900, 1000)


operations = st.lists(
    st.one_of(
        st.tuples(st.just("launch"), st.integers(0, 2), st.integers(0, 50), st.sampled_from(list(Work)[:3])),
        st.tuples(st.just("cpu"), st.integers(1, 40)),
        st.tuples(st.just("record"), st.integers(0, 2)),
        st.tuples(st.just("wait"), st.integers(0, 2), st.integers(0, 10)),
        st.tuples(st.just("ask"), st.integers(0, 10)),
        st.tuples(st.just("block"), st.integers(0, 10)),
    ),
    max_size=40,
)


@given(operations)
@settings(max_examples=300, deadline=None)
def test_without_contention_times_follow_the_recurrences(program: list[tuple[Any, ...]]) -> None:
    """start = max(launch, end of the stream so far), computed eagerly, is what the lazy timeline settles."""
    timeline, spans = observed()
    free_at, expected, events = [0, 0, 0], {}, []
    for index, operation in enumerate(program):
        match operation:
            case ("launch", stream, duration, work):
                timeline.launch(stream, work, duration, index)
                start = max(timeline.cpu, free_at[stream])
                free_at[stream] = start + duration
                expected[index] = (stream, start, start + duration)
            case ("cpu", duration):
                timeline.cpu += duration
            case ("record", stream):
                events.append((timeline.record(stream), max(timeline.cpu, free_at[stream])))
            case ("wait", stream, which) if events:
                event, time = events[which % len(events)]
                timeline.make_wait(stream, event)
                if event.stream != stream:
                    free_at[stream] = max(free_at[stream], time)
            case ("ask", which) if events:
                event, time = events[which % len(events)]
                assert timeline.has_passed(event) == (time <= timeline.cpu)
            case ("block", which) if events:
                event, time = events[which % len(events)]
                before = timeline.cpu
                timeline.wait_for(event)
                assert timeline.cpu == max(before, time)
    timeline.wait_for_all()
    assert spans == expected
    assert all(event.time == time for event, time in events)


@given(operations, st.integers(1000, 2000), st.integers(1000, 2000))
@settings(max_examples=300, deadline=None)
def test_contention_stretches_work_by_what_runs_beside_it(
    program: list[tuple[Any, ...]], compute: int, collective: int
) -> None:
    """Time alone plus time beside the other kind, the latter divided by the slow-down, is a kernel's work."""
    timeline, spans = observed(Contention(compute, collective))
    works, events = {}, []
    for index, operation in enumerate(program):
        match operation:
            case ("launch", stream, duration, work):
                timeline.launch(stream, work, 100 * duration, index)
                works[index] = (work, 100 * duration)
            case ("cpu", duration):
                timeline.cpu += 100 * duration
            case ("record", stream):
                events.append(timeline.record(stream))
            case ("wait", stream, which) if events:
                timeline.make_wait(stream, events[which % len(events)])
            case ("ask", which) if events:
                timeline.has_passed(events[which % len(events)])
    timeline.wait_for_all()
    assert all(event.time != UNSETTLED for event in events)
    slow = {Work.COMPUTE: compute, Work.COLLECTIVE: collective, Work.COPY: 1000}
    other = {Work.COMPUTE: Work.COLLECTIVE, Work.COLLECTIVE: Work.COMPUTE, Work.COPY: None}
    for index, (work, duration) in works.items():
        _, start, end = spans[index]
        beside = overlap(start, end, [spans[i][1:] for i, (kind, _) in works.items() if kind is other[work]])
        done = (end - start - beside) + beside * 1000 / slow[work]
        assert abs(done - duration) <= 2 + 2 * len(works), (index, done, duration)


def overlap(start: int, end: int, others: list[tuple[int, int]]) -> int:
    """How much of a span is covered by the union of others."""
    points = sorted({start, end, *(p for span in others for p in span if start < p < end)})
    return sum(
        right - left for left, right in pairwise(points) if any(a <= left and right <= b for a, b in others)
    )
