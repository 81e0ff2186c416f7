"""The harness of the campaigns: a forked command is the command, and the oracle sees what is wrong."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from forked_commands import CommandServer, Outcome, violations


def outcome(code: int | None = 0, err: str = "", out: str = "", hung: bool = False) -> Outcome:
    return Outcome(("list",), code, out, err, 0.1, hung)


def test_commands_run_one_after_the_other(commands: CommandServer, tmp_path: Path) -> None:
    listed = commands.run_case(["list", "settings"], tmp_path)
    assert (listed.code, listed.hung) == (0, False)
    assert "backward_prefetch" in listed.out
    wrong = commands.run_case(["list", "nothing"], tmp_path)
    assert wrong.code == 2
    assert wrong.err
    assert not violations(listed)


@pytest.mark.campaign
def test_a_command_that_is_not_over_has_hung_and_shows_where(commands: CommandServer, tmp_path: Path) -> None:
    # Another machine leads this sweep, and never comes.
    words = (
        "sweep --model gpt-2.8b --device cpu --launcher torchrun --nnodes 2 --node-rank 1 --rdzv-endpoint a:1"
    )
    stuck = commands.run_case(words.split(), tmp_path, timeout=3.0)
    assert stuck.hung
    assert violations(stuck)[0].startswith("hung")
    assert "File " in stuck.err
    assert commands.run_case(["--version"], tmp_path).code == 0  # on a server of its own


def test_signals_are_sent(commands: CommandServer, tmp_path: Path) -> None:
    ended = commands.run_case(["doctor"], tmp_path, signals=[(0.0, signal.SIGKILL)])
    assert ended.code == -signal.SIGKILL


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (outcome(5), "exit code 5"),
        (outcome(-signal.SIGSEGV), "exit code"),
        (outcome(0, "Traceback (most recent call last):\n  File"), "traceback"),
        (outcome(0, out="a\x1b[31mb"), "control character"),
        (outcome(2, "Usage: no\n"), "0 lines of error"),
        (outcome(2, "fsdpbench: a\nfsdpbench: b\n"), "2 lines of error"),
        (outcome(2, "fsdpbench: a\nand more\n"), "more than one line"),
        (outcome(3, f"fsdpbench: {'a' * 5000}\n"), "5,011 characters"),
    ],
)
def test_the_oracle_sees(wrong: Outcome, words: str) -> None:
    assert any(words in violation for violation in violations(wrong))


def test_the_oracle_lets_answers_pass() -> None:
    assert not violations(outcome(0, "1 of 2: ok\n"))
    assert not violations(outcome(2, "gpt: 8 GPUs\nfsdpbench: --gpus must be at least 1\n"))
    assert not violations(outcome(5, "fsdpbench: the disk is full\n"), allowed=frozenset({5}))
