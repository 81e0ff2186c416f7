"""Which rank's word is believed, from what ranks leave: records, exit codes, logs and stacks."""

import os

import pytest

from fsdpbench.engine.results.records import RankRecord, Status, read_records, record_path, write_record
from fsdpbench.launch.verdict import RankFiles, innermost_frame, judge

BROKEN = "RuntimeError: [gloo/transport/tcp/pair.cc:537] Read error: Connection reset by peer"
STACKS = """Thread 0x00007f1 (most recent call first):
  File "/lib/threading.py", line 331 in wait

Current thread 0x00007f2 (most recent call first):
  File "/site-packages/torch/distributed/distributed_c10d.py", line 4394 in barrier
  File "/project/training.py", line 12 in step
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "logs").mkdir()
    return tmp_path


@pytest.fixture
def leave(folder):
    """Lets a rank leave a record (written so many seconds after the epoch), a log, and stacks."""

    def left(rank, status=None, cause=None, at=0, log="", stacks=""):
        if status is not None:
            write_record(RankRecord(rank, 2, "cpu", status, cause), folder)
            os.utime(record_path(folder, rank), (at, at))
        RankFiles(folder, rank).stderr.write_text(log)
        RankFiles(folder, rank).stopped.write_text(stacks)

    return left


def judged(folder, exit_codes=None, timed_out_after_s=None):
    return judge(folder, 2, read_records(folder), exit_codes or {}, timed_out_after_s)


def test_all_well(folder, leave):
    leave(0, Status.OK)
    leave(1, Status.OK)
    assert judged(folder).status is Status.OK


def test_an_error_of_its_own_comes_before_a_broken_connection_that_was_recorded_earlier(folder, leave):
    leave(0, Status.ERROR, BROKEN, at=10)
    leave(1, Status.ERROR, "ValueError: bad batch", at=11)
    outcome = judged(folder, {0: 1, 1: 1})
    assert (outcome.status, outcome.cause) == (Status.ERROR, "rank 1: ValueError: bad batch")
    assert outcome.log == "logs/rank1_stderr.log"


def test_of_two_errors_the_earlier_is_told(folder, leave):
    leave(0, Status.ERROR, "KeyError: 'later'", at=20)
    leave(1, Status.ERROR, "ValueError: earlier", at=10)
    assert judged(folder, {0: 1, 1: 1}).cause == "rank 1: ValueError: earlier"


def test_a_silent_death_comes_before_the_error_it_caused(folder, leave):
    leave(0, Status.ERROR, BROKEN, at=10)
    leave(1)
    outcome = judged(folder, {0: 1, 1: -9})
    assert outcome.status is Status.CRASH
    assert outcome.cause.startswith("rank 1: killed by SIGKILL (the kernel")
    assert judged(folder, {0: 1}).cause == "rank 1: died without a message"


def test_a_rank_that_was_stopped_is_not_to_blame(folder, leave):
    leave(0, stacks=STACKS)
    leave(1, Status.ERROR, "ValueError: bad batch")
    assert judged(folder, {0: -15, 1: 1}).cause == "rank 1: ValueError: bad batch"


@pytest.mark.parametrize("code", [0, -15])
def test_a_rank_that_ended_quietly_is_not_to_blame_for_an_error_of_another(folder, leave, code):
    leave(0)
    leave(1, Status.ERROR, "ValueError: bad batch")
    assert judged(folder, {0: code, 1: 1}).cause == "rank 1: ValueError: bad batch"
    leave(1, Status.ERROR, BROKEN)
    assert judged(folder, {0: code, 1: 1}).cause.startswith("rank 0: ")


def test_out_of_memory_comes_before_all_errors(folder, leave):
    leave(0, Status.ERROR, "ValueError: earlier", at=1)
    leave(1, Status.OOM, "tried to allocate 2 GiB", at=2)
    assert judged(folder, {0: 1, 1: 3}).status is Status.OOM


@pytest.mark.parametrize(
    "message",
    [
        "RuntimeError: [enforce fail at alloc_cpu.cpp:127] . DefaultCPUAllocator: can't allocate memory",
        "MemoryError: ",
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB.",
    ],
)
def test_out_of_memory_is_known_by_its_message(folder, leave, message):
    leave(0, stacks=STACKS)
    leave(1, Status.ERROR, message)
    assert judged(folder, {1: 1}).status is Status.OOM


def test_out_of_memory_that_ended_the_process_is_known_by_its_log(folder, leave):
    leave(0, Status.ERROR, BROKEN)
    leave(
        1,
        log="terminate called\n  what():  [enforce fail] . DefaultCPUAllocator: can't allocate memory\n",
    )
    assert judged(folder, {0: 1, 1: -6}).status is Status.OOM


def test_a_finished_rank_never_counts_as_out_of_memory(folder, leave):
    leave(0, Status.OK, log="a note: CUDA out of memory was survived\n")
    leave(1, Status.OK)
    assert judged(folder).status is Status.OK


def test_an_error_before_the_first_record_is_taken_from_the_log(folder, leave):
    leave(0, stacks=STACKS)
    leave(1, log="Traceback (most recent call last):\n  File ...\nModuleNotFoundError: No module named 'x'\n")
    outcome = judged(folder, {1: 1})
    assert (outcome.status, outcome.cause) == (
        Status.ERROR,
        "rank 1: ModuleNotFoundError: No module named 'x'",
    )


def test_timeout_tells_where_each_rank_stood(folder, leave):
    leave(0, stacks=STACKS)
    leave(1, Status.OK)
    outcome = judged(folder, {0: -15}, timed_out_after_s=7.5)
    assert outcome.status is Status.TIMEOUT
    place = "barrier (distributed_c10d.py:4394), from step (training.py:12)"
    assert outcome.cause == f"ran past 7.5 s: rank 0 stood in {place}"
    assert outcome.log == "logs/rank0_stopped.txt"


def test_innermost_frame_is_the_main_threads():
    assert innermost_frame(STACKS) == "barrier (distributed_c10d.py:4394), from step (training.py:12)"
    assert innermost_frame("") is None


def test_a_thread_that_the_main_one_waits_for_is_named():
    waiting = """
Thread 0x00007f2 (most recent call first):
  File "/project/training.py", line 8 in beat

Current thread 0x00007f1 (most recent call first):
  File "/lib/python3.11/site-packages/x.py", line 1119 in join
"""
    assert innermost_frame(STACKS + waiting) == "beat (training.py:8)"
