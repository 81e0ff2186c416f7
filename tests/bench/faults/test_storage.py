"""Disks that are full, folders that cannot be written, files that are broken, clocks that jump."""

from __future__ import annotations

import os
import resource
import shutil
import sqlite3
import subprocess
from pathlib import Path
from typing import Any

import pytest

from fsdpbench.base.errors import BenchError, ExitCode
from fsdpbench.engine.results.store import Store

SIM = (
    "--model",
    "gpt-125m",
    "--shape",
    "layers=2",
    "--gpus",
    "8",
    "--device",
    "sim",
    "--system",
    "impl-fsdp2",
)
TWO = (*SIM, "--batch", "1,2", "--wrap", "block", "--backward-prefetch", "pre", "--reduce-dtype", "fp32")
JUMPING_CLOCK = """
import time
_real, _calls = time.time, [0]
def _jumping():
    _calls[0] += 1
    return _real() + (86400.0 if _calls[0] % 3 else -86400.0)
time.time = _jumping
"""


@pytest.mark.campaign
def test_a_trace_that_does_not_fit_on_the_disk_is_a_result(sweep: Any) -> None:
    """A limit on the size of files stops the trace (40 kB and more) as a full disk does; the rest goes on."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (24 << 10, 24 << 10))

    # Python (before 3.14) keeps bytecode that was cut off, and no later process could import it.
    sweep.environment = {"PYTHONDONTWRITEBYTECODE": "1"}
    code, _, stderr = sweep.run(*TWO, preexec_fn=limit)
    assert len(sweep.results) == 2
    for result in sweep.results.values():
        assert result["status"] == "error"
        assert "File too large" in result["cause"]["message"]
        assert result["traces"] == []
    # The index and the report do not fit either, and that is said in one line.
    assert code == 5
    assert "cannot be written" in stderr.splitlines()[-1]
    assert "Traceback" not in stderr
    assert sweep.leftovers == []


@pytest.mark.campaign
def test_a_full_disk_ends_the_sweep_and_keeps_what_is_finished(sweep: Any, tmp_path: Path) -> None:
    """A real file system of 600 KiB, mounted in a namespace of the test's own."""
    small = tmp_path / "small"
    small.mkdir()
    allowed = ["unshare", "-rm", "mount", "-t", "tmpfs", "-o", "size=600k", "tmpfs", str(small)]
    if shutil.which("unshare") is None or subprocess.run(allowed, capture_output=True).returncode:
        pytest.skip("this system lets nobody mount a small file system in a namespace")
    inside, kept = small / "run", tmp_path / "kept"
    script = f'mount -t tmpfs -o size=600k tmpfs {small} && "$@"; code=$?; cp -r {inside} {kept}; exit $code'
    sweep.folder, sweep.prefix = inside, ("unshare", "-rm", "sh", "-c", script, "sh")
    batches = ",".join(map(str, range(1, 21)))
    rest = ("--wrap", "block", "--backward-prefetch", "pre", "--reduce-dtype", "fp32")
    code, _, stderr = sweep.run(*SIM, *rest, "--batch", batches)
    assert code == 5, stderr
    assert "cannot be written" in stderr.splitlines()[-1]
    assert "MiB free" in stderr.splitlines()[-1]
    assert "Traceback" not in stderr
    sweep.folder = kept
    statuses = {result["status"] for result in sweep.results.values()}
    assert "ok" in statuses
    assert statuses <= {"ok", "error"}
    causes = [result["cause"]["message"] for result in sweep.results.values() if result["status"] == "error"]
    assert all("No space left on device" in cause or "the disk is full" in cause for cause in causes)


def test_a_folder_that_cannot_be_written_is_said_in_one_line() -> None:
    with pytest.raises(BenchError, match="/proc/fsdpbench: cannot be used") as caught:
        Store.open_or_create(Path("/proc/fsdpbench"))
    assert caught.value.exit_code is ExitCode.BENCH_FAILED
    assert "\n" not in str(caught.value)


def test_broken_files_are_made_again_and_nothing_else_is(fsdpbench: Any, sweep: Any) -> None:
    done = fsdpbench("sweep", *TWO, "-o", str(sweep.folder))
    assert done.returncode == 0, done.stderr
    broken, whole = sorted(sweep.results)
    before = (sweep.folder / whole / "result.json").stat().st_mtime_ns
    good = (sweep.folder / broken / "result.json").read_text()
    (sweep.folder / broken / "result.json").write_text(good[: len(good) // 2])
    (sweep.folder / "results.sqlite").write_bytes(b"\0not a database" * 100)
    (sweep.folder / "results.sqlite.partial").write_bytes(b"left behind")
    again = fsdpbench("sweep", *TWO, "-o", str(sweep.folder))
    assert again.returncode == 0, again.stderr
    assert "1 of 2 configurations are done already" in again.stderr
    assert len(sweep.results) == 2
    assert (sweep.folder / whole / "result.json").stat().st_mtime_ns == before
    with sqlite3.connect(sweep.folder / "results.sqlite") as index:
        assert index.execute("SELECT count(*) FROM results").fetchone() == (2,)


@pytest.mark.campaign
def test_a_clock_that_jumps_by_days_changes_nothing(
    sweep: Any, tiny: tuple[str, ...], tmp_path: Path
) -> None:
    """`time.time` jumps in every process, ranks included, and files have times of another century."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(JUMPING_CLOCK)
    inherited = os.environ.get("PYTHONPATH")
    path = str(tmp_path / "site") + (f":{inherited}" if inherited else "")
    sweep.environment = {"PYTHONPATH": path}
    space = (*tiny, "--system", "impl-fsdp2,torch-ddp", "--wrap", "block", "--backward-prefetch", "pre")
    space += ("--strategy", "FULL_SHARD")
    code, _, stderr = sweep.run(*space, "--timeout", "60")
    assert code == 0, stderr
    assert [result["status"] for result in sweep.results.values()] == ["ok", "ok"]
    assert all(0 < result["step_time_s"] < 60 for result in sweep.results.values())
    for name, when in zip(sweep.results, (0, 4_000_000_000), strict=True):
        os.utime(sweep.folder / name / "result.json", (when, when))
    code, _, stderr = sweep.run(*space, "--timeout", "60")
    assert code == 0, stderr
    assert "2 of 2 configurations are done already" in stderr
