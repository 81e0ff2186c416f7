"""A baseline is made of whole sweeps: what failed or is not finished is named, and left out when told so."""

from __future__ import annotations

import math
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from fsdpbench.answers.check.records.baseline import Baseline
from fsdpbench.base.errors import ExitCode

from .gate_edits import Files, in_result, name_of, new_status, read, write
from .gate_files import committed, repeated

CommandLine = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return committed(tmp_path)


def create(fsdpbench: CommandLine, files: Files, *words: str) -> subprocess.CompletedProcess[str]:
    return fsdpbench("baseline", "create", str(files.folder), str(files.baseline), *words)


@pytest.mark.parametrize(
    ("mutate", "named"),
    [
        (new_status(0, "error"), "ended with error (rank 0: it was made so)"),
        (new_status(0, "crash"), "ended with crash"),
        (new_status(0, "timeout"), "ended with timeout"),
        (in_result(0, ("step_time_s",), math.nan), "step_time_s is nan (not finite)"),
        (in_result(0, ("step_time_s",), None), "step_time_s is unknown"),
        (in_result(0, ("work", "kernels"), "many"), "kernels is 'many' (no number)"),
        (in_result(0, ("status",), "splendid"), "status must be one of ok"),
        (lambda files: shutil.rmtree(files.first_runs[0]), "cannot be read"),
        (lambda files: (files.first_runs[0] / "result.json").write_text("{"), "is not usable JSON"),
    ],
)
def test_what_is_not_whole_is_refused_by_name(
    files: Files, fsdpbench: CommandLine, mutate: Callable[[Files], object], named: str
) -> None:
    name, untouched = name_of(files.first_runs[0]), files.baseline.read_bytes()
    mutate(files)
    refused = create(fsdpbench, files)
    assert refused.returncode == ExitCode.CANNOT_JUDGE
    assert name in refused.stderr
    assert named in refused.stderr
    assert "--leave-out NAME" in refused.stderr
    assert files.baseline.read_bytes() == untouched
    done = create(fsdpbench, files, "--leave-out", name)
    assert done.returncode == 0, done.stderr
    (stored,) = Baseline.read(files.baseline).sets.values()
    assert stored.left_out == [name]
    assert name not in stored.configurations


def test_what_is_left_out_is_told_and_not_judged(files: Files, fsdpbench: CommandLine) -> None:
    name = name_of(files.first_runs[0])
    new_status(0, "error")(files)
    assert create(fsdpbench, files, "--leave-out", name).returncode == 0
    checked = fsdpbench("check", str(files.folder), "--baseline", str(files.baseline))
    assert checked.returncode == ExitCode.OK, checked.stderr
    assert f"left out of the baseline: {name}" in checked.stdout


def test_a_name_that_the_sweep_does_not_have_is_refused(files: Files, fsdpbench: CommandLine) -> None:
    name = name_of(files.first_runs[0])
    refused = create(fsdpbench, files, "--leave-out", name[:-1])
    assert refused.returncode == ExitCode.USAGE
    assert f"did you mean {name}" in refused.stderr


def test_answers_are_kept_and_nothing_at_all_is_refused(files: Files, fsdpbench: CommandLine) -> None:
    names = [name_of(first) for first in files.first_runs]
    assert (
        create(fsdpbench, files, *(f"--leave-out={name}" for name in names)).returncode
        == ExitCode.CANNOT_JUDGE
    )
    new_status(0, "oom")(files)
    assert create(fsdpbench, files).returncode == 0
    (stored,) = Baseline.read(files.baseline).sets.values()
    assert [record.status for record in stored.configurations.values()].count("oom") == 1


def test_a_round_that_was_interrupted_is_not_finished(tmp_path: Path, fsdpbench: CommandLine) -> None:
    files = repeated(tmp_path, fsdpbench)
    shutil.rmtree(files.runs[-1])
    refused = create(fsdpbench, files)
    assert refused.returncode == ExitCode.CANNOT_JUDGE
    assert f"{name_of(files.first_runs[0])}: has 11 of 12 runs" in refused.stderr


def test_two_configurations_of_one_name_are_refused(files: Files, fsdpbench: CommandLine) -> None:
    first, second = files.first_runs
    write(second / "config.json", {**read(second / "config.json"), "name": name_of(first)})
    refused = fsdpbench("compare", str(files.folder), str(files.folder))
    assert refused.returncode == ExitCode.CANNOT_JUDGE
    assert f"two configurations named {name_of(first)}" in refused.stderr


def test_an_older_sweep_with_a_broken_result_cannot_be_judged_by(
    files: Files, fsdpbench: CommandLine, tmp_path: Path
) -> None:
    newer = tmp_path / "newer"
    shutil.copytree(files.folder, newer)
    (files.first_runs[0] / "result.json").write_text("{")
    judged = fsdpbench("compare", str(files.folder), str(newer))
    assert judged.returncode == ExitCode.CANNOT_JUDGE
    assert f"{name_of(files.first_runs[0])}: on the older side" in judged.stderr
