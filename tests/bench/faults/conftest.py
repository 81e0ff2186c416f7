"""A sweep over real ranks in processes of its own, to be disturbed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

COMMAND = (sys.executable, "-c", "from fsdpbench.cli import main; main()")
SHAPE = "layers=2,d_model=64,heads=2,vocab=256,max_seq=64"
TINY = ("--model", "gpt", "--shape", SHAPE, "--gpus", "2", "--device", "cpu", "--param-dtype", "fp32")


@dataclass
class DisturbedSweep:
    """A sweep in `folder`; every process it starts carries `mark` in its environment."""

    folder: Path
    environment: dict[str, str] = field(default_factory=dict)
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)
    prefix: tuple[str, ...] = ()

    def start(self, *words: str, **options: Any) -> subprocess.Popen[str]:
        options.setdefault("preexec_fn", _hear_interruptions)
        environment = {**os.environ, "FSDPBENCH_TEST_MARK": self.mark, "NO_COLOR": "1", **self.environment}
        return subprocess.Popen(
            [*self.prefix, *COMMAND, "sweep", *words, "-o", str(self.folder)],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, **options,
        )  # fmt: skip

    def run(self, *words: str, **options: Any) -> tuple[int, str, str]:
        with self.start(*words, **options) as process:
            stdout, stderr = process.communicate(timeout=250)
        self.wait_until_gone()
        return process.returncode, stdout, stderr

    @property
    def results(self) -> dict[str, dict[str, Any]]:
        return {
            path.parent.name: json.loads(path.read_text())
            for path in sorted(self.folder.glob("*/result.json"))
            if not path.parent.name.startswith(".")
        }

    @property
    def leftovers(self) -> list[str]:
        """Files of a sweep in progress that one that ended must not leave."""
        return [path.name for path in self.folder.iterdir() if path.name.startswith(".")]

    def processes(self) -> list[int]:
        found = []
        for path in Path("/proc").glob("[0-9]*/environ"):
            try:
                if self.mark.encode() in path.read_bytes():
                    found.append(int(path.parent.name))
            except OSError:
                continue
        return found

    def ranks(self) -> list[int]:
        """Processes of ranks: they write into logs of their own."""
        return [pid for pid in self.processes() if _writes_to(pid, "_stderr.log")]

    def wait_until_gone(self) -> None:
        self.wait_for(lambda: not self.processes(), f"processes left behind: {self.processes()}")

    @staticmethod
    def wait_for(happened: Callable[[], object], else_: str) -> None:
        deadline = time.monotonic() + 200
        while not happened():
            assert time.monotonic() < deadline, else_
            time.sleep(0.02)

    def end_all(self) -> None:
        for pid in self.processes():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue


def _hear_interruptions() -> None:
    """A shell starts what runs in its background deaf to Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.fixture
def sweep(tmp_path: Path) -> Iterator[DisturbedSweep]:
    disturbed = DisturbedSweep(tmp_path / "run")
    yield disturbed
    disturbed.end_all()


@pytest.fixture(scope="session")
def tiny() -> tuple[str, ...]:
    """Words for a model that trains in a second on two ranks."""
    return TINY


def _writes_to(pid: int, suffix: str) -> bool:
    try:
        return os.readlink(f"/proc/{pid}/fd/2").endswith(suffix)
    except OSError:
        return False
