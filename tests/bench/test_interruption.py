"""Signals end a process at once where it holds nothing, else by unwinding, and always by the second."""

from __future__ import annotations

import ast
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

HOLDING = """
import sys, time
from fsdpbench.base import interruption
interruption.take_over()
interruption.PATIENCE_S = float(sys.argv[1]) if sys.argv[1:] else 60.0
with interruption.unwinding():
    try:
        print("held", flush=True)
        time.sleep(60)
    except KeyboardInterrupt:
        print("let go", flush=True)
        {then}
"""
STARTING = "import os; os.write(1, b'+'); from fsdpbench.cli import main; main()"


def started(program: str, *words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", program, *words],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=_hear_interruptions,
    )  # fmt: skip


def wait_for_the_first_line(process: subprocess.Popen[str]) -> None:
    """From there on the interpreter, which catches SIGINT when it has started, does not any more."""
    assert process.stdout is not None
    assert process.stdout.read(1) == "+"
    caught = 1 << (signal.SIGINT - 1)
    while caught & int(
        re.findall(r"SigCgt:\s*(\w+)", Path(f"/proc/{process.pid}/status").read_text())[0], 16
    ):
        time.sleep(0.0001)


def _hear_interruptions() -> None:
    """A shell starts what runs in its background deaf to Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("after_s", [0.0, 0.2])
def test_a_command_that_starts_is_gone_without_a_word(number: signal.Signals, after_s: float) -> None:
    with started(STARTING, "sweep", "--model", "gpt-2.8b", "--gpus", "8", "-o", os.devnull) as process:
        wait_for_the_first_line(process)
        time.sleep(after_s)
        process.send_signal(number)
        _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (-number, "")


def test_what_holds_something_unwinds_and_ends_with_its_own_code() -> None:
    with started(HOLDING.format(then="sys.exit(128 + interruption.arrived())")) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (143, "let go\n", "")


@pytest.mark.parametrize("second", [signal.SIGINT, None])
def test_what_does_not_unwind_is_ended(second: signal.Signals | None) -> None:
    """By a second signal, or after a while."""
    with started(HOLDING.format(then="time.sleep(60)"), "0.2" if second is None else "60") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        process.send_signal(signal.SIGTERM)
        assert process.stdout.readline() == "let go\n"
        if second is not None:
            process.send_signal(second)
        _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (-(second or signal.SIGTERM), "")


def test_an_interruption_in_a_finalizer_is_not_lost() -> None:
    slow = "class Slow:\n    def __del__(self):\n        print('held', flush=True); time.sleep(60)\n"
    holding = HOLDING.replace('print("held", flush=True)', "Slow()")
    program = holding.replace("from fsdp", f"{slow}from fsdp")
    with started(program.format(then="pass")) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (-signal.SIGINT, "")


def test_a_hangup_that_is_ignored_stays_ignored() -> None:
    program = f"import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)\n{HOLDING.format(then='pass')}"
    with started(program) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        process.send_signal(signal.SIGHUP)
        process.send_signal(signal.SIGTERM)
        out, _ = process.communicate(timeout=60)
    assert (process.returncode, out) == (0, "let go\n")


def test_the_first_lines_import_nothing_slow() -> None:
    """Until signals are heard an interruption prints where it struck."""
    program = (
        "import os, sys, time, _thread; before = set(sys.modules); import fsdpbench.base.interruption; "
        "print(sorted(set(sys.modules) - before))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert set(ast.literal_eval(done.stdout)) <= {
        *("__future__", "fsdpbench", "fsdpbench.base", "fsdpbench.base.interruption")
    }
