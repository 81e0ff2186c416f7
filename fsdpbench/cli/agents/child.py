"""A command in a process and a session of its own: its lines of progress, its answer, its end.

Whatever it does, the caller lives: a crash, `os._exit`, memory running out are exit codes. When the caller is
cancelled, the command is asked to end, and then all processes of its session are killed.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

import anyio
from anyio.abc import ByteReceiveStream, Process

from fsdpbench.base.errors import BenchError
from fsdpbench.base.interruption import PARENT, PATIENCE_S
from fsdpbench.base.numbers import whole_number
from fsdpbench.base.reading import LARGEST_JSON, one_line

OnLine = Callable[[str], Awaitable[None]]

_LONGEST_LINE = 64 << 10
_DRAIN_S, _BEAT_S = 2.0, 5.0
_running: set[int] = set()  # leaders of the sessions of commands that have not ended


async def run_command(words: list[str], folder: str, on_line: OnLine) -> tuple[int, bytes]:
    """Run `fsdpbench WORDS` in `folder`, and await `on_line` with each line of its standard error, or with
    nothing while there is none. Return its exit code, negative for a signal, and its standard output. Raises
    `BenchError` if it cannot be started."""
    out = bytearray()

    async def beat() -> None:
        while True:
            await anyio.sleep(_BEAT_S)
            await on_line("")

    # -P: what lies in the folder replaces no module. The parent's number: it ends with this process.
    command = [sys.executable, "-P", "-m", "fsdpbench", *words]
    environment = {**os.environ, PARENT: str(os.getpid())}
    try:
        process = await anyio.open_process(
            command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, start_new_session=True
        )
    except OSError as error:
        raise BenchError(f"fsdpbench {words[0]} cannot be started in {folder} ({error.strerror})") from None
    assert process.stdout is not None
    assert process.stderr is not None
    _running.add(process.pid)
    try:
        async with anyio.create_task_group() as beating:
            beating.start_soon(beat)
            async with anyio.create_task_group() as reading:
                reading.start_soon(_collect, process.stdout, out)
                reading.start_soon(_each_line, process.stderr, on_line)
                code = await process.wait()
                kill_session(process.pid)
                # A program that left the session may hold the pipes for ever.
                reading.cancel_scope.deadline = anyio.current_time() + _DRAIN_S
            beating.cancel_scope.cancel()
    finally:
        with anyio.CancelScope(shield=True):
            await _end(process)
        _running.discard(process.pid)
    return code, bytes(out)


async def _collect(stream: ByteReceiveStream, out: bytearray) -> None:
    """Read to the end; what is beyond the largest JSON is left out, so that it cannot be parsed."""
    async for chunk in stream:
        if len(out) <= LARGEST_JSON:
            out += chunk


async def _each_line(stream: ByteReceiveStream, on_line: OnLine) -> None:
    rest = b""
    async for chunk in stream:
        *whole, rest = (rest[-_LONGEST_LINE:] + chunk).split(b"\n")
        for line in whole:
            await on_line(one_line(line.decode(errors="replace").strip()))


async def _end(process: Process) -> None:
    """Ask the command to end, then kill what is left of its session, and close its pipes."""
    if process.returncode is None:
        process.terminate()
        with anyio.move_on_after(PATIENCE_S + 1):
            await process.wait()
    kill_session(process.pid)
    await process.aclose()


def end_all(number: int, frame: object) -> None:
    """End all commands, then this process, by signal `number`: a handler of it."""
    for leader in _running:
        kill_session(leader)
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


def kill_session(leader: int) -> None:
    """Kill all processes of the session that process `leader` began, also where it has ended."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError, ValueError, IndexError):
            # number (name) state parent group session; a name may hold parentheses
            if whole_number(stat.read_text().rpartition(")")[2].split()[3]) == leader:
                os.kill(whole_number(stat.parent.name), signal.SIGKILL)
