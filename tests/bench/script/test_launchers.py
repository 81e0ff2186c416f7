"""Launchers run the program of their worker in the simulated process, and start no other."""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from fsdpbench.base.configuration.script_source import ScriptSource, StepsBy

if TYPE_CHECKING:
    from conftest import RunScript

WORKER = """
import os, sys
import torch
import torch.distributed as dist
assert __name__ == "__main__"
dist.init_process_group("nccl")
assert dist.get_world_size() == 8
print("worker", os.getpid(), sys.argv[1:], os.environ["RANK"], os.environ.get("OF_THE_LAUNCHER"))
model = torch.nn.Linear(64, 64).cuda()
optimizer = torch.optim.SGD(model.parameters())
for _ in range(2):
    model(torch.ones(4, 64, device="cuda")).sum().backward()
    optimizer.step()
"""
# As deepspeed's launcher: a process for each rank, each with its environment.
LAUNCHER = """
import os, subprocess, sys
if __name__ == "__main__":
    started = []
    for rank in range(8):
        environment = {**os.environ, "RANK": str(rank), "WORLD_SIZE": "8", "OF_THE_LAUNCHER": "yes"}
        started.append(subprocess.Popen([sys.executable, "-u", *sys.argv[1:]], env=environment))
    assert [process.wait() for process in started] == [0] * 8
"""


@pytest.fixture
def worker(tmp_path: Path) -> Path:
    path = tmp_path / "worker.py"
    path.write_text(WORKER)
    return path


@pytest.mark.parametrize("module", ["torch.distributed.run", "torch.distributed.launch"])
@pytest.mark.parametrize("counts", [["--nproc-per-node=8"], ["--standalone"]])
def test_torchrun(module: str, counts: list[str], worker: Path, run_script: RunScript) -> None:
    run = run_script(None, *counts, str(worker), "--lr", "1", module=module)
    assert run.result["status"] == "ok", run.cause
    assert run.result["config"]["model"] == "worker.py"
    assert run.output.startswith("worker")
    assert run.output.count("worker") == 1
    own = ["--local-rank=0"] if module.endswith("launch") else []
    assert f"{[*own, '--lr', '1']} 0 None" in run.output


def test_the_command_torchrun_and_a_module(worker: Path, run_script: RunScript) -> None:
    command = Path(sys.executable).with_name("torchrun")
    run = run_script(command, "--nproc-per-node", "8", str(worker))
    assert run.result["status"] == "ok", run.cause


def test_another_number_of_processes_is_an_error(worker: Path, run_script: RunScript) -> None:
    run = run_script(None, "--nproc-per-node", "4", str(worker), module="torch.distributed.run")
    assert run.result["status"] == "error"
    assert "1 x 4 processes" in run.cause
    assert "--gpus 4" in run.cause


def test_a_launcher_of_processes_runs_this_rank_s(
    worker: Path, run_script: RunScript, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "deepspeed" / "launcher"
    package.mkdir(parents=True)
    for folder in (package.parent, package):
        (folder / "__init__.py").touch()
    (package / "runner.py").write_text(LAUNCHER)
    monkeypatch.syspath_prepend(tmp_path)
    caller = tmp_path / "start.py"
    caller.write_text(
        textwrap.dedent(
            f"""
            import runpy, sys
            sys.path.insert(0, {str(tmp_path)!r})
            runpy.run_module("deepspeed.launcher.runner", run_name="__main__", alter_sys=True)
            """
        )
    )
    run = run_script(caller, str(worker), "--steps", "3")
    assert run.result["status"] == "ok", run.cause
    assert run.output.count("worker") == 1
    assert "['--steps', '3'] 0 yes" in run.output


@pytest.mark.parametrize(
    "start",
    [
        "subprocess.run([sys.executable, '-m', 'torch.distributed.run', *words], check=True)",
        "os.execvp('torchrun', ['torchrun', *words])",
    ],
)
def test_a_front_end_of_any_name(start: str, worker: Path, run_script: RunScript, tmp_path: Path) -> None:
    words = ["--nproc-per-node", "8", str(worker)]
    front = tmp_path / "front.py"
    front.write_text(f"import os, subprocess, sys\nwords = {words} + sys.argv[1:]\n{start}\n")
    run = run_script(front, "--lr", "1")
    assert run.result["status"] == "ok", run.cause
    assert run.output.count("worker") == 1
    assert "['--lr', '1'] 0 None" in run.output


def test_what_lies_behind_an_exit_code(run_script: RunScript, tmp_path: Path) -> None:
    script = tmp_path / "front.py"
    script.write_text(
        "import sys, torch.distributed as dist\n"
        "options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)\n"
        "options.config.cga_cluster_size = 2\n"
        "try:\n    open('absent.yaml')\nexcept OSError:\n    sys.exit(2)\n"
    )
    run = run_script(script)
    assert "exit code 2 after FileNotFoundError" in run.cause
    assert "absent.yaml" in run.cause


def test_the_key_follows_the_program(worker: Path, tmp_path: Path) -> None:
    def read() -> ScriptSource:
        arguments = ("--nproc-per-node", "8", str(worker))
        command = Path(sys.executable).with_name("torchrun")
        return ScriptSource.read(command, arguments, StepsBy.OPTIMIZER, to_the_end=False)

    before = read()
    assert before.own_folder == tmp_path
    worker.write_text(WORKER + "\n")
    assert read().digest != before.digest
