"""Run folders damaged in every way we know: each command answers with one true line and an exit code of the
contract, and a sweep that goes on in such a folder ends with the results of one left alone.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import socket
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from forked_commands import CommandServer, violations

PARTS = 72
CASES_A_PART = 10
SPACE = (
    "--model gpt-125m --shape layers=2 --gpus 8 --device sim --wrap block --backward-prefetch pre "
    "--reduce-dtype fp32 --batch 1,2"
)
COMMANDS = (
    "report {run}",
    "report {run} --format md",
    "report {run} --format json",
    "report {run} --format csv",
    "report {point}",
    "analyze {run}",
    "analyze {run} --json",
    "analyze {point} --against {good}",
    "compare {good} {run}",
    "compare {run} {good} --json",
    "check {run} --baseline baseline.json",
    "baseline create {run} made.json",
    "sweep {run}/sweep.toml -o {run}",
    f"sweep {SPACE} -o {{run}}",
    f"sweep {SPACE} -o {{run}} --retry-failed --json",
    f"plan {SPACE} --no-predict",
)
FILES = (
    "sweep.toml",
    "results.sqlite",
    "report.html",
    ".lock",
    "{point}/config.json",
    "{point}/result.json",
    "{point}/result.json",
    "{point}/trace/rank0_trace.json.gz",
    "{point}/trace/rank0_record.json",
    "{point}/trace",
    "{point}/stderr.log",
    "{point}",
)
WRITTEN = ("results.sqlite", "report.html", ".lock", "sweep.toml")
"""What commands write: where something lies in their way that is no file, that is said with code 5."""
VALUES: tuple[Any, ...] = (
    None, "", "ok", "\x1b[31mred\r\n", "\ud800", "x" * 100_000, True, 0, -1, 2**63, 10**400, 1e308,
    float("nan"), float("inf"), [], [[]], {}, {"a": {"b": []}}, [None], ["-x", {"y": 1}],
)  # fmt: skip
NAMES = (
    b"new\nline", b"\x1b[2Jcleared", "ä ö".encode(), b"\xff\xfe", b"-o", b"=1+1",
    b"<script>alert(1)<", b"'; DROP TABLE results; --", b"a" * 200, b"%s{}$(id)`id`", b"..", b"point.run2",
)  # fmt: skip


@dataclass(frozen=True)
class Good:
    """A finished sweep that nobody damaged, beside `baseline.json`."""

    folder: Path
    results: dict[str, str]

    @property
    def run(self) -> Path:
        return self.folder / "good"


def results(run: Path) -> dict[str, str]:
    """The record, without dates and durations."""
    found = {}
    for path in sorted(run.glob("impl-*/result.json")):
        result = json.loads(path.read_text("utf-8-sig"))  # with a mark of its byte order too, as in the bench
        result.pop("bench")
        found[path.parent.name] = json.dumps(result, sort_keys=True)
    return found


@pytest.fixture(scope="module")
def good(commands: CommandServer, tmp_path_factory: pytest.TempPathFactory) -> Good:
    folder = tmp_path_factory.mktemp("run_folders")
    for words in (f"sweep {SPACE} -o good", "baseline create good baseline.json"):
        done = commands.run_case(words.split(), folder, timeout=120)
        assert done.code == 0, str(done)
    return Good(folder, results(folder / "good"))


@pytest.mark.campaign
@pytest.mark.timeout(700)
@pytest.mark.parametrize("part", range(PARTS))
def test_a_damaged_folder_is_answered(
    commands: CommandServer, good: Good, part: int, capsys: pytest.CaptureFixture[str]
) -> None:
    drawn = random.Random(part)
    failed, codes = [], Counter[int | None]()
    for case in range(CASES_A_PART):
        run = good.folder / f"run{part}-{case}"
        shutil.copytree(good.run, run)
        run, told, blocked = damage(run, drawn)
        words = COMMANDS[(case + part) % len(COMMANDS)].split()
        point = f"{run}/{drawn.choice(sorted(good.results))}"
        argv = [word.format(run=run, point=point, good=good.run) for word in words]
        outcome = commands.run_case(argv, good.folder, timeout=60)
        codes[outcome.code] += 1
        problems = violations(outcome, frozenset({5}) if blocked else frozenset())
        if words[0] == "sweep" and outcome.code == 0:
            problems += _wrong_results(good, results_of(run), figures_may_differ="result.json" in told)
        if results(good.run) != good.results:
            problems.append("another folder was changed")
        failed += [f"part {part} case {case}, {told}: {problem}\n{outcome}" for problem in problems]
        remove(run)
    with capsys.disabled():
        print(f"\npart {part}: {CASES_A_PART} tried, {len(failed)} failed; exit codes {dict(codes)}")
    assert not failed, "\n\n".join(failed)


def _wrong_results(good: Good, found: dict[str, str], *, figures_may_differ: bool) -> list[str]:
    """What is wrong after a sweep went on. A figure that was changed for another possible one looks true."""
    if figures_may_differ:
        whole = found.keys() == good.results.keys() and "unreadable" not in found
        return [] if whole else ["its results are not whole"]
    return [] if found == good.results else ["its results are not those of an undisturbed sweep"]


def results_of(run: Path) -> dict[str, str]:
    try:
        return results(run)
    except (OSError, ValueError) as error:
        return {"unreadable": str(error)}


def remove(run: Path) -> None:
    shutil.rmtree(run, ignore_errors=True)
    if run.is_symlink() or run.exists():
        run.unlink()


def damage(run: Path, drawn: random.Random) -> tuple[Path, str, bool]:
    """Damage `run` in one to three ways: where it lies now, what was done, and whether something that is no
    file lies where commands write."""
    told, blocked = [], False
    for _ in range(drawn.choice((1, 1, 1, 2, 3))):
        kind = drawn.choice(("content", "content", "field", "field", "field", "place", "place", "name"))
        points = sorted(path.name for path in run.glob("impl-*") if path.is_dir())
        if not points:
            break
        file = drawn.choice(FILES).format(point=drawn.choice(points))
        if not (run / file).parent.is_dir():
            continue
        if kind == "field":
            told.append(_damage_field(run / drawn.choice(points), drawn))
        elif kind == "content":
            told.append(f"{file}: {_damage_content(run / file, drawn)}")
        elif kind == "place":
            told.append(f"{file}: {_damage_place(run / file, drawn)}")
            blocked |= file in WRITTEN
        elif kind == "name":
            new = os.fsencode(run) + b"-" + drawn.choice(NAMES).replace(b"..", b"dots")
            if drawn.random() < 0.5:
                os.rename(run, new)
                run = Path(os.fsdecode(new))
                told.append(f"renamed to {new!r}")
            else:
                copy = os.fsencode(run) + b"/" + drawn.choice(NAMES).replace(b"..", b"dots") + b"-deadbeef"
                with contextlib.suppress(shutil.Error):  # a pipe cannot be copied; the rest is
                    # Links stay links: one to /dev/zero would fill the disk.
                    shutil.copytree(
                        run / points[0], Path(os.fsdecode(copy)), symlinks=True, dirs_exist_ok=True
                    )
                told.append(f"a configuration of the name {copy[-40:]!r}")
    return run, "; ".join(told), blocked


def _damage_content(path: Path, drawn: random.Random) -> str:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
        return "removed"
    before = path.read_bytes() if path.is_file() else b'{"pid": 1, "host": "elsewhere"}'
    path.unlink(missing_ok=True)
    kinds: dict[str, bytes] = {
        "empty": b"",
        "cut in half": before[: len(before) // 2],
        "cut at a random byte": before[: drawn.randrange(len(before) + 1)],
        "one byte changed": _flipped(before, drawn),
        "zeros": bytes(4096),
        "random bytes": drawn.randbytes(3000),
        "not UTF-8": b'{"a": "\xff\xfe\xc3"}',
        "with a mark of its order": b"\xef\xbb\xbf" + before,
        "twice": before + before,
        "a list": b"[]",
        "a string": b'"x"',
        "an empty object": b"{}",
        "nested deeply": b"[" * 100_000,
        "objects nested deeply": b'{"a":' * 50_000,
        "a number of 5,000 digits": b'{"status": ' + b"9" * 5000 + b"}",
        "TOML": b'schema = 1\npoints = [1, "../../etc", "\\u001b[2J"]\n',
        "escape sequences": b"\x1b]0;title\x07\x1b[2J",
    }
    name = drawn.choice(sorted(kinds))
    path.write_bytes(kinds[name])
    return name


def _flipped(before: bytes, drawn: random.Random) -> bytes:
    if not before:
        return b"x"
    place = drawn.randrange(len(before))
    return before[:place] + bytes([before[place] ^ (1 << drawn.randrange(8))]) + before[place + 1 :]


def _damage_field(point: Path, drawn: random.Random) -> str:
    """Another value, or none, at a random place of one of its records."""
    name = drawn.choice(("result.json", "result.json", "config.json", "trace/rank0_record.json"))
    try:
        content = json.loads((point / name).read_text())
        node, where = content, ""
        while True:
            key = drawn.choice(sorted(node) if isinstance(node, dict) else range(len(node)))
            where += f".{key}"
            if not node[key] or not isinstance(node[key], dict | list) or drawn.random() < 0.5:
                break
            node = node[key]
    except (OSError, ValueError, TypeError, IndexError, KeyError, RecursionError):
        return f"{name}: damaged already"
    if drawn.random() < 0.2:
        del node[key]
        told = "removed"
    else:
        value = drawn.choice(VALUES)
        node[key], told = value, f"{value!r:.40}"
    (point / name).write_text(json.dumps(content))
    return f"{name}{where} = {told}"


def _damage_place(path: Path, drawn: random.Random) -> str:
    """Something else at `path`."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    elif path.is_symlink() or path.exists():
        path.unlink()
    kinds: dict[str, Callable[[], object]] = {
        "missing": lambda: None,
        "a folder": path.mkdir,
        "a folder with something in it": lambda: (path / "sub").mkdir(parents=True),
        "a pipe": lambda: os.mkfifo(path),
        "a socket": lambda: _socket(path),
        "a link to itself": lambda: path.symlink_to(path.name),
        "a link to nothing": lambda: path.symlink_to("nothing"),
        "a link to the folder above": lambda: path.symlink_to(".."),
        "a link to /dev/zero": lambda: path.symlink_to("/dev/zero"),
        "a link to /dev/full": lambda: path.symlink_to("/dev/full"),
        "a file": lambda: path.write_text("a file"),
    }
    name = drawn.choice(sorted(kinds))
    kinds[name]()
    return name


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as bound:
        before = Path.cwd()
        os.chdir(path.parent)  # such names are short
        try:
            bound.bind(path.name)
        finally:
            os.chdir(before)
