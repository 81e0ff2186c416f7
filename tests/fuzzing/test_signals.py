"""Signals at random moments, a third of them while a command starts: it is gone within two seconds, with all
that it started, without a traceback, and what was finished is as if nothing had happened.

A process's own moments count here, imports included, so that every case starts one.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

PARTS = 12
CASES_A_PART = 10
GONE_S = 2.0
PROGRAM = "import os; os.write({mark}, b'+'); from fsdpbench.cli import main; main()"
SIM = "--model gpt-125m --shape layers=2 --gpus 8 --device sim --wrap block --backward-prefetch pre"
CPU = (
    "--model gpt --shape layers=2,d_model=64,heads=2,vocab=256,max_seq=64 --gpus 2 --device cpu "
    "--param-dtype fp32 --seq 64 --system torch-ddp"
)
COMMANDS = {
    "sweep sim": f"sweep {SIM} --reduce-dtype fp32 --batch 1,2,3,4 -o swept-sim",
    "sweep cpu": f"sweep {CPU} --batch 1,2 -o swept-cpu",
    "run sim": f"run {SIM} --batch 5",
    "run cpu": f"run {CPU} --batch 3 -o ran-cpu",
    "report": "report done",
    "report md": "report done --format md -o done.md",
    "check folder": "check done --baseline baseline.json",
    "check": "check --baseline baseline.json",
    "analyze": "analyze done --json",
    "analyze in processes": "analyze done --jobs 2",
}
STARTING_S = 0.4
"""Share of a command's time that counts as its start: imports, mostly."""


@dataclass
class Ended:
    code: int
    err: str
    gone_s: float
    left: list[str]


@dataclass
class Bench:
    """A folder with a finished sweep and a baseline, to disturb commands in."""

    folder: Path
    durations: dict[str, float] = field(default_factory=dict)
    undisturbed: dict[str, dict[str, str]] = field(default_factory=dict)

    def start(self, words: str, mark: str) -> subprocess.Popen[str]:
        """The command, when our first line has run: until then the interpreter catches SIGINT."""
        begun, tell = os.pipe()
        process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM.format(mark=tell), *words.split()],
            cwd=self.folder, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
            text=True, start_new_session=True, pass_fds=(tell,), preexec_fn=_hear_interruptions,
            env={**os.environ, "FSDPBENCH_TEST_MARK": mark, "NO_COLOR": "1"},
        )  # fmt: skip
        os.close(tell)
        os.read(begun, 1)
        os.close(begun)
        while process.poll() is None and _catches_interruptions(process.pid):
            time.sleep(0.0001)
        return process

    def finish(self, words: str) -> None:
        began = time.monotonic()
        with self.start(words, "finish") as process:
            _, err = process.communicate(timeout=250)
        assert process.returncode == 0, err
        self.durations[words] = time.monotonic() - began

    def interrupt(self, words: str, after_s: float, signals: list[int], whole_group: bool) -> Ended:
        mark = uuid.uuid4().hex
        with self.start(words, mark) as process:
            time.sleep(after_s)
            began = time.monotonic()
            for number in signals:
                if process.poll() is None:
                    (os.killpg if whole_group else os.kill)(process.pid, number)
                time.sleep(0.05 if len(signals) > 1 else 0.0)
            _, err = process.communicate(timeout=60)  # until nobody has its output open any more
            gone_s = time.monotonic() - began
            while (left := _marked(mark)) and time.monotonic() - began < GONE_S:
                time.sleep(0.02)
                gone_s = time.monotonic() - began
        return Ended(process.returncode, err, gone_s, left)

    def results(self, name: str) -> dict[str, str]:
        """What is in the record, without dates and durations; of measured ones only how they ended."""
        found = {}
        for path in sorted((self.folder / name).glob("[!.]*/result.json")):
            result: dict[str, Any] = json.loads(path.read_text())
            result.pop("bench")
            measured = {"status": result["status"], "config": result["config"]}
            found[path.parent.name] = json.dumps(
                measured if result["device"] == "cpu" else result, sort_keys=True
            )
        return found


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    made = Bench(tmp_path_factory.mktemp("signals"))
    made.finish(f"sweep {SIM} --reduce-dtype fp32 --batch 1,2 -o done")
    made.finish("baseline create done baseline.json")
    for words in COMMANDS.values():
        made.finish(words)
    for name in ("swept-sim", "swept-cpu"):
        made.undisturbed[name] = made.results(name)
        shutil.rmtree(made.folder / name)
    made.undisturbed["done"] = made.results("done")
    return made


@pytest.mark.campaign
@pytest.mark.timeout(900)
@pytest.mark.parametrize("part", range(PARTS))
def test_a_signal_at_any_moment(bench: Bench, part: int, capsys: pytest.CaptureFixture[str]) -> None:
    drawn = random.Random(part)
    names = list(COMMANDS)
    failed: list[str] = []
    slowest, load = 0.0, 0.0
    codes: dict[int, int] = {}
    for case in range(CASES_A_PART):
        name = names[(case + part) % len(names)]
        words = COMMANDS[name]
        share = drawn.uniform(0, STARTING_S) if case % 3 == 0 else drawn.uniform(0, 1)
        number = drawn.choice([signal.SIGINT, signal.SIGTERM, signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
        signals = [number, drawn.choice([signal.SIGINT, signal.SIGTERM])] if case % 5 == 4 else [number]
        before = {kept: bench.results(kept) for kept in bench.undisturbed}
        after_s = share * bench.durations[words]
        ended = bench.interrupt(words, after_s, signals, whole_group=drawn.random() < 0.5)
        codes[ended.code] = codes.get(ended.code, 0) + 1
        slowest, load = max(slowest, ended.gone_s), max(load, os.getloadavg()[0])
        what = f"part {part} case {case}: {name}, {[n.name for n in signals]} after {after_s:.2f} s"
        failed += [f"{what}: {problem}" for problem in _problems(ended, signals)]
        failed += [f"{what}: {problem}" for problem in _lost(bench, before)]
    for name in ("sweep sim", "sweep cpu"):
        bench.finish(COMMANDS[name])
        folder = COMMANDS[name].split()[-1]
        if bench.results(folder) != bench.undisturbed[folder]:
            failed.append(f"{folder}: differs from the undisturbed one")
        failed += [f"{folder}: {path.name} is left" for path in (bench.folder / folder).glob(".*")]
        shutil.rmtree(bench.folder / folder)
    with capsys.disabled():
        print(
            f"\npart {part}: {CASES_A_PART} tried, {len(failed)} failed; slowest gone after {slowest:.2f} s; "
            f"exit codes {dict(sorted(codes.items()))}; load up to {load:.1f}"
        )
    assert not failed, "\n".join(failed)


def _problems(ended: Ended, signals: list[int]) -> list[str]:
    """What breaks the contract. A command may have been over, with a code of its own, before the signal."""
    allowed = {0, *(code for number in signals for code in (-number, 128 + number))}
    found = []
    if ended.code not in allowed:
        found.append(f"exit code {ended.code}: {ended.err[-500:]}")
    if "Traceback" in ended.err or "Exception ignored" in ended.err or "KeyboardInterrupt" in ended.err:
        found.append(f"a traceback: {ended.err[-1500:]}")
    if ended.gone_s > GONE_S:
        found.append(f"gone after {ended.gone_s:.2f} s")
    if ended.left:
        found.append(f"processes left: {ended.left}")
    return found


def _lost(bench: Bench, before: dict[str, dict[str, str]]) -> list[str]:
    """Finished results that are not there any more, or are not what they are undisturbed."""
    found = []
    for folder, kept in before.items():
        now = bench.results(folder)
        found += [f"{folder}/{name} is lost" for name in kept if name not in now]
        found += [
            f"{folder}/{name} differs"
            for name, text in now.items()
            if text != bench.undisturbed[folder].get(name)
        ]
    return found


def _hear_interruptions() -> None:
    """A shell starts what runs in its background deaf to Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _catches_interruptions(pid: int) -> bool:
    status = Path(f"/proc/{pid}/status").read_text()
    return bool(int(re.findall(r"SigCgt:\s*(\w+)", status)[0], 16) & 1 << (signal.SIGINT - 1))


def _marked(mark: str) -> list[str]:
    """Processes, zombies left aside, that carry `mark` in their environment."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if mark.encode() in path.read_bytes():
                found.append(f"{path.parent.name} {(path.parent / 'cmdline').read_bytes()[:200]!r}")
        except OSError:
            continue
    return found
