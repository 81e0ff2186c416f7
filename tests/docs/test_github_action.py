"""The steps of `ci/action` as a runner executes them: inputs, files of the job, exit codes, comments.

A program named `gh` on the path records what it is called with; everything else is the real thing.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import venv
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
ACTION: dict[str, Any] = yaml.safe_load((ROOT / "ci" / "action" / "action.yml").read_text())
STEPS: list[dict[str, Any]] = ACTION["runs"]["steps"]
EXPRESSION = re.compile(r"\$\{\{ (.*?) \}\}")
GH = """#!/usr/bin/env bash
[ ! -e "$GH_FOLDER/refuses" ] || { echo "HTTP 403: Resource not accessible" >&2; exit 1; }
printf '%s\\n' "$*" >> "$GH_FOLDER/calls"
case "$*" in *--jq*) cat "$GH_FOLDER/known" 2>/dev/null || true ;; esac
for word in "$@"; do case "$word" in body=@*) cp "${word#body=@}" "$GH_FOLDER/body" ;; esac; done
"""
CLEAN = """
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
torch.distributed.init_process_group("nccl")
model = nn.Linear(64, 64).cuda()
fully_shard(model)
optimizer = torch.optim.SGD(model.parameters())
for _ in range(12):
    model(torch.randn(2, 64, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@dataclass(frozen=True)
class Job:
    """What an action's steps left: the job's exit code, its outputs, its log."""

    code: int
    outputs: Mapping[str, str]
    log: str


class Runner:
    """Executes the steps in `folder`, from `first` on, with `python` as what the install step found."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.temp = folder / "work", folder / "temp"
        self.gh = folder / "gh"
        for each in (self.folder, self.temp, self.gh, folder / "bin"):
            each.mkdir()
        (folder / "bin" / "gh").write_text(GH)
        (folder / "bin" / "gh").chmod(0o755)
        self.event = folder / "event.json"
        self.event.write_text(json.dumps({"pull_request": {"number": 7}}))
        self.variables = {
            "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
            "HOME": os.environ.get("HOME", "/"),
            "RUNNER_TEMP": str(self.temp),
            "GITHUB_EVENT_PATH": str(self.event),
            "GITHUB_REPOSITORY": "owner/repository",
            "GH_FOLDER": str(self.gh),
        }

    def run(self, given: Mapping[str, str], first: str = "Judge", python: str = sys.executable) -> Job:
        context = {f"inputs.{name}": str(each.get("default", "")) for name, each in ACTION["inputs"].items()}
        context = {name: "token" if EXPRESSION.search(value) else value for name, value in context.items()}
        assert {f"inputs.{name}" for name in given} <= context.keys()
        context |= {f"inputs.{name}": value for name, value in given.items()}
        context |= {"github.action_path": str(ROOT / "ci" / "action")}
        if first != "Install fsdpbench":
            context["steps.install.outputs.python"] = python
        names = [step["name"] for step in STEPS]
        code, log = 0, ""
        for step in STEPS[names.index(first) :]:
            if code or not holds(step.get("if", ""), context):
                continue
            done, outputs = self._step(step, context)
            code, log = done.returncode, log + done.stdout + done.stderr
            context |= {f"steps.{step.get('id')}.outputs.{name}": value for name, value in outputs.items()}
        outputs = {name: filled(each["value"], context) for name, each in ACTION["outputs"].items()}
        return Job(code, outputs, log)

    def _step(
        self, step: Mapping[str, Any], context: Mapping[str, str]
    ) -> tuple[subprocess.CompletedProcess[str], dict[str, str]]:
        assert step["shell"] == "bash"
        output = self.temp / f"output-{step['name']}"
        output.touch()
        variables = {name: filled(value, context) for name, value in step.get("env", {}).items()}
        files = {"GITHUB_OUTPUT": str(output), "GITHUB_STEP_SUMMARY": str(self.temp / "summary.md")}
        done = subprocess.run(
            ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]],
            cwd=self.folder,
            env=self.variables | files | variables,
            text=True,
            capture_output=True,
            timeout=600,
        )
        lines = output.read_text().splitlines()
        return done, dict(line.split("=", 1) for line in lines)

    @property
    def calls(self) -> list[str]:
        path = self.gh / "calls"
        return path.read_text().splitlines() if path.exists() else []

    @property
    def summary(self) -> str:
        path = self.temp / "summary.md"
        return path.read_text() if path.exists() else ""


def filled(text: str, context: Mapping[str, str]) -> str:
    """`text` with its expressions replaced by values, once, as the runner does."""
    return EXPRESSION.sub(lambda found: context.get(found[1], ""), text)


def holds(condition: str, context: Mapping[str, str]) -> bool:
    """Whether a step's `if` is true; it knows one form."""
    if not condition:
        return True
    found = re.fullmatch(r"\$\{\{ (inputs\.[\w-]+) == '(\w+)' \}\}", condition)
    assert found is not None, condition
    return context[found[1]] == found[2]


@pytest.fixture
def runner(tmp_path: Path) -> Runner:
    runner = Runner(tmp_path)
    (runner.folder / "train.py").write_text(CLEAN)
    return runner


def test_inputs_reach_the_shell_as_variables_only() -> None:
    for step in STEPS:
        assert "uses" not in step
        assert "${{" not in step["run"], step["name"]
    shown = {name for step in STEPS for name in re.findall(r"inputs\.([\w-]+)", str(step))}
    assert shown == set(ACTION["inputs"])


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"command": "sweep; touch hit", "script": "train.py"}, "::error::command: prove or check"),
        ({"command": "$(touch hit)"}, "::error::command: prove or check"),
        ({}, "::error::prove needs script"),
        ({"command": "check"}, "::error::check needs baseline"),
        ({"script": "train.py", "options": "'"}, "::error::OPTIONS: quotes are not closed"),
    ],
)
def test_a_wrong_input_is_named(runner: Runner, given: dict[str, str], words: str) -> None:
    job = runner.run(given)
    assert job.code == 2
    assert words in job.log
    assert job.outputs["exit-code"] == "2"
    assert not (runner.folder / "hit").exists()


HOSTILE = "--help; touch hit `touch hit` $(touch hit) \" ' | & > hit \n::set-output name=x::y \\"


def recorder(runner: Runner, code: int) -> str:
    """A Python that gives fsdpbench's verdict: its words go into `temp/words`, a NUL behind each."""
    program = runner.temp / "python"
    program.write_text(
        '#!/bin/bash\n[ "$1" = -P ] || exec ' + shlex.quote(sys.executable) + ' "$@"\n'
        f"printf '%s\\0' \"$@\" > {shlex.quote(str(runner.temp))}/words; echo '| races | 1 |'; exit {code}\n"
    )
    program.chmod(0o755)
    return str(program)


def test_no_input_is_executed(runner: Runner) -> None:
    given = dict.fromkeys(("script", "gpus", "hardware", "baseline"), HOSTILE) | {"comment": "true"}
    given |= {"options": f"--only {shlex.quote(HOSTILE)}", "arguments": "$(touch hit) `touch hit` ;"}
    job = runner.run(given, python=recorder(runner, 0))
    assert job.code == 0, job.log
    expected = ["-P", "-m", "fsdpbench", "prove", *(f"--{name}={HOSTILE}" for name in ("baseline", "gpus"))]
    expected += [f"--hardware={HOSTILE}", "--only", HOSTILE, "--format", "md", "--", HOSTILE]
    expected += ["$(touch", "hit)", "`touch", "hit`", ";"]
    assert (runner.temp / "words").read_text().split("\0")[:-1] == expected
    assert set(os.listdir(runner.folder)) == {"train.py"}
    job = runner.run({"python-version": HOSTILE}, first="Install fsdpbench")
    assert job.code == 2
    assert "::error::python-version: such as 3.11" in job.log
    assert set(os.listdir(runner.folder)) == {"train.py"}


def test_the_verdict_is_summary_and_comment(runner: Runner) -> None:
    job = runner.run({"script": "train.py", "comment": "true"}, python=recorder(runner, 0))
    assert job.code == 0, job.log
    assert runner.summary == "| races | 1 |\n" == Path(job.outputs["verdict"]).read_text()
    look, write = runner.calls
    assert "repos/owner/repository/issues/7/comments --jq" in look
    assert "--method POST repos/owner/repository/issues/7/comments" in write
    marker, _, body = (runner.gh / "body").read_text().partition("\n")
    assert re.fullmatch(r"<!-- fsdpbench [0-9a-f]{16} -->", marker)
    assert body == runner.summary


@pytest.mark.parametrize("code", [0, 1, 3])
def test_one_comment_is_kept_up_to_date(runner: Runner, code: int) -> None:
    (runner.gh / "known").write_text("41\n42\n")
    job = runner.run({"script": "train.py", "comment": "true"}, python=recorder(runner, code))
    assert job.code == code
    assert "--method PATCH repos/owner/repository/issues/comments/41 " in runner.calls[1]
    assert len(runner.calls) == 2


def test_a_token_that_may_only_read_fails_no_job(runner: Runner) -> None:
    (runner.gh / "refuses").touch()
    job = runner.run({"script": "train.py", "comment": "true"}, python=recorder(runner, 0))
    assert job.code == 0
    assert "::notice::no comment was written" in job.log


def test_without_a_pull_request_there_is_no_comment(runner: Runner) -> None:
    runner.event.write_text("{}")
    job = runner.run({"script": "train.py", "comment": "true"}, python=recorder(runner, 3))
    assert job.code == 3
    assert runner.calls == []


@pytest.mark.campaign
@pytest.mark.timeout(900)
def test_what_is_found_in_programs(runner: Runner) -> None:
    shutil.copytree(ROOT / "docs" / "examples" / "races", runner.folder / "races")
    clean = runner.run({"script": "train.py", "gpus": "2", "options": "--only races,ranks", "page": "true"})
    assert clean.code == 0, clean.log
    assert "| races | ok |" in runner.summary
    assert "<html" in Path(clean.outputs["page"]).read_text()
    found = runner.run({"script": "races/write_before_backward.py", "gpus": "2", "options": "--only races"})
    assert found.code == 1, found.log
    assert "**Findings**" in runner.summary
    unknown = runner.run({"script": "train.py", "gpus": "2", "options": "--only speed"})
    assert unknown.code == 3, unknown.log
    assert "**Not judged as a whole**" in runner.summary
    assert "| speed | - | no --baseline |" in runner.summary


@pytest.mark.campaign
@pytest.mark.timeout(900)
def test_check_keeps_its_codes_and_writes_the_history(runner: Runner) -> None:
    sweep = (
        "sweep --model gpt-tiny --gpus 2 --device sim --system impl-fsdp2 --wrap block --batch 1 -o runs/gate"
    )
    for words in (sweep, "baseline create runs/gate baseline.json"):
        command = [sys.executable, "-m", "fsdpbench", *words.split()]
        subprocess.run(command, cwd=runner.folder, check=True, capture_output=True, timeout=300)
    author = ("-c", "user.name=test", "-c", "user.email=test@example.org")
    for words in (("init", "-q"), ("add", "baseline.json"), (*author, "commit", "-q", "-m", "Baseline")):
        subprocess.run(["git", *words], cwd=runner.folder, check=True)
    given = {"command": "check", "baseline": "baseline.json", "page": "true"}
    job = runner.run(given)
    assert job.code == 0, job.log
    assert "all figures are equal" in runner.summary
    assert "<html" in Path(job.outputs["page"]).read_text()
    baseline = runner.folder / "baseline.json"
    baseline.write_text(re.sub(r'("peak_reserved_bytes": )\d+', r"\g<1>1", baseline.read_text()))
    assert runner.run(given).code in (1, 3)


@pytest.mark.campaign
@pytest.mark.timeout(900)
def test_it_installs_from_its_own_checkout(runner: Runner, tmp_path: Path) -> None:
    """What is installed has the skills and the schemas, as files."""
    venv.create(tmp_path / "own", with_pip=True)
    runner.variables |= {"PATH": f"{tmp_path / 'own' / 'bin'}:{runner.variables['PATH']}", "PIP_NO_DEPS": "1"}
    job = runner.run({}, first="Install fsdpbench")
    assert "::error::prove needs script" in job.log
    (package,) = (tmp_path / "own" / "lib").glob("*/site-packages/fsdpbench/cli/agents")
    assert len(list((package / "skills").glob("*.md"))) == 3
    assert (package / "schemas" / "plan.schema.json").is_file()
    assert not (package / "skills").is_symlink()
