"""The MCP server: commands as tools, skills as prompts. An answer is the command's JSON, shortened if large.

Each command runs in its own process and session, so a crash, `os._exit` or running out of memory ends only
the command and becomes an exit code. If a call is cancelled, the command is asked to end, then all processes
of its session are killed.
"""

import inspect
import json
import os
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path

import anyio
import mcp_types as types
from anyio.abc import ByteReceiveStream, Process
from mcp import MCPError
from mcp.server import Server
from mcp.server import ServerRequestContext as Context
from mcp.server.stdio import stdio_server

from fsdpbench import __version__
from fsdpbench.base.errors import BenchError, written
from fsdpbench.base.interruption import PARENT, PATIENCE_S
from fsdpbench.base.numbers import whole_number
from fsdpbench.base.reading import LARGEST_JSON, one_line
from fsdpbench.base.writing import write_whole
from fsdpbench.cli.agents.tools import ANSWERS, TOOLS, Tool

MOST_BYTES = 48 << 10
"""Maximum JSON of an answer. A larger answer is written to a file and sent with shortened lists."""
_FEWEST_ITEMS, _AT_ONCE, _NOTES, _MOST_LINES = 4, 2, 8, 100
_MEANINGS = ["ok", "finding or regression", "wrong request", "cannot judge", "a failure", "fsdpbench failed"]
Page = types.PaginatedRequestParams | None
Prompt = types.GetPromptResult
Answer = types.CallToolResult
OnLine = Callable[[str], Awaitable[None]]

_LONGEST_LINE = 64 << 10
_DRAIN_S, _BEAT_S = 2.0, 5.0
_running: set[int] = set()  # session leaders of commands that have not ended


async def run_command(words: list[str], folder: str, on_line: OnLine) -> tuple[int, bytes]:
    """Run `fsdpbench WORDS` in `folder`. Await `on_line` with each line of standard error, and with an empty
    string every few seconds. Return exit code, negative for a signal, and standard output. Raises
    `BenchError` if the command cannot be started."""
    out = bytearray()

    async def beat() -> None:
        while True:
            await anyio.sleep(_BEAT_S)
            await on_line("")

    # -P: no file in the folder can replace a module. PARENT: the command ends with this process.
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
                # A program that left the session may keep the pipes open forever.
                reading.cancel_scope.deadline = anyio.current_time() + _DRAIN_S
            beating.cancel_scope.cancel()
    finally:
        with anyio.CancelScope(shield=True):
            await _end(process)
        _running.discard(process.pid)
    return code, bytes(out)


async def _collect(stream: ByteReceiveStream, out: bytearray) -> None:
    """Read `stream` to its end; drop bytes beyond the largest JSON, so that it cannot be parsed."""
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
    """Ask the command to end, then kill the rest of its session and close its pipes."""
    if process.returncode is None:
        process.terminate()
        with anyio.move_on_after(PATIENCE_S + 1):
            await process.wait()
    kill_session(process.pid)
    await process.aclose()


def end_all(number: int, frame: object) -> None:
    """Handle signal `number`: end all commands, then this process."""
    for leader in _running:
        kill_session(leader)
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


def kill_session(leader: int) -> None:
    """Kill all processes of the session that `leader` started, even if the leader has ended."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError, ValueError, IndexError):
            # fields: pid (name) state parent group session; a name may contain parentheses
            if whole_number(stat.read_text().rpartition(")")[2].split()[3]) == leader:
                os.kill(whole_number(stat.parent.name), signal.SIGKILL)


@dataclass
class AgentServer:
    """The tools of one folder (resolved). limit_s: maximum seconds of a call. skills: descriptions and
    texts (Markdown) by name."""

    folder: str
    limit_s: float
    skills: Mapping[str, tuple[str, str]]
    _turns: anyio.Semaphore = field(default_factory=lambda: anyio.Semaphore(_AT_ONCE))

    async def list_tools(self, context: Context, params: Page) -> types.ListToolsResult:
        """Return all tools with the schemas of their arguments and answers."""
        described = [
            types.Tool(
                name=tool.name,
                description=inspect.cleandoc(tool.command.help or "").replace("\b\n", ""),
                input_schema=tool.input_schema,
                output_schema=tool.output_schema,
                annotations=types.ToolAnnotations(read_only_hint=tool.name in ("plan", "compare")),
            )
            for tool in (Tool(name, self.folder) for name in TOOLS)
        ]
        return types.ListToolsResult(tools=described)

    async def call_tool(self, context: Context, params: types.CallToolRequestParams) -> Answer:
        """Run a command and return its answer; an error is returned too, as one line."""
        try:
            if params.name not in TOOLS:
                raise BenchError(f"no tool {params.name!r}: {', '.join(TOOLS)}")
            words = Tool(params.name, self.folder).words(params.arguments or {})
            lines = deque(["starting"], _MOST_LINES)
            return self._answer(words, *await self._run(words, context, lines), [*lines][1:])
        except BenchError as error:
            return _failed(str(error))

    async def list_prompts(self, context: Context, params: Page) -> types.ListPromptsResult:
        """Return all skills."""
        prompts = [types.Prompt(name=name, description=about) for name, (about, _) in self.skills.items()]
        return types.ListPromptsResult(prompts=prompts)

    async def get_prompt(self, context: Context, params: types.GetPromptRequestParams) -> Prompt:
        """Return the text of a skill."""
        if params.name not in self.skills:
            known = one_line(f"no prompt {params.name!r}: {', '.join(self.skills)}")
            raise MCPError(code=types.INVALID_PARAMS, message=known)
        about, text = self.skills[params.name]
        message = types.PromptMessage(role="user", content=types.TextContent(text=text))
        return Prompt(description=about, messages=[message])

    async def _run(self, words: list[str], context: Context, lines: deque[str]) -> tuple[int, bytes]:
        """Wait for a slot, run a command, report its `lines`. Raises `BenchError` past `limit_s`."""
        began = anyio.current_time()

        async def report(line: str) -> None:
            lines.extend([line] if line else [])
            await context.session.report_progress(anyio.current_time() - began, message=lines[-1])

        if self._turns.value == 0:
            await report("waiting for an earlier call to end")
        async with self._turns:
            try:
                with anyio.fail_after(self.limit_s):
                    return await run_command(words, self.folder, report)
            except TimeoutError:
                said = f"{words[0]} was stopped after {self.limit_s:g} s (fsdpbench mcp --most-seconds)"
                raise BenchError(f"{said}; it was at: {lines[-1]}") from None

    def _answer(self, words: list[str], code: int, out: bytes, lines: list[str]) -> Answer:
        """Return the command's JSON with its notes, whatever its exit code; without JSON its error."""
        try:
            content = json.loads(out, parse_constant=lambda _: None)
        except ValueError:
            content = None
        if not isinstance(content, dict):
            return _failed(_cause(words[0], code, lines))
        notes = [_meaning(code)] if code else []
        notes += lines[-_NOTES:]
        if len(out) > MOST_BYTES and len(json.dumps(content)) > MOST_BYTES:
            file = Path(ANSWERS, f"{words[0]}-{sha256(repr(words).encode()).hexdigest()[:8]}.json")
            place = Path(self.folder, file)
            with written(place):
                place.parent.mkdir(parents=True, exist_ok=True)
                write_whole(place, out)
            notes.append(f"the whole answer, {len(out):,} bytes, is in {file}; here {shorten(content)}")
        texts = [*(["\n".join(notes)] if notes else []), json.dumps(content)]
        blocks: list[types.ContentBlock] = [types.TextContent(text=text) for text in texts]
        return Answer(content=blocks, structured_content=content, _meta={"fsdpbench/exit_code": code})


def _failed(line: str) -> Answer:
    return Answer(content=[types.TextContent(text=one_line(line))], is_error=True)


def _cause(name: str, code: int, lines: list[str]) -> str:
    """Return why a command gave no answer: its error line, and the meaning of its exit code."""
    if code < 0:
        known = signal.Signals(-code).name
        return f"{name} was ended by {known}" + ", as when memory runs out" * (known == "SIGKILL")
    said = [line for line in lines if line.startswith("fsdpbench: ")] or ["no answer", *lines]
    return f"{said[-1].removeprefix('fsdpbench: ')} ({_meaning(code)})"


def _meaning(code: int) -> str:
    return f"exit code {code}: {_MEANINGS[code] if code < len(_MEANINGS) else 'unknown'}"


def shorten(content: object) -> str:
    """Halve the longest list in `content` until its JSON fits into `MOST_BYTES`; describe what was cut."""
    left: dict[str, int] = {}
    while len(json.dumps(content)) > MOST_BYTES and (found := list(_lists(content, ""))):
        name, items = max(found, key=lambda each: len(json.dumps(each[1])))
        del items[len(items) // 2 :]
        left[name] = len(items)
    return ", ".join(f"{name} has its first {count}" for name, count in left.items())


def _lists(node: object, name: str) -> Iterator[tuple[str, list[object]]]:
    """Yield the lists that may be shortened, with their paths; a list's items only if the list is short."""
    if isinstance(node, list) and len(node) > _FEWEST_ITEMS:
        yield name, node
    elif isinstance(node, dict | list):
        items = node.items() if isinstance(node, dict) else enumerate(node)
        for key, item in items:
            yield from _lists(item, f"{name}.{key}".lstrip("."))


def serve(folder: str, limit_s: float, skills: Mapping[str, tuple[str, str]], instructions: str) -> None:
    """Serve one client on standard input and output until it disconnects; it is sent `instructions`."""
    agents = AgentServer(folder, limit_s, skills)
    server = Server(
        "fsdpbench",
        version=__version__,
        instructions=instructions,
        on_list_tools=agents.list_tools,
        on_call_tool=agents.call_tool,
        on_list_prompts=agents.list_prompts,
        on_get_prompt=agents.get_prompt,
    )

    async def run() -> None:
        async with stdio_server() as (reading, writing):
            await server.run(reading, writing, server.create_initialization_options())

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, end_all)
    try:
        anyio.run(run)
    except* (OSError, anyio.BrokenResourceError, anyio.ClosedResourceError):
        pass  # the client disconnected during a write
