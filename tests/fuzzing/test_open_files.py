"""Few file descriptors: one line that names the limit and the way out, and nothing that was finished is lost.

Below five Python itself does not start: the loader and `site` say so before anything of this project runs.
"""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fsdpbench.base.errors import BenchError
from fsdpbench.cli import startup

SHAPE = "--model gpt --shape layers=1,d_model=32,heads=1,vocab=64,max_seq=16 --gpus 2 --device sim"
COMMANDS = (
    "list models", "--version", "doctor --quick", f"run {SHAPE} -o run", f"plan {SHAPE}", f"explain {SHAPE}",
    f"expect {SHAPE} --measured 1s",
    f"sweep {SHAPE} --batch 1,2 -o swept", "report swept", "analyze swept",
    "compare swept swept",
    "check swept --baseline none.json", "baseline create swept b.json", f"tune {SHAPE} --trials 2 -o tuned",
    "calibrate --device sim --hardware h100-80gb -o p.toml", "validate --only none", "atlas",
    "watch swept --wait 1",
    "reproduce", "completion bash", "prove none.py --only speed", "mcp --skills skills",
    "upgrade none.py --python-from none --python-to none",
)  # fmt: skip
_FIRST = 5
_PROGRAM = ("-c", "import sys; from fsdpbench.cli import main; main()")


def run(
    words: str, folder: Path, files: int, held: int = 0, timeout: float = 120
) -> subprocess.CompletedProcess[str]:
    """A command that may open so many files, of which `held` are open already."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))

    handles = [os.open(os.devnull, os.O_RDONLY) for _ in range(held)]
    try:
        return subprocess.run(
            [sys.executable, *_PROGRAM, *words.split()],
            cwd=folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout,
            preexec_fn=limit,
            pass_fds=handles,
            check=False,
        )
    finally:
        for handle in handles:
            os.close(handle)


@pytest.mark.campaign
@pytest.mark.timeout(3000)
def test_at_every_count_the_limit_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    failed, tried = [], 0
    for place, words in enumerate(COMMANDS):
        counts = range(_FIRST, 60) if place == 0 else (_FIRST, 6, 8, 12, 16, 33, 59)
        for files in counts:
            done = run(words, tmp_path, files)
            tried += 1
            line = rf"fsdpbench: {files} open files are the limit here, and 6\d are needed: ulimit -n 1024\n"
            if done.returncode != 5 or not re.fullmatch(line, done.stderr):
                failed.append(f"{words}, {files}: {done.returncode} {done.stderr[-400:]}")
    assert os.listdir(tmp_path) == []
    with capsys.disabled():
        print(f"\n{tried} tried, {len(failed)} failed")
    assert not failed, "\n".join(failed)


@pytest.mark.campaign
@pytest.mark.timeout(3000)
def test_a_sweep_that_ran_out_of_files_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = f"sweep {SHAPE} --batch 1,2,4 --wrap block,root --jobs 4 -o run"
    assert run(words, tmp_path, 1024).returncode == 0
    refused = run(words, tmp_path, 64, held=20)
    assert refused.returncode == 5
    assert "64 open files are the limit here" in refused.stderr
    whole = results(tmp_path / "run")
    codes = {}
    for jobs in (1, 2, 8, 12):  # of more than a machine has processors
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
        done = run(words.replace("--jobs 4", f"--jobs {jobs}"), tmp_path, 64)
        assert done.returncode in (0, 4, 5), done.stderr
        assert "Traceback" not in done.stderr, done.stderr
        codes[jobs] = done.returncode
        kept = results(tmp_path / "run")
        assert kept.items() <= whole.items()
        again = run(words + " --retry-failed", tmp_path, 1024)
        assert again.returncode == 0, again.stderr
        assert results(tmp_path / "run") == whole
    with capsys.disabled():
        print(f"\njobs and exit codes: {codes}")


def results(run_folder: Path) -> dict[str, str]:
    found = {}
    for path in run_folder.glob("impl-*/result.json"):
        result = json.loads(path.read_text())
        result.pop("bench")
        if result["status"] == "ok":
            found[path.parent.name] = json.dumps(result, sort_keys=True)
    return found


@pytest.mark.parametrize("soft", [0, 3, 12, 63])
def test_too_few_files_are_refused(soft: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(startup.resource, "getrlimit", lambda which: (soft, soft))
    with pytest.raises(BenchError, match=f"{soft} open files are the limit here"):
        startup.check_place()


def test_a_limit_that_may_be_raised_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(startup.resource, "getrlimit", lambda which: (12, 4096))
    raised = []
    monkeypatch.setattr(startup.resource, "setrlimit", lambda which, limits: raised.append(limits))
    startup.check_place()
    assert raised[0][0] >= 59
    assert raised[0][1] == 4096
