"""Every command that a page shows: its options exist and take its values; the campaign runs it."""

from __future__ import annotations

import contextlib
import os
import shlex
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import click
import pytest

sys.path.insert(0, str(Path(__file__).parent))
from commands import ROOT, Command, commands, make_files, pages

from fsdpbench.cli import main
from fsdpbench.cli.group import _group

ALL = [command for page in pages() for command in commands(page)]
PAGES = sorted({command.page for command in ALL if command.shown})

CANNOT_RUN_HERE = {
    "--device cuda": "needs GPUs",
    "calibrate -o": "needs a GPU; the calibration's own tests run it with --device sim",
    "--launcher": "needs other machines; tests/bench/launchers runs both launchers",
    "hf:Qwen": "needs the model in the local cache; tests/bench/sweep/test_hf_model.py makes one",
    "atlas build --small": "a quarter of an hour of processor time; tests/bench/atlas builds a smaller one",
    "upgrade train.py --from": "installs two versions of torch; tests/bench/upgrade has its own",
    "expect --from runs/mine": "needs a run on GPUs; tests/bench/expect judges one",
    "$(which": "is a command of the shell; tests/bench/script/test_launchers.py runs torchrun",
    "deepseek-v3/config.json": "needs the model's file; ci/measured/current_models.txt has its figures",
    "memory.pickle": "needs a snapshot; tests/reports reads them",
    "--system impl-fsdp2,impl-fsdp1,torch-fsdp2": "minutes on CPUs; ci/measure_cpu_systems.py runs it",
}
NEEDS_PACKAGE = {
    "--implementation own,transformers": "transformers",
    "train_peft.py": "peft",
    "accelerate.": "accelerate",
}
"""What the commands need and no extra installs; they run where it is installed."""
ENDS_WITH = {
    "docs/tutorial.md: fsdpbench compare runs/before runs/after": 1,
    "README.md: fsdpbench validate": 1,
    "side_stream_mean.py": 4,
    "fsdpbench prove docs/examples/train_fsdp2.py": 3,
    "README.md: fsdpbench prove train.py": 3,
    "prove train.py --gpus 8 --only speed": 3,
}
"""Exit codes that a page announces; 0 else. `validate` ends with 1 while a target accuracy is missed."""


def parse(words: tuple[str, ...]) -> None:
    """Raises click's error for a word that no option takes."""
    group: click.Command = _group
    context = group.make_context("fsdpbench", list(words[1:]))
    while isinstance(group, click.Group) and (rest := [*context._protected_args, *context.args]):
        name, found, rest = group.resolve_command(context, rest)
        assert found is not None
        group, context = found, found.make_context(name, rest, parent=context)


def test_every_command_is_understood(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert len(ALL) > 80
    wrong = []
    for command in ALL:
        lenient = () if command.shown else (click.MissingParameter, click.BadOptionUsage)
        try:
            with contextlib.suppress(click.exceptions.Exit, *lenient):
                parse(command.words)
        except click.ClickException as error:
            wrong.append(f"{command}: {error.format_message()}")
    assert wrong == []


LISTS = sorted({command.words for command in ALL if command.words[1:2] == ("list",) and command.words[2:]})


@pytest.mark.plain_cases("settings")
@pytest.mark.parametrize("words", LISTS, ids=shlex.join)
def test_lists_are_printed(
    words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", list(words))
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0
    assert len(capsys.readouterr().out.splitlines()) > 3


def of_page(page: str) -> list[Command]:
    """What a page shows and no earlier one has run; what writes a named folder or baseline is run again."""
    earlier = {command.words for command in ALL if command.shown and command.page < page}
    again = {"-o", "baseline", "compare", "check"}
    here = dict.fromkeys(command for command in ALL if command.shown and command.page == page)
    return [command for command in here if command.words not in earlier or again & set(command.words)]


def run(words: tuple[str, ...], folder: Path) -> subprocess.CompletedProcess[str]:
    program = [sys.executable, "-m", *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.run(program, cwd=folder, capture_output=True, text=True, timeout=900, env=environment)


def reason_not_to_run(text: str) -> str | None:
    """Why a command cannot run on this machine, or None."""
    missing = [package for part, package in NEEDS_PACKAGE.items() if part in text and not find_spec(package)]
    if missing:
        return f"needs the package {missing[0]}"
    return next((reason for part, reason in CANNOT_RUN_HERE.items() if part in text), None)


def problem_of(command: Command, folder: Path) -> str:
    """What is wrong with the way the command ended; empty: nothing."""
    wanted = next((code for part, code in ENDS_WITH.items() if part in str(command)), 0)
    try:
        done = run(command.words, folder)
    except subprocess.TimeoutExpired as error:
        return f"not ended after {error.timeout:.0f} s"
    return "" if done.returncode == wanted else f"{done.returncode}, not {wanted}: {done.stderr[-500:]}"


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sweep's folder: a configuration with a trace, and one that ran out of memory."""
    folder = tmp_path_factory.mktemp("traced")
    words = shlex.split("fsdpbench sweep --model gpt-tiny --gpus 8 --device sim --batch 2,65536 -o small")
    done = run(tuple(words), folder)
    assert done.returncode == 0, done.stderr
    return folder / "small"


@pytest.mark.campaign
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("page", PAGES)
def test_the_commands_of_a_page_run(page: str, traced: Path, tmp_path: Path) -> None:
    chosen = of_page(page)
    makes = {command.words[command.words.index("-o") + 1] for command in chosen if "-o" in command.words}
    make_files(tmp_path, traced, makes)
    wrong = []
    for command in chosen:
        text = shlex.join(command.words)
        if reason := reason_not_to_run(text):
            print(f"  not run  {text}: {reason}", flush=True)
            continue
        started = time.monotonic()
        problem = problem_of(command, tmp_path)
        print(f"{time.monotonic() - started:7.0f} s  {'FAILED ' * bool(problem)}{text}", flush=True)
        wrong += [f"{text}: {problem}"] * bool(problem)
    assert wrong == []


def test_each_reason_not_to_run_a_command_is_still_needed() -> None:
    texts = [str(command) for command in ALL if command.shown]
    assert [
        part
        for part in (*CANNOT_RUN_HERE, *NEEDS_PACKAGE, *ENDS_WITH)
        if not any(part in text for text in texts)
    ] == []
