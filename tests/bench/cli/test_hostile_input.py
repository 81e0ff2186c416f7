"""Hostile words and damaged files: refused in one line that names them. `tests/fuzzing` tries hundreds."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from fsdpbench.base.reading import printable
from fsdpbench.base.writing import write_whole

Called = Callable[..., CompletedProcess[str]]
SHAPE = "layers=2,d_model=64,heads=2,vocab=256,max_seq=64"
TINY = ("--model", "gpt", "--shape", SHAPE, "--device", "sim", "--gpus", "2")
SPACE = f"""\
model = "gpt"
shape = "{SHAPE}"
device = "sim"
gpus = 2
gpus_per_node = 2
max_points = 1
batch = [1, 2]
"""
READ_BY = {
    "space.toml": ("plan", "space.toml", "--no-predict"),
    "profile.toml": ("plan", "space.toml", "--hardware", "profile.toml", "--no-predict"),
}
REFUSED: tuple[tuple[tuple[str, ...], str], ...] = (
    (("plan", "--no-predict", *TINY, "--timeout", "nan"), "--timeout"),
    (("plan", "--no-predict", *TINY, "--wrap", "size:inf"), "size:inf"),
    (("plan", "--no-predict", *TINY, "--gpus", "1000000000"), "--gpus"),
    (("plan", "--no-predict", *TINY, "--gpus-per-node", "0"), "--gpus-per-node"),
    (("plan", "--no-predict", *TINY, "--seed", "18446744073709551615"), "seed"),
    (("plan", "--no-predict", *TINY, "--set", "seq=" + "9" * 5000), "seq"),
    (("plan", "--no-predict", *TINY, "--hardware", "x" * 1_000_000), "unknown hardware"),
    (("plan", "--no-predict", "--model", "gpt\x1b[31m"), r"gpt\x1b[31m"),
    (("run", "--nope"), "--nope"),
    (("plan", "--no-predict", *TINY, "--when", 'a=" => batch=1'), "No closing quotation"),
    (("plan", "--no-predict", *TINY, "--when", "gpus=x => batch=1"), "gpus=x"),
    (("sweep", *TINY, "--launcher", "slurm", "--partition", "a\n#SBATCH --wrap=x"), "--partition"),
    (("report", "n" * 5000), "not a valid path"),
    (("tune", *TINY, "--real-time", "nan"), "--real-time"),
)
SPOILT: tuple[tuple[str, str, str], ...] = (
    ("space.toml", SPACE.replace("gpus_per_node = 2", "gpus_per_node = 0"), "gpus_per_node"),
    ("space.toml", SPACE.replace("gpus_per_node", "gpus_per_nod"), "Did you mean gpus_per_node"),
    ("space.toml", SPACE.replace("max_points = 1", "max_points = nan"), "max_points"),
    ("space.toml", SPACE.replace("[1, 2]", f"[{'9' * 5000}]"), "beyond 2^63-1"),
    ("space.toml", "a = " + "[" * 5000, "nested"),
    ("profile.toml", 'base = "h100-80gb"\nname = "a"\n[memory]\ncapacity_gib = nan\n', "memory.capacity_gib"),
    ("profile.toml", 'base = "h100-80gb"\nname = "a"\ngpus_per_nod = 8\n', "did you mean gpus_per_node"),
    ("profile.toml", 'base = "h100-80gb"\nname = "a"\n[nic]\ngb_s_per_node = 1e300\n', "nic.gb_s_per_node"),
    ("profile.toml", 'base = "h100-80gb"\nname = "a"\ngpus_per_node = 0\n', "gpus_per_node = 0"),
)


@pytest.mark.parametrize(("words", "named"), REFUSED, ids=[str(number) for number in range(len(REFUSED))])
def test_hostile_words_are_refused_by_name(fsdpbench: Called, words: tuple[str, ...], named: str) -> None:
    assert named in refusal(fsdpbench(*words))


@pytest.mark.parametrize(
    ("name", "content", "named"), SPOILT, ids=[name + named for name, _, named in SPOILT]
)
def test_what_is_wrong_in_a_file_is_named(
    fsdpbench: Called, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, content: str, named: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("space.toml").write_text(SPACE)
    Path(name).write_text(content)
    told = refusal(fsdpbench(*READ_BY[name]))
    assert named in told
    assert name in told


def refusal(done: CompletedProcess[str]) -> str:
    assert done.returncode == 2, done.stderr
    told = done.stderr.splitlines()[-1]
    assert told.startswith("fsdpbench: ")
    assert done.stderr.count("fsdpbench: ") == 1
    assert told == printable(told)
    assert len(told) < 1100
    return told


def test_a_pipe_is_written_to_and_a_link_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "target").write_text("old")
    (tmp_path / "link").symlink_to("target")
    write_whole(tmp_path / "link", "new")
    assert not (tmp_path / "link").is_symlink()
    assert ((tmp_path / "link").read_text(), (tmp_path / "target").read_text()) == ("new", "old")
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    write_whole(tmp_path / "pipe", "told")
    assert os.read(reader, 10) == b"told"
    assert (tmp_path / "pipe").is_fifo()
    os.close(reader)


def test_what_no_file_can_be_written_to_is_a_wrong_word(fsdpbench: Called, tmp_path: Path) -> None:
    assert "is a directory" in refusal(fsdpbench("report", "run", "-o", str(tmp_path)))
    assert "there is no folder" in refusal(fsdpbench("report", "run", "-o", str(tmp_path / "no" / "file")))


def test_a_batch_beyond_any_memory_is_an_answer(fsdpbench: Called, tmp_path: Path) -> None:
    """Neither drawn on the host nor too many FLOPs for the record."""
    target = ("--model", "gpt-2.8b", "--gpus", "8", "--device", "sim", "--batch", "1000000")
    done = fsdpbench("run", *target, "-o", str(tmp_path / "run"))
    assert done.returncode == 0, done.stderr
    assert "oom: rank 0: CUDA out of memory" in done.stdout


def test_a_sweep_of_which_nothing_is_left_makes_no_folder(fsdpbench: Called, tmp_path: Path) -> None:
    done = fsdpbench("sweep", *TINY, "--system", "single", "-o", str(tmp_path / "new"))
    assert done.returncode == 2
    assert "nothing is left to run" in done.stderr
    assert not any(tmp_path.glob("new*"))
