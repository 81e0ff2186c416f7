"""A live `fsdpbench mcp` for tests: the package's own client over stdio, or plain pipes for hostile lines."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mcp_types as types
from anyio.from_thread import BlockingPortal, start_blocking_portal
from mcp import Client, StdioServerParameters, stdio_client

COMMAND = (sys.executable, "-m", "fsdpbench", "mcp")
SHAPE = {
    "model": "gpt",
    "shape": "layers=1,d_model=32,heads=1,vocab=64,max_seq=16",
    "gpus": 2,
    "device": "sim",
}


class Agent:
    """A client of a server that works in `folder`, called from a test's own thread."""

    def __init__(self, client: Client, portal: BlockingPortal, folder: Path, pid: int) -> None:
        self.client, self.portal, self.folder, self.pid = client, portal, folder, pid

    def call(
        self, name: str, arguments: dict[str, Any], lines: list[str] | None = None
    ) -> types.CallToolResult:
        """What a tool answers; `lines` takes its progress."""

        async def progress(seconds: float, total: float | None, message: str | None) -> None:
            if lines is not None:
                lines.append(message or "")

        async def called() -> types.CallToolResult:
            return await self.client.call_tool(name, arguments, progress_callback=progress)

        return self.portal.call(called)

    def ask(self, call: Callable[..., Any], *arguments: Any) -> Any:
        """What a method of the client returns."""
        return self.portal.call(call, *arguments)


@contextlib.contextmanager
def agent_in(folder: Path, *options: str) -> Iterator[Agent]:
    """An agent whose server works in `folder`."""
    parameters = StdioServerParameters(command=COMMAND[0], args=[*COMMAND[1:], *options], cwd=folder)
    before = set(children(os.getpid()))
    with (
        start_blocking_portal() as portal,
        portal.wrap_async_context_manager(Client(stdio_client(parameters))) as client,
    ):
        (pid,) = set(children(os.getpid())) - before
        yield Agent(client, portal, folder, pid)


class RawServer:
    """A server behind plain pipes."""

    def __init__(self, folder: Path) -> None:
        self.process = subprocess.Popen(
            COMMAND, cwd=folder, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )

    def send(self, line: bytes | dict[str, Any]) -> None:
        assert self.process.stdin is not None
        text = line if isinstance(line, bytes) else json.dumps(line).encode()
        self.process.stdin.write(text + b"\n")
        self.process.stdin.flush()

    def request(self, number: int, method: str, **params: Any) -> None:
        self.send({"jsonrpc": "2.0", "id": number, "method": method, "params": params})

    def begin(self) -> None:
        """The handshake of the older protocol."""
        who = {"name": "test", "version": "0"}
        self.request(0, "initialize", protocolVersion="2025-11-25", capabilities={}, clientInfo=who)
        assert self.answer(0)["result"]["serverInfo"]["name"] == "fsdpbench"
        self.send({"jsonrpc": "2.0", "method": "notifications/initialized"})

    def answer(self, number: int) -> dict[str, Any]:
        """The answer to a request; others before it are passed over."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            content: dict[str, Any] = json.loads(line)
            if content.get("id") == number:
                return content
        raise AssertionError("the server ended")


def children(parent: int) -> list[int]:
    """Numbers of the processes that `parent` started and that have not ended."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, IndexError):
            fields = stat.read_text().rpartition(")")[2].split()
            if int(fields[1]) == parent and fields[0] != "Z":
                found.append(int(stat.parent.name))
    return found


def awaited(condition: Callable[[], Any], seconds: float = 60.0) -> Any:
    """What `condition` returns once it is true. Raises AssertionError if that takes too long."""
    ends = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < ends, "it did not happen"
        time.sleep(0.02)
    return found


def lives(pid: int) -> bool:
    """Whether a process runs."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False
