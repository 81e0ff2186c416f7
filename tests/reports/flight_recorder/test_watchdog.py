"""Time-outs of NCCL's watchdog: drawn hangs, written as each torch writes them, judged from the text."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdpbench.reports.analysis.flight_recorder import Verdict, describe, judge_logs
from fsdpbench.reports.readers import TraceError
from fsdpbench.reports.readers.flight_recorder import find_logs

KINDS = ("ALLREDUCE", "_ALLGATHER_BASE", "_REDUCE_SCATTER_BASE", "BROADCAST")
TORCHES = ("1.13", "2.3", "2.11")


@dataclass
class Rank:
    """What a rank's watchdog knows when time is up: the call that hangs, if any, and its counts."""

    rank: int
    hangs: tuple[int, str, int] | None
    enqueued: int
    completed: int
    own_rank: int | None = None
    group: tuple[int, str] = (0, "default_pg")
    line: str = ""
    others: list[Rank] = field(default_factory=list)


def text_of(rank: Rank, torch: str) -> str:
    """Return what `torch` writes on a rank."""
    own, (number, description) = rank.rank if rank.own_rank is None else rank.own_rank, rank.group
    if torch == "1.13":
        head, caller = "[E ProcessGroupNCCL.cpp:821] ", f"[Rank {own}] "
    elif torch == "2.3":
        head, caller = f"[rank{rank.rank}]:[E ProcessGroupNCCL.cpp:563] ", f"[PG {number} Rank {own}] "
    else:
        head = f"[rank{rank.rank}]:[E1126 10:00:00.1 ProcessGroupNCCL.cpp:683] "
        caller = f"[PG ID {number} PG GUID {7 * number}({description}) Rank {own}] "
    lines = []
    if rank.hangs is not None:
        sequence, kind, numel = rank.hangs
        sizes = f"TensorShape=[{numel}]" if torch == "1.13" else f"NumelIn={numel}, NumelOut={8 * numel}"
        lines.append(
            f"{head}{caller}Watchdog caught collective operation timeout: WorkNCCL(SeqNum={sequence}, "
            f"OpType={kind}, {sizes}, Timeout(ms)=600000) ran for 600023 milliseconds before timing out."
        )
    if torch == "2.3":
        lines.append(
            f"{head}{caller}Timeout at NCCL work: 7, last enqueued NCCL work: {rank.enqueued}, "
            f"last completed NCCL work: {rank.completed}."
        )
    elif torch == "2.11":
        lines.append(
            f"{head}{caller} failure detected by watchdog at work sequence id: 7 PG status: "
            f"last enqueued work: {rank.enqueued}, last completed work: {rank.completed}"
        )
        if rank.line and rank.hangs is not None:
            lines.append("Stack trace of the failed collective: ")
            lines.append(
                "#0 all_reduce from /usr/lib/python3.11/site-packages/torch/distributed/c10d.py:2806"
            )
            lines.append(f"#1 <module> from {rank.line}")
    return "\n".join(lines) + "\n"


def judged(tmp_path: Path, ranks: list[Rank], torch: str) -> Verdict:
    log = tmp_path / "job.log"
    log.write_text("step 1 loss 2.0\n" + "".join(text_of(rank, torch) for rank in ranks))
    assert find_logs([log]) == [log]
    return judge_logs([log])


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from(TORCHES), st.sampled_from(["absent", "kind", "sizes", "late"]))
def test_a_drawn_hang_is_judged(tmp_path_factory: Any, seed: int, torch: str, fault: str) -> None:
    drawn = random.Random(seed)
    count, sequence = drawn.randint(2, 9), drawn.randint(2, 500)
    culprit, kind, numel = drawn.randrange(count), drawn.choice(KINDS), drawn.randint(1, 10**6)
    hangs = (sequence, kind, numel)
    ranks = [Rank(each, hangs, sequence + drawn.randint(0, 3), sequence - 1) for each in range(count)]
    other = drawn.choice([each for each in KINDS if each != kind])
    if fault == "absent":  # it wrote nothing at all
        ranks[culprit].hangs = None
    elif fault == "kind":
        ranks[culprit].hangs = (sequence, other, numel)
    elif fault == "sizes":
        ranks[culprit].hangs = (sequence, kind, numel + 1)
    else:  # it never called the collective, and says how far it came
        ranks[culprit] = Rank(culprit, None, sequence - 1, sequence - 1)
    written = [rank for rank in ranks if fault != "absent" or rank.rank != culprit]
    drawn.shuffle(written)
    verdict = judged(tmp_path_factory.mktemp("log"), written, torch)
    said, name = verdict.culprit, f"rank {culprit}"
    if fault in ("kind", "sizes"):
        assert "called" in said
        blamed = said.split(" called ")[0]
        if count > 2:
            assert blamed == name
        assert f"collective {sequence} of group default_pg" in said
    elif fault == "late" and torch != "1.13":  # the oldest says no counts
        assert said.startswith(f"{name} never joined")
        assert f"collective {sequence} of group default_pg" in said
    elif culprit < count - 1:
        assert verdict.missing_dumps == (culprit,)
        assert f"whether {name} joined it is not known" in said
    else:
        assert "all known ones" in said, "nothing says that there is a last rank"
    assert describe(verdict).startswith("time-outs of NCCL's watchdog of rank")


def test_the_line_of_the_call_is_named(tmp_path: Path) -> None:
    ranks = [
        Rank(0, (31, "ALLREDUCE", 4), 31, 30, line="/home/me/train.py:88"),
        Rank(1, None, 30, 30),
    ]
    said = judged(tmp_path, ranks, "2.11").culprit
    assert said.startswith(
        "rank 1 never joined allreduce(4) at train.py:88, collective 31 of group default_pg"
    )


def test_one_rank_alone_waits_where_others_went_on(tmp_path: Path) -> None:
    ranks = [Rank(each, None, 40, 40) for each in range(4)]
    ranks[2] = Rank(2, (31, "ALLREDUCE", 4), 40, 30)
    said = judged(tmp_path, ranks, "2.11").culprit
    assert "is not done on rank 2 alone: look at the GPU and its links" in said


def test_a_group_of_a_mesh_has_ranks_of_the_job(tmp_path: Path) -> None:
    mesh = (3, "mesh_fsdp")
    ranks = [Rank(4, (9, "ALLREDUCE", 4), 9, 8, 0, mesh), Rank(6, None, 8, 8, 1, mesh)]
    assert judged(tmp_path, ranks, "2.11").culprit.startswith("rank 6 never joined")


def test_a_rank_of_a_group_alone_is_refused_unless_the_file_names_it(tmp_path: Path) -> None:
    line = text_of(Rank(5, (9, "ALLREDUCE", 4), 9, 8, 1, (3, "mesh_fsdp")), "2.11").replace("[rank5]:", "")
    unnamed, named = tmp_path / "job.log", tmp_path / "5" / "stderr.log"
    named.parent.mkdir()
    for path in (unnamed, named):
        path.write_text(line)
    with pytest.raises(TraceError, match=r"which rank of the job .* keep the prefix \[rank3\]"):
        judge_logs([unnamed])
    assert judge_logs([named]).dumps[0].rank == 5


def test_logs_beside_another_file_are_refused(tmp_path: Path) -> None:
    log, trace = tmp_path / "job.log", tmp_path / "trace.json"
    log.write_text(text_of(Rank(0, (9, "ALLREDUCE", 4), 9, 8), "2.11"))
    trace.write_text('{"traceEvents": []}')
    with pytest.raises(TraceError, match="analyze it separately"):
        find_logs([log, trace])
    assert find_logs([trace]) == []


@given(st.text(max_size=300), st.sampled_from(TORCHES))
@settings(max_examples=60, deadline=None)
def test_damaged_lines_are_read_or_passed_over(tmp_path_factory: Any, noise: str, torch: str) -> None:
    log = tmp_path_factory.mktemp("log") / "job.log"
    text = text_of(Rank(0, (9, "ALLREDUCE", 4), 9, 8), torch)
    cut = len(noise) % len(text)
    log.write_text(text + text[:cut] + noise + text[cut:], errors="replace")
    assert judge_logs([log]).dumps[0].rank == 0
