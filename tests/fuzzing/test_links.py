"""Nothing that a command writes goes through a link: what it leads to has the same bytes afterwards.

Each command is run once in a folder of its own; whatever it wrote there is what it writes. Then each
such file and folder is replaced by a link, symbolic, hard, to nothing, to a folder, to itself, or by a pipe,
and the command is run again: with the results that are there, and with its first configuration damaged, so
that it runs again.
"""

from __future__ import annotations

import os
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from forked_commands import CommandServer, Outcome, violations
from workshop import SCRIPT, digest

SHAPE = "--model gpt --shape layers=1,d_model=32,heads=1,vocab=64,max_seq=16 --gpus 2 --device sim"
SWEEP = f"sweep {SHAPE} --system impl-fsdp2 --wrap block --batch 1 --max-points 1 -o run"
COMMANDS = {
    "sweep": (SWEEP,),
    "repeated": (f"{SWEEP} --repeat 2",),
    "run": (f"run {SHAPE} -o run",),
    "sanitized": (f"run {SHAPE} --sanitize -o run",),
    "script": ("run --script train.py --gpus 2 --device sim -o run",),
    "checked script": ("run --script train.py --gpus 2 --device sim --check-ranks 2 -o run",),
    "tune": (f"tune {SHAPE} --system impl-fsdp2 --wrap block --batch 1 --trials 2 --finalists 1 -o run",),
    "on a CPU": (f"run {SHAPE.replace('--device sim', '--device cpu')} -o run",),
    "report": (SWEEP, "report run"),
    "report in other forms": (
        SWEEP,
        "report run --format md -o page.md",
        "report run --format csv -o page.csv",
    ),
    "report of runs": (SWEEP, "report run run -o runs.html"),
    "watch": (SWEEP, "watch run --wait 5 --timeout 30"),
    "analyze": (SWEEP, "analyze run -o page.html"),
    "explain": (f"explain {SHAPE} --no-changes -o page.html",),
    "baseline": (SWEEP, "baseline create run baseline.json", "baseline update baseline.json"),
    "calibrate": ("calibrate --device sim --hardware h100-80gb --gpus 2 --quick -o profile.toml",),
}
KINDS = ("link", "hard link", "link to nothing", "link to a folder", "link to itself", "pipe")
ALWAYS = ("run/.lock", "run/.work-{point}", "run/.work-old-{point}", "run/.slurm", "run/{point}.run2")
"""What a command makes on its way and takes away again."""


@dataclass(frozen=True)
class Done:
    """A folder in which a command has run in ``seconds``, and what it wrote there, files and folders."""

    folder: Path
    written: tuple[str, ...]
    seconds: float


def inodes(folder: Path) -> dict[str, int]:
    """What is written is another file, by its inode, than the one before."""
    return {path.relative_to(folder).as_posix(): path.lstat().st_ino for path in sorted(folder.rglob("*"))}


def first_run(commands: CommandServer, folder: Path, words: tuple[str, ...]) -> Done:
    folder.mkdir(parents=True)
    (folder / "train.py").write_text(SCRIPT)
    before: dict[str, int] = {}
    began = time.monotonic()
    for each in words:
        began = time.monotonic()
        before = inodes(folder)
        done = commands.run_case(each.split(), folder, timeout=600)
        assert done.code == 0, str(done)
    seconds = time.monotonic() - began
    written = [name for name, inode in inodes(folder).items() if before.get(name) != inode]
    points = [name for name in inodes(folder) if name.startswith("run/") and name.endswith("/config.json")]
    for point in points[:1]:
        written += [each.format(point=Path(point).parent.name) for each in ALWAYS]
    # The script's own file is written where the script says, as Python writes it.
    others = dict.fromkeys(name for name in written if name not in ("run", "train.py", "checkpoint.pt"))
    return Done(folder, tuple(others), seconds)


def place(kind: str, path: Path, outside: Path) -> bool:
    """Put `kind` at `path`; False where it says nothing new."""
    was_folder = path.is_dir()
    before = path.read_bytes() if path.is_file() else b"a file that nobody wrote"
    if was_folder:
        if kind not in ("link", "link to nothing"):
            return False
        shutil.copytree(path, outside / "folder")
        shutil.rmtree(path)
    else:
        (outside / "folder").mkdir()
        path.unlink(missing_ok=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    (outside / "victim").write_bytes(before)
    kinds: dict[str, Callable[[], object]] = {
        "link": lambda: path.symlink_to(outside / ("folder" if was_folder else "victim")),
        "hard link": lambda: os.link(outside / "victim", path),
        "link to nothing": lambda: path.symlink_to(outside / "nothing"),
        "link to a folder": lambda: path.symlink_to(outside / "folder"),
        "link to itself": lambda: path.symlink_to(path.name),
        "pipe": lambda: os.mkfifo(path),
    }
    kinds[kind]()
    return True


def cases(done: Done) -> Iterator[tuple[str, str, bool]]:
    for name in done.written:
        for kind in KINDS:
            yield name, kind, False
            if name.startswith("run/") and kind in ("link", "hard link"):
                yield name, kind, True


def attack(
    commands: CommandServer, done: Done, words: str, case: tuple[str, str, bool], place_of: Path
) -> tuple[Outcome | None, list[str]]:
    name, kind, again = case
    work, outside = place_of / "work", place_of / "outside"
    shutil.copytree(done.folder, work)
    outside.mkdir()
    try:
        if not place(kind, work / name, outside):
            return None, []
        if again:
            for config in sorted(work.glob("run/*/config.json"))[:1]:
                if config.parent != work / name and not config.parent.is_symlink():
                    config.unlink(missing_ok=True)
        before = digest(outside)
        outcome = commands.run_case(words.split(), work, timeout=max(60, 10 * done.seconds))
        problems = violations(outcome, frozenset({5}))
        is_refused = f"{name}: cannot be used as a run folder" in str(outcome)
        if (
            outcome.code == 5
            and not is_refused
            and kind not in ("pipe", "link to itself", "link to a folder")
        ):
            problems.append("exit code 5")
        after = digest(outside)
        if after != before:
            changed = sorted(name for name in {*before, *after} if before.get(name) != after.get(name))
            problems.append(f"what is outside was changed: {changed}")
        return outcome, problems
    finally:
        shutil.rmtree(place_of)


@pytest.mark.campaign
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("name", COMMANDS)
def test_nothing_goes_through_a_link(
    commands: CommandServer, tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    done = first_run(commands, tmp_path / "first", COMMANDS[name])
    codes, failed = Counter[int | None](), []
    for number, case in enumerate(cases(done)):
        outcome, problems = attack(commands, done, COMMANDS[name][-1], case, tmp_path / f"case{number}")
        if outcome is not None:
            codes[outcome.code] += 1
        failed += [f"{name}, {case}: {problem}\n{outcome}" for problem in problems]
    with capsys.disabled():
        print(f"\n{name}: {sum(codes.values())} tried, {len(failed)} failed; exit codes {dict(codes)}")
    assert not failed, "\n\n".join(failed)


def test_a_report_leaves_what_links_lead_to(commands: CommandServer, tmp_path: Path) -> None:
    done = first_run(commands, tmp_path / "first", COMMANDS["report"])
    link = ("run/results.sqlite", "link", False)
    _, problems = attack(commands, done, "report run", link, tmp_path / "case")
    assert not problems


def test_the_attack_sees_what_was_changed(commands: CommandServer, tmp_path: Path) -> None:
    done = first_run(commands, tmp_path / "first", ("list models",))
    (done.folder / "named").write_text("a file")
    assert place("link", done.folder / "named", tmp_path)
    before = digest(tmp_path)
    (done.folder / "named").write_text("other")
    assert digest(tmp_path) != before
