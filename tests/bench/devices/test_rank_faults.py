"""Faults in real ranks: the right status, the first cause, no rank left behind, no hang past the timeout."""

import dataclasses
import faulthandler
import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from fsdpbench.engine.results.records import Status
from fsdpbench.engine.worker import run_rank
from fsdpbench.launch.elastic import run_elastic
from fsdpbench.workloads.families.gpt import GPTBlock

# The launcher forks ranks beside its own threads; they start afresh and take no lock of its.
pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")

FAULTY_RANK = 1


def faulty(fault: Callable[[], object]):
    """A rank function that trains and, on the faulty rank, calls `fault` in the third forward of a block."""

    def rank_function(config, placement, folder):
        if placement.rank == FAULTY_RANK:
            calls = 0

            def strike(module, inputs):
                nonlocal calls
                calls += isinstance(module, GPTBlock)
                if calls == 3:
                    fault()

            torch.nn.modules.module.register_module_forward_pre_hook(strike)
        return run_rank(config, placement, folder)

    return rank_function


def raise_error():
    raise RuntimeError("the loss is not a number\nand a second line")


def test_exception_on_one_rank(cpu_config, launch):
    launched = launch(cpu_config(), faulty(raise_error))
    assert launched.outcome.status is Status.ERROR
    assert launched.outcome.cause == "rank 1: RuntimeError: the loss is not a number"
    assert launched.outcome.log == "logs/rank1_stderr.log"
    log = (launched.folder / launched.outcome.log).read_text()
    assert "Traceback" in log
    assert "raise_error" in log


def test_killed_rank(cpu_config, launch):
    launched = launch(cpu_config(), faulty(lambda: os.kill(os.getpid(), signal.SIGKILL)))
    assert launched.outcome.status is Status.CRASH
    assert launched.outcome.cause.startswith("rank 1: killed by SIGKILL")


@pytest.mark.campaign
def test_segmentation_fault(cpu_config, launch):
    launched = launch(cpu_config(), faulty(faulthandler._sigsegv))
    assert launched.outcome.status is Status.CRASH
    assert "rank 1: killed by SIGSEGV: Fatal Python error: Segmentation fault" in launched.outcome.cause
    assert "strike" in (launched.folder / launched.outcome.log).read_text()


@pytest.mark.campaign
def test_rank_that_leaves_without_a_word(cpu_config, launch):
    launched = launch(cpu_config(), faulty(lambda: os._exit(5)))
    assert launched.outcome.status is Status.CRASH
    assert launched.outcome.cause == "rank 1: exit code 5"


@pytest.mark.campaign
def test_hanging_rank_ends_at_the_timeout(cpu_config, launch):
    launched = launch(cpu_config(timeout_s=6), faulty(sleep_long))
    assert launched.outcome.status is Status.TIMEOUT
    assert launched.outcome.cause.startswith("ran past 6 s: rank 0 stood in ")
    assert "rank 1 stood in sleep_long (test_rank_faults.py:" in launched.outcome.cause
    assert (launched.folder / launched.outcome.log).read_text()


def sleep_long():
    time.sleep(600)


def allocate_without_end():
    room = 256 << 20
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + room, used + room))
    torch.zeros(4 * room, dtype=torch.uint8)


def test_out_of_memory(cpu_config, launch):
    """Real: the address space is limited, and the allocation fails."""
    launched = launch(cpu_config(), faulty(allocate_without_end))
    assert launched.outcome.status is Status.OOM
    assert launched.outcome.cause.startswith("rank 1: ")
    assert "DefaultCPUAllocator" in launched.outcome.cause


@pytest.mark.campaign
def test_exception_in_a_backward_hook(cpu_config, launch):
    """It may end the process from C++; its text is told all the same."""

    def hook_that_raises():
        torch.nn.modules.module.register_module_full_backward_hook(lambda *_: raise_error())

    launched = launch(cpu_config("torch-ddp"), faulty(hook_that_raises))
    assert launched.outcome.status in (Status.ERROR, Status.CRASH)
    assert launched.outcome.cause.startswith("rank 1: ")
    assert "the loss is not a number" in launched.outcome.cause


def test_error_before_the_first_collective(cpu_config, launch):
    good = cpu_config("torch-fsdp2")
    launched = launch(dataclasses.replace(good, settings=good.settings.changed(wrap="NoSuchBlock")))
    assert launched.outcome.status is Status.ERROR
    assert "NoSuchBlock" in launched.outcome.cause


def hang(config, placement, folder):
    (folder / f"alive{placement.rank}").write_text(str(os.getpid()))
    time.sleep(600)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux ends a child with its parent")
def test_ranks_die_with_a_launcher_that_is_killed(cpu_config, tmp_path):
    launcher = os.fork()
    if launcher == 0:
        try:
            run_elastic(cpu_config(timeout_s=120), tmp_path, hang)
        finally:
            os._exit(1)
    try:
        pids = [int(wait_for(tmp_path / f"alive{rank}")) for rank in range(2)]
    finally:
        os.kill(launcher, signal.SIGKILL)
        os.waitpid(launcher, 0)
    deadline = time.monotonic() + 20
    while any(is_running(pid) for pid in pids):
        assert time.monotonic() < deadline, "ranks outlive their launcher"
        time.sleep(0.05)


def wait_for(path):
    deadline = time.monotonic() + 60
    while not (path.exists() and path.read_text()):
        assert time.monotonic() < deadline, f"{path.name} did not appear"
        time.sleep(0.05)
    return path.read_text()


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
