"""Several ranks on one simulated time: random programs against a model that computes each time by itself, and
programs that real ranks would hang in."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any

import pytest

from fsdpbench.sim.model.coupling import Arrival, Exchange, Link, Member
from fsdpbench.sim.model.timeline import Contention, Coupling, Meeting, Timeline, Work

STREAMS = 3
Action = tuple[Any, ...]
"""What one rank does: its kind, then stream, nanoseconds or partner."""


def drawn(seed: int, ranks: int) -> list[tuple[int, Action]]:
    """Return a program of all ranks in an order in which it can run; messages are there once."""
    draw = random.Random(seed)
    longest = draw.choice([2, 5, 40])  # with short ones much happens at the same time
    program: list[tuple[int, Action]] = []
    for number in range(draw.randrange(20, 120)):
        rank, stream = draw.randrange(ranks), draw.randrange(STREAMS)
        other = (rank + draw.randrange(1, ranks)) % ranks
        action: Action = draw.choice(
            [
                ("kernel", stream, draw.randint(1, longest)),
                ("kernel", stream, draw.randint(1, longest)),
                ("message", stream, draw.randint(1, longest), other, draw.randrange(STREAMS), number),
                ("order", stream, draw.randrange(STREAMS)),
                ("cpu", draw.randint(1, longest)),
                ("meet", other, number),
                ("wait", stream),
                ("ask", stream),
            ]
        )
        program.append((rank, action))
    return program


def modelled(program: list[tuple[int, Action]], ranks: int) -> list[tuple[int, list[int]]]:
    """Return when each rank ends, and when its streams do, without contention."""
    cpu, free = [0] * ranks, [[0] * STREAMS for _ in range(ranks)]
    for rank, (kind, *rest) in program:
        mine = free[rank]
        if kind == "kernel":
            mine[rest[0]] = max(mine[rest[0]], cpu[rank]) + rest[1]
        elif kind == "message":
            stream, ns, other, theirs, _ = rest
            start = max(mine[stream], cpu[rank], free[other][theirs], cpu[other]) + 1
            mine[stream] = free[other][theirs] = start + ns
        elif kind == "order":
            mine[rest[0]] = max(mine[rest[0]], mine[rest[1]])
        elif kind == "cpu":
            cpu[rank] += rest[0]
        elif kind == "meet":
            cpu[rank] = cpu[rest[0]] = max(cpu[rank], cpu[rest[0]]) + 1
        elif kind == "wait":
            cpu[rank] = max(cpu[rank], mine[rest[0]])
    ends = [[max(each, cpu[rank]) for each in free[rank]] for rank in range(ranks)]
    return [(max(each), each) for each in ends]


def run_rank(
    link: Link, program: list[tuple[int, Action]], contention: Contention, depth: int = 1000
) -> tuple[int, list[int]]:
    """Run the part of one rank; return when it ends, and when its streams do."""
    rank, timeline = link.rank, Timeline(contention)
    timeline.queue_depth = depth
    Coupling(timeline, link)
    for _ in range(STREAMS):
        timeline.add_stream()
    for owner, (kind, *rest) in program:
        if kind == "message" and rank in (owner, rest[2]):
            stream = rest[0] if rank == owner else rest[3]
            meeting = Meeting([Arrival(("message", rest[4]), tuple(sorted((owner, rest[2]))))])
            timeline.make_wait(stream, meeting)
            timeline.launch(stream, Work.COLLECTIVE, rest[1])
        elif kind == "meet" and rank in (owner, rest[0]):
            timeline.coupling.meet(Meeting([Arrival(("meet", rest[1]), tuple(sorted((owner, rest[0]))))]))
        elif owner != rank:
            continue
        elif kind == "kernel":
            timeline.launch(rest[0], Work.COMPUTE, rest[1])
        elif kind == "order":
            timeline.make_wait(rest[0], timeline.record(rest[1]))
        elif kind == "cpu":
            timeline.cpu += rest[0]
        elif kind == "wait":
            timeline.wait_for_stream(rest[0])
        elif kind == "ask":
            timeline.is_idle(rest[0])
    ends = [timeline.record(stream) for stream in range(STREAMS)]
    timeline.drain()
    return timeline.cpu, [end.time for end in ends]


def together(ranks: int, run: Callable[[Link], Any]) -> list[Any]:
    """Run `run` as each of several ranks, a thread each; return what they return or raise."""
    pipes = [Pipe() for _ in range(ranks)]
    found: list[Any] = [None] * ranks

    def as_rank(rank: int) -> None:
        link = Link(rank, range(ranks), pipes[rank][1])
        try:
            found[rank] = run(link)
        except Exception as error:
            found[rank] = error
        finally:
            link.end("has ended")

    exchange = Exchange({rank: Member(ours) for rank, (ours, _) in enumerate(pipes)})
    threads = [threading.Thread(target=as_rank, args=(rank,), daemon=True) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    open_ends: dict[Connection, int] = {ours: rank for rank, (ours, _) in enumerate(pipes)}
    while open_ends:
        for ready in wait(list(open_ends), timeout=60):
            assert isinstance(ready, Connection)
            message = ready.recv()
            exchange.take(open_ends[ready], message)
            if message[0] == "end":
                del open_ends[ready]
    for thread in threads:
        thread.join(10)
    return found


@pytest.mark.parametrize("ranks", [2, 3])
def test_times_are_those_of_a_model(ranks: int) -> None:
    for seed in range(25):
        program = drawn(seed, ranks)
        found = together(ranks, lambda link, program=program: run_rank(link, program, Contention()))
        assert found == modelled(program, ranks), seed


def test_contention_does_not_depend_on_which_rank_is_faster() -> None:
    contention = Contention(1700, 1400, 300)
    for seed in range(25, 50):
        program = drawn(seed, 3)
        for depth in (1000, 5):  # full queues hold the CPU, and some of these programs for ever
            runs = [
                together(
                    3, lambda link, program=program, depth=depth: run_rank(link, program, contention, depth)
                )
                for _ in range(3)
            ]
            assert str(runs[0]) == str(runs[1]) == str(runs[2]), seed


def test_ranks_that_wait_for_each_other_are_named() -> None:
    def run(link: Link) -> None:
        timeline, other = Timeline(), 1 - link.rank
        Coupling(timeline, link)
        stream = timeline.add_stream()
        for first in (link.rank, other):
            arrival = Arrival((first,), (0, 1), words=f"message {first}")
            timeline.make_wait(stream, Meeting([arrival]))
        timeline.wait_for_stream(stream)

    for error in together(2, run):
        assert "rank 0 waits for rank 1: message 0; rank 1 waits for rank 0: message 1" in str(error)


def test_a_rank_that_ends_early_and_calls_that_differ_are_named() -> None:
    def early(link: Link) -> None:
        timeline = Timeline()
        Coupling(timeline, link)
        timeline.add_stream()
        if link.rank:
            timeline.coupling.meet(Meeting([Arrival((1,), (0, 1), words="a message")]))

    assert "rank 1 waits for rank 0: a message, and rank 0 has ended" in str(together(2, early)[1])

    def other(link: Link) -> None:
        timeline = Timeline()
        Coupling(timeline, link)
        timeline.add_stream()
        said = ("broadcast", "all_reduce")[link.rank]
        timeline.coupling.meet(Meeting([Arrival((1,), (0, 1), said=(said,), words=said)]))

    for error in together(2, other):
        assert "rank 0: broadcast" in str(error)
        assert "rank 1: all_reduce" in str(error)


def test_a_value_is_given_up_that_could_only_come_later() -> None:
    def run(link: Link) -> Any:
        timeline = Timeline()
        Coupling(timeline, link)
        stream = timeline.add_stream()
        meeting = Meeting([Arrival(("message",), (0, 1))])
        if link.rank:  # shows it after a message that rank 0 sends when it has continued
            timeline.make_wait(stream, meeting)
            timeline.wait_for_stream(stream)
            link.show(("late",), 7)
            link.show(("soon",), 8)
            return None
        late = link.look(("late",), [1], timeline.cpu)
        timeline.make_wait(stream, meeting)
        timeline.wait_for_stream(stream)
        return late, link.look(("soon",), [1], timeline.cpu)

    assert together(2, run)[0] == (None, {1: 8})
