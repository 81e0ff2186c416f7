"""Few file descriptors: one line that names the limit and the way out, and nothing that was finished is lost.

Below five Python itself does not start: the loader and `site` say so before anything of this project runs.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fsdpbench.cli import startup
from fsdpbench.errors import BenchError

SHAPE = "--model gpt --shape layers=1,d_model=32,heads=1,vocab=64,max_seq=16 --gpus 2 --device sim"
COMMANDS = (
    "list models", "--version", "doctor --quick", f"run {SHAPE} -o run", f"plan {SHAPE}", f"explain {SHAPE}",
    f"sweep {SHAPE} --batch 1,2 -o swept", "report swept", "analyze swept",
    "compare swept swept",
    "check swept --baseline none.json", "baseline create swept b.json", f"tune {SHAPE} --trials 2 -o tuned",
    "calibrate --device sim --hardware h100-80gb -o p.toml", "validate --only none", "atlas", "watch swept --once",
    "reproduce", "completion bash",
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
        counts = range(_FIRST, 64) if place == 0 else (_FIRST, 6, 8, 12, 16, 33, 63)
        for files in counts:
            done = run(words, tmp_path, files)
            tried += 1
            line = f"fsdpbench: {files} open files are the limit here, and 64 are needed: ulimit -n 1024\n"
            if (done.returncode, done.stderr) != (5, line):
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
    whole = results(tmp_path / "run")
    codes = {}
    for held in range(20, 62, 2):
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
        done = run(words, tmp_path, 64, held=held)
        assert done.returncode in (0, 4, 5), done.stderr
        assert "Traceback" not in done.stderr, done.stderr
        codes[held] = done.returncode
        kept = results(tmp_path / "run")
        assert kept.items() <= whole.items()
        again = run(words + " --retry-failed", tmp_path, 1024)
        assert again.returncode == 0, again.stderr
        assert results(tmp_path / "run") == whole
    with capsys.disabled():
        print(f"\nheld and exit codes: {codes}")


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
    assert raised == [(64, 4096)]
