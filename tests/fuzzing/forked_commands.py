"""Runs command lines in processes forked from one that has torch and fsdpbench loaded: 0.1 s a case.

    with CommandServer() as server:
        outcome = server.run_case(["check", "--baseline", "b.json"], cwd=folder, timeout=60)
        assert not violations(outcome)

`run_case(argv, cwd, timeout, environment, signals)` -> `Outcome`. A case is a session of its own with
empty standard input. It begins at `fsdpbench.cli.main`, so what a signal meets while modules are still being
imported needs a process of its own. `signals` are (seconds after the start, number). A case that is not over
after `timeout` seconds has hung: its stacks are added to `err`, and it is killed. Configurations of a case
start from one fork server that all cases share.

`violations(outcome)` says what breaks the contract of the command line, whatever the words were.

    test process ── argv, folder ──> server (this file as a script) ── fork ──> the command
                 <── code, seconds ─┘   └─ fork server ── fork ──> its configurations
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CONTRACT = frozenset({0, 1, 2, 3, 4, 130, 143, -signal.SIGINT, -signal.SIGTERM})
"""Exit codes that a command may end with. 5, the bench itself failed, is one that no input may lead to."""
LONGEST_ERROR = 1100
"""Characters of an error: the bound of `reports.outside_text` and the program's name."""
_MOST_MEMORY = 12 << 30
_MOST_OUTPUT = 4 << 20
_POLL_S = 0.002
_STACKS_S = 1.0
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


@dataclass(frozen=True)
class Outcome:
    """What a command left. `code` is negative for a death by a signal, None if it hung; `peak_bytes`: the
    memory it held at most, what it was forked with included."""

    argv: tuple[str, ...]
    code: int | None
    out: str
    err: str
    seconds: float
    hung: bool
    peak_bytes: int = 0

    def __str__(self) -> str:
        return f"{list(self.argv)!r:.600}: exit {self.code}, {self.seconds:.1f} s\n{self.err[-3000:]}"


def violations(outcome: Outcome, allowed: frozenset[int] = frozenset()) -> list[str]:
    """What breaks the contract: hangs, tracebacks, exit codes, errors of several lines or without an end."""
    found = []
    if outcome.hung:
        return [f"hung for {outcome.seconds:.0f} s"]
    if outcome.code not in CONTRACT | allowed:
        found.append(f"exit code {outcome.code}")
    if "Traceback (most recent call last)" in outcome.err + outcome.out:
        found.append("a traceback")
    if _CONTROL.search(outcome.err + outcome.out):
        found.append("a control character in the output")
    lines = [line for line in outcome.err.splitlines() if line.startswith("fsdpbench: ")]
    if outcome.code == 2 and len(lines) != 1:
        found.append(f"{len(lines)} lines of error for a wrong command")
    if outcome.code == 2 and lines and outcome.err.rstrip().splitlines()[-1] != lines[0]:
        found.append("an error of more than one line")
    if any(len(line) > LONGEST_ERROR for line in lines):
        found.append(f"an error of {max(map(len, lines)):,} characters")
    return found


class CommandServer:
    """The process that has everything loaded. Use as a context, or `close` it."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> CommandServer:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def run_case(
        self,
        argv: Sequence[str],
        cwd: Path,
        timeout: float = 60.0,
        environment: Mapping[str, str] | None = None,
        signals: Sequence[tuple[float, int]] = (),
    ) -> Outcome:
        """Run `fsdpbench ARGV` in the folder `cwd` and wait for it. `environment` is added to this one's."""
        server = self._process or self._start()
        assert server.stdin is not None
        assert server.stdout is not None
        with tempfile.TemporaryDirectory() as folder:
            for name in ("out", "err"):
                Path(folder, name).touch()
            request = {
                "argv": list(argv),
                "cwd": str(cwd),
                "timeout": timeout,
                "environment": dict(environment or {}),
                "signals": sorted(signals),
                "folder": folder,
            }
            server.stdin.write(json.dumps(request) + "\n")
            server.stdin.flush()
            answer = server.stdout.readline()
            if not answer:
                raise RuntimeError(f"the server of commands died over {list(argv)!r}")
            out, err = (_output(Path(folder, name)) for name in ("out", "err"))
        reply: dict[str, Any] = json.loads(answer)
        if reply["hung"]:
            self.close()  # with what the command had started
        return Outcome(tuple(argv), out=out, err=err, **reply)

    def close(self) -> None:
        if self._process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()
        self._process = None

    def _start(self) -> subprocess.Popen[str]:
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True,
            env={**os.environ, "NO_COLOR": "1", "COLUMNS": "120"},
        )  # fmt: skip
        return self._process


def _output(path: Path) -> str:
    with path.open("rb") as file:
        return file.read(_MOST_OUTPUT).decode("utf-8", errors="backslashreplace")


def _serve() -> None:
    """Answer requests until there are no more. Returns in each forked child, which is then the command."""
    requests, replies = os.fdopen(os.dup(0), "r"), os.fdopen(os.dup(1), "w")
    resource.setrlimit(resource.RLIMIT_AS, (_MOST_MEMORY, _MOST_MEMORY))
    _load_everything()
    for line in requests:
        request = json.loads(line)
        pid = os.fork()
        if not pid:
            requests.close()
            replies.close()
            _become_the_command(request)
            return
        replies.write(json.dumps(_wait(pid, request)) + "\n")
        replies.flush()
    os._exit(0)


def _load_everything() -> None:
    import importlib
    import pkgutil

    import fsdpbench.cli.commands
    import fsdpbench.launch.preload
    from fsdpbench.launch import fork_server

    fork_server.start("sim")
    for module in pkgutil.iter_modules(fsdpbench.cli.commands.__path__):
        importlib.import_module(f"fsdpbench.cli.commands.{module.name}")
    for name in ("fsdpbench.reports.analysis.text", "fsdpbench.sim.model.profile"):
        importlib.import_module(name)


def _become_the_command(request: dict[str, Any]) -> None:
    import faulthandler
    from multiprocessing import forkserver, resource_tracker

    from fsdpbench.base import interruption

    os.setsid()
    for name, target in ((os.devnull, 0), (f"{request['folder']}/out", 1), (f"{request['folder']}/err", 2)):
        handle = os.open(name, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(handle, target)
        os.close(handle)
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    os.chdir(request["cwd"])
    os.environ.update(request["environment"])
    # The shared server is no child of this process, so that it cannot be asked whether it lives.
    for owner in (forkserver, forkserver._forkserver):  # type: ignore[attr-defined]
        owner.ensure_running = lambda: None
    # Nor is the tracker, for which Python 3.13 would wait at the end.
    resource_tracker._resource_tracker._pid = None  # type: ignore[attr-defined]
    sys.argv = ["fsdpbench", *request["argv"]]
    sys.orig_argv[:] = [sys.executable, "-m", "fsdpbench", *request["argv"]]
    interruption.take_over()


def _wait(pid: int, request: dict[str, Any]) -> dict[str, Any]:
    began = time.monotonic()
    signals = list(request["signals"])
    asked_for_stacks = False
    while True:
        found, status, usage = os.wait4(pid, os.WNOHANG)
        passed = time.monotonic() - began
        if found:
            code, peak = os.waitstatus_to_exitcode(status), usage.ru_maxrss * 1024
            return {"code": code, "seconds": passed, "hung": False, "peak_bytes": peak}
        if signals and passed >= signals[0][0]:
            os.kill(pid, signals.pop(0)[1])
        if passed > request["timeout"] and not asked_for_stacks:
            os.kill(pid, signal.SIGUSR1)
            asked_for_stacks = True
        if passed > request["timeout"] + _STACKS_S:
            os.killpg(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return {"code": None, "seconds": passed, "hung": True}
        time.sleep(_POLL_S)


if __name__ == "__main__":
    _serve()
    from fsdpbench.cli import main

    main()
