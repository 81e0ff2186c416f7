"""The command line as people use it: exit codes, one clear line for an error, lists in two forms."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import click
import pytest

from fsdpbench.base.errors import UsageError
from fsdpbench.base.settings import SETTINGS
from fsdpbench.cli import main
from fsdpbench.cli.group import _COMMANDS, command_named
from fsdpbench.sweep.spaces.space_file import SpaceFile, read_space


@dataclass(frozen=True)
class Done:
    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def fsdpbench(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Callable[..., Done]:
    """The command in this process (torch is imported once), in an empty folder."""
    monkeypatch.chdir(tmp_path)

    def call(*words: str) -> Done:
        monkeypatch.setattr(sys, "argv", ["fsdpbench", *words])
        code = 0
        try:
            main()
        except SystemExit as stop:
            code = int(stop.code or 0)
        output = capsys.readouterr()
        return Done(code, output.out, output.err)

    return call


def test_the_installed_script_starts_without_torch() -> None:
    program = "import sys, fsdpbench.cli; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], timeout=60).returncode == 0


def test_help_names_the_commands(fsdpbench: Callable[..., Done]) -> None:
    done = fsdpbench("--help")
    assert done.returncode == 0
    for name in ("sweep", "run", "analyze", "report", "check", "baseline", "list"):
        assert name in done.stdout


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["sweep"], "--model"),
        (["sweep", "--model", "gpt-2.9b"], "gpt-2.8b"),
        (["sweep", "--model", "gpt-tiny", "--system", "impl-fsdp9"], "impl-fsdp"),
        (["sweep", "--model", "gpt-tiny", "--hardware", "h1000"], "h100-80gb"),
        (["sweep", "--model", "gpt-tiny", "--gpus", "0"], "--gpus"),
        (["sweep", "--model", "gpt-tiny", "--gpus", "9"], "nodes of 8"),
        (["sweep", "--model", "gpt-tiny", "--wrap", "everyone,every-0"], "every-0"),
        (["sweep", "--model", "gpt-tiny", "--set", "wrapp=block"], "wrap"),
        (["sweep", "--model", "gpt-tiny", "--set", "wrap"], "key=value"),
        (["sweep", "no-such.toml"], "no-such.toml"),
        (["run", "--model", "gpt-tiny", "--batch", "1,2"], "one value"),
        (["analyze", "no-such-trace.json"], "no-such-trace.json"),
        (["report", "no-such-run"], "no-such-run"),
        (["check", "--baseline", "no-such.json"], "no-such.json"),
        (["swoop"], "swoop"),
        (["swep"], "Did you mean sweep"),
    ],
)
def test_bad_input_is_one_clear_line_and_exit_2(
    words: list[str], told: str, tmp_path: Path, fsdpbench: Callable[..., Done]
) -> None:
    done = fsdpbench(*words)
    assert done.returncode == 2, done.stderr
    assert told in done.stderr
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_truncated_trace_is_refused_by_name(tmp_path: Path, fsdpbench: Callable[..., Done]) -> None:
    trace = tmp_path / "rank0_trace.json"
    trace.write_text('{"traceEvents": [{"ph": "X", "na')
    done = fsdpbench("analyze", str(trace))
    assert done.returncode == 2
    assert "rank0_trace.json" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_space_file_names_file_and_key(tmp_path: Path, fsdpbench: Callable[..., Done]) -> None:
    space = tmp_path / "space.toml"
    space.write_text('model = "gpt-tiny"\n[settings]\nbatch = [1, "x"]\n')
    done = fsdpbench("sweep", str(space))
    assert done.returncode == 2
    assert "space.toml" in done.stderr
    assert "batch" in done.stderr


@pytest.mark.parametrize("name", _COMMANDS)
def test_no_option_is_hidden_and_offered_all_the_same(name: str) -> None:
    command = command_named(name)
    assert command is not None
    commands = [command, *(command.commands.values() if isinstance(command, click.Group) else ())]
    assert not [each.opts for own in commands for each in own.params if getattr(each, "hidden", False)]


def test_every_key_offered_for_a_space_is_an_option_of_sweep() -> None:
    sweep = command_named("sweep")
    assert sweep is not None
    options = {each.name for each in sweep.params}
    known = [*SpaceFile.__struct_fields__, *SETTINGS]
    for wrong in ("0", *(name[:-1] + "0" for name in known)):
        with pytest.raises(UsageError) as refused:
            read_space({wrong: 1}, "space.toml")
        offer = re.search(r"(?:Did you mean|Known:) (.*?)[?.] `", str(refused.value))
        assert offer is not None
        assert set(re.split(" or |, ", offer[1])) <= options | {"settings"}, wrong


@pytest.mark.parametrize("what", ["models", "systems", "hardware", "settings"])
def test_lists_are_for_people_and_for_programs(what: str, fsdpbench: Callable[..., Done]) -> None:
    rows = json.loads(fsdpbench("list", what, "--json").stdout)
    shown = fsdpbench("list", what)
    assert shown.returncode == 0
    for row in rows:
        assert row["name"] in shown.stdout


def test_the_lists_hold_what_the_contract_says(fsdpbench: Callable[..., Done]) -> None:
    models = {row["name"]: row for row in json.loads(fsdpbench("list", "models", "--json").stdout)}
    assert set(models["gpt-2.8b"]) == {"name", "family", "parameters", "training_state_bytes", "shape"}
    assert models["gpt-2.8b"]["training_state_bytes"] == 16 * models["gpt-2.8b"]["parameters"]
    assert models["gpt-2.8b"]["shape"]["layers"] == 32
    assert 2.75e9 < models["gpt-2.8b"]["parameters"] < 2.85e9
    settings = [row["name"] for row in json.loads(fsdpbench("list", "settings", "--json").stdout)]
    assert settings == list(SETTINGS)


def test_what_does_not_apply_is_an_answer(fsdpbench: Callable[..., Done]) -> None:
    done = fsdpbench(
        "run", "--model", "gpt-tiny", "--device", "sim", "--system", "torch-fsdp2",
        "--limit-all-gathers", "3",
        "--json",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["status"] == "not_applicable"
    assert "limit_all_gathers" in result["cause"]["message"]


def test_a_reader_that_goes_away_is_no_regression() -> None:
    program = "from fsdpbench.cli import main; main()"
    command = f"{sys.executable} -c '{program}' list settings --json | head -c 1; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("group", ["baseline", "atlas"])
def test_a_group_without_a_command_lists_its_commands(fsdpbench: Callable[..., Done], group: str) -> None:
    done = fsdpbench(group)
    assert "Commands:" in [line.strip() for line in (done.stdout + done.stderr).splitlines()]
