"""Real ranks for tests: processes that start once, join a gloo group, and run one named function after
another.

A test passes a function of its own file; each rank loads that file by path and calls the function with its
rank and the given arguments. What rank 0 returns comes back; an exception on any rank fails the test with
that rank's traceback. A rank that does not answer in time is killed with its whole pool, so nothing hangs and
nothing is left behind.
"""

from __future__ import annotations

import faulthandler
import importlib.util
import os
import pickle
import select
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

HERE = Path(__file__).resolve().parent
STARTUP_SECONDS = 120


class RankPool:
    """``world_size`` ranks, started at the first use and again after a failure that left them in an unknown
    state.
    """

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._ranks: list[subprocess.Popen[bytes]] = []
        self._answers: list[int] = []

    def run(self, function: Callable[..., Any], timeout: float = 60, **arguments: Any) -> Any:
        """Call ``function(rank, **arguments)`` on every rank; returns what rank 0 returned."""
        if not self._ranks:
            self._start()
        frame = pickle.dumps((function.__code__.co_filename, function.__name__, arguments))
        for rank in self._ranks:
            assert rank.stdin is not None
            rank.stdin.write(len(frame).to_bytes(8, "little") + frame)
            rank.stdin.flush()
        try:
            answers = self._collect(timeout)
        except BaseException:
            self.stop()
            raise
        failures = [f"rank {i}:\n{answer[1]}" for i, answer in enumerate(answers) if not answer[0]]
        if failures:
            self.stop()
            raise AssertionError("\n".join(failures))
        return answers[0][1]

    def stop(self) -> None:
        """End all ranks."""
        for rank in self._ranks:
            rank.kill()
        for rank in self._ranks:
            rank.wait()
            if rank.stdin is not None:
                rank.stdin.close()
        for descriptor in self._answers:
            os.close(descriptor)
        self._ranks, self._answers = [], []

    def _start(self) -> None:
        rendezvous = tempfile.mktemp(prefix="ranks-")
        for rank in range(self.world_size):
            read, write = os.pipe()
            command = [sys.executable, __file__, str(rank), str(self.world_size), rendezvous, str(write)]
            self._ranks.append(subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=(write,)))
            os.close(write)
            self._answers.append(read)
        self._collect(STARTUP_SECONDS)

    def _collect(self, timeout: float) -> list[tuple[bool, Any]]:
        deadline = time.monotonic() + timeout
        answers: list[tuple[bool, Any]] = [(False, "no answer")] * self.world_size
        waiting = set(range(self.world_size))
        while waiting:
            ready, _, _ = select.select(
                [self._answers[i] for i in waiting], [], [], max(0, deadline - time.monotonic())
            )
            if not ready:
                raise AssertionError(f"ranks {sorted(waiting)} did not answer within {timeout} s: {answers}")
            for index in [i for i in waiting if self._answers[i] in ready]:
                answers[index] = _read(self._answers[index])
                waiting.discard(index)
                if not answers[index][0]:
                    deadline = min(deadline, time.monotonic() + 5)  # the others may wait for it in vain
        return answers


def _read(descriptor: int) -> tuple[bool, Any]:
    def exactly(size: int) -> bytes:
        parts = b""
        while len(parts) < size:
            part = os.read(descriptor, size - len(parts))
            if not part:
                return b""
            parts += part
        return parts

    header = exactly(8)
    if not header:
        return False, "the process ended"
    return pickle.loads(exactly(int.from_bytes(header, "little")))


# -- in the rank ---------------------------------------------------------------------------------------------


def _load(path: str, loaded: dict[str, ModuleType]) -> ModuleType:
    if path not in loaded:
        spec = importlib.util.spec_from_file_location(Path(path).stem, path)
        assert spec is not None
        assert spec.loader is not None
        loaded[path] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(loaded[path])
    return loaded[path]


def _serve(rank: int, world_size: int, rendezvous: str, descriptor: int) -> None:
    def answer(ok: bool, value: Any) -> None:
        frame = pickle.dumps((ok, value))
        os.write(descriptor, len(frame).to_bytes(8, "little"))
        view = memoryview(frame)
        while view:
            view = view[os.write(descriptor, view) :]

    import warnings
    from datetime import timedelta

    warnings.filterwarnings("ignore")
    faulthandler.enable()
    sys.path.insert(0, str(HERE))
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{rendezvous}",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=30),
    )
    answer(True, None)
    loaded: dict[str, ModuleType] = {}
    while header := sys.stdin.buffer.read(8):
        path, name, arguments = pickle.loads(sys.stdin.buffer.read(int.from_bytes(header, "little")))
        try:
            answer(True, getattr(_load(path, loaded), name)(rank, **arguments))
        except Exception:
            answer(False, traceback.format_exc())


if __name__ == "__main__":
    _serve(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
