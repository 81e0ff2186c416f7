"""Shell completion: what bash asks, and what it is told."""

from __future__ import annotations

from typing import Any

import pytest

from fsdpbench.base.settings import SETTINGS, read_list
from fsdpbench.cli.requests.completion import values_of


@pytest.fixture
def completed(fsdpbench: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    def complete(*words: str) -> list[str]:
        monkeypatch.setenv("_FSDPBENCH_COMPLETE", "bash_complete")
        monkeypatch.setenv("COMP_WORDS", " ".join(("fsdpbench", *words)))
        monkeypatch.setenv("COMP_CWORD", str(len(words)))
        done = fsdpbench()
        assert done.returncode == 0
        return [line.partition(",")[2] for line in done.stdout.splitlines()]

    return complete


def test_commands_models_hardware_and_settings_are_completed(completed: Any) -> None:
    assert completed("expl") == ["explain"]
    assert "gpt-2.8b" in completed("run", "--model", "gpt-2")
    assert completed("plan", "--hardware", "h100-8") == ["h100-80gb", "h100-80gb-cuda13"]
    assert {"torch-fsdp1", "torch-fsdp2"} <= set(completed("run", "--system", "torch-fsdp"))
    assert completed("sweep", "--activation-checkpointing", "none,f") == ["none,full"]
    assert completed("run", "--set", "activation_ch") == ["activation_checkpointing="]
    assert completed("sweep", "--set", "tp=1", "--set", "strategy=FULL_SHARD,NO") == [
        "strategy=FULL_SHARD,NO_SHARD"
    ]
    assert not any(completed("run", "--set", "unknown=t"))


def test_every_word_that_is_proposed_is_taken() -> None:
    for name in SETTINGS:
        for word in values_of(name)():
            assert len(read_list(name, word)) == 1


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_one_command_prints_what_a_shell_reads(
    shell: str, fsdpbench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHELL", f"/usr/bin/{shell}")
    done = fsdpbench("completion")
    assert done.returncode == 0, done.stderr
    assert f"_FSDPBENCH_COMPLETE={shell}_complete" in done.stdout


def test_a_shell_that_is_not_known_is_named(fsdpbench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHELL", "/bin/ksh")
    done = fsdpbench("completion")
    assert (done.returncode, "ksh" in done.stderr) == (2, True)


def test_the_table_of_models_has_80_columns(fsdpbench: Any) -> None:
    lines = fsdpbench("list", "models").stdout.splitlines()
    assert max(len(line.rstrip()) for line in lines) <= 80
    assert any(line.startswith("gpt-2.8b") for line in lines)
