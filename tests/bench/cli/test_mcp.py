"""`fsdpbench mcp` by the package's own client: schemas, answers, paths, progress, cancelling."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import jsonschema
import pytest
from mcp import MCPError

sys.path.insert(0, str(Path(__file__).parent))
from agents import SHAPE, Agent, RawServer, agent_in, awaited, children, lives

from fsdpbench.base.settings import SETTINGS
from fsdpbench.cli.agents.server import MOST_BYTES, shorten
from fsdpbench.cli.agents.tools import TOOLS, Tool

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def agent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Agent]:
    folder = tmp_path_factory.mktemp("agent") / "work"
    folder.mkdir()
    (folder.parent / "secret.txt").write_text("torch.OutOfMemoryError: CUDA out of memory. secret")
    (folder / "out").symlink_to(folder.parent)
    (folder / "secret.txt").symlink_to(folder.parent / "secret.txt")
    os.mkfifo(folder / "pipe")
    with agent_in(folder) as found:
        yield found


def text_of(result: object) -> str:
    return "\n".join(block.text for block in result.content)  # type: ignore[attr-defined]


def test_tools_have_the_options_and_the_published_schemas(agent: Agent) -> None:
    tools = {tool.name: tool for tool in agent.ask(agent.client.list_tools).tools}
    assert list(tools) == list(TOOLS)
    for name, tool in tools.items():
        jsonschema.Draft202012Validator.check_schema(tool.input_schema)
        published = ROOT / "docs" / "reference" / "schemas" / f"{TOOLS[name]}.schema.json"
        assert tool.output_schema == json.loads(published.read_text())
        assert tool.description
    inputs = tools["run"].input_schema["properties"]
    assert set(SETTINGS) < set(inputs)
    assert inputs["strategy"]["enum"][0] == "FULL_SHARD"
    assert inputs["batch"]["type"] == "integer"
    assert tools["compare"].input_schema["required"] == ["before", "after"]


def test_skills_are_prompts(agent: Agent) -> None:
    prompts = {each.name: each for each in agent.ask(agent.client.list_prompts).prompts}
    assert set(prompts) == {path.stem for path in (ROOT / "docs" / "skills").glob("*.md")}
    assert len(prompts) == 3
    for name, prompt in prompts.items():
        assert prompt.description
        (message,) = agent.ask(agent.client.get_prompt, name).messages
        assert message.content.text.startswith("# ")
    with pytest.raises(MCPError, match="no prompt 'none'"):
        agent.ask(agent.client.get_prompt, "none")


def test_a_run_gives_figures_intervals_and_progress(agent: Agent) -> None:
    lines: list[str] = []
    result = agent.call("run", SHAPE | {"batch": 1, "output": "runs/one"}, lines)
    assert not result.is_error, text_of(result)
    low, high = result.structured_content["interval"]["step_time_s"]
    assert 0 < low < result.structured_content["step_time_s"] < high
    assert json.loads(result.content[-1].text) == result.structured_content
    assert (agent.folder / "runs" / "one").is_dir()
    assert any("on sim" in line for line in lines)


@pytest.mark.parametrize(
    ("name", "arguments", "words"),
    [
        ("none", {}, "no tool 'none'"),
        ("plan", {"modell": "gpt"}, "unknown argument 'modell'. Did you mean model?"),
        ("plan", {"jobs": "many"}, "jobs: 'many' is not of type 'integer'"),
        ("compare", {"before": "a"}, "'after' is a required property"),
        ("plan", {"model": "a\0b"}, "NUL"),
        ("plan", {"model": "x" * 30_000}, "no more than 20,000 characters"),
        (
            "compare",
            {"before": "none", "after": "none"},
            "cannot be read (No such file or directory) (exit code 2",
        ),
        ("analyze", {"paths": ["../secret.txt"]}, "is outside of"),
        ("analyze", {"paths": ["/etc/passwd"]}, "is outside of"),
        ("analyze", {"paths": ["secret.txt"]}, "is outside of"),
        ("analyze", {"paths": ["."]}, "is outside of"),
        ("explain", {"from": "out/secret.txt"}, "is outside of"),
        ("explain", {"script_arguments": ["out/secret.txt"]}, "is outside of"),
        ("explain", {"model": "gpt", "output": "out/page.html"}, "is outside of"),
        ("run", {"script": "../train.py"}, "is outside of"),
        ("run", {"model": "gpt", "hf_config": "/root"}, "is outside of"),
        ("run", {"model": "gpt", "seq_lengths": "out/lengths,layout=packed"}, "is outside of"),
        ("run", {"model": "hf:../../etc"}, "is outside of"),
        ("run", {"model": "@/etc/passwd"}, "is outside of"),
        ("plan", {"space": "space.toml"}, "is outside of"),
        ("plan", {"space": "nested.toml"}, "is outside of"),
        ("explain", {"from": "foreign"}, "is outside of"),
        ("explain", {"from": "foreign/result.json"}, "is outside of"),
        ("explain", {"from": "function.json"}, "is outside of"),
    ],
)
def test_a_wrong_call_is_an_error_of_one_line(
    agent: Agent, name: str, arguments: dict[str, object], words: str
) -> None:
    (agent.folder / "foreign").mkdir(exist_ok=True)
    run: dict[str, Any] = {"status": "oom", "config": {"script": {"path": "/root/train.py"}}}
    (agent.folder / "foreign" / "result.json").write_text(json.dumps(run))
    function = {"name": "f", "module": "m", "folder": "/tmp/of-others", "root": "."}
    run["config"]["script"] = {"path": "train.py", "function": function}
    (agent.folder / "function.json").write_text(json.dumps(run))
    (agent.folder / "space.toml").write_text('model = "gpt"\nhf_config = "../config.json"\n')
    nested = 'model = "gpt"\n[[when]]\nmatch = { hf_config = ["../config.json"] }\n'
    (agent.folder / "nested.toml").write_text(nested)
    result = agent.call(name, arguments)
    assert result.is_error
    assert words in text_of(result)
    assert "\n" not in text_of(result)
    assert "secret" not in text_of(result).replace("secret.txt", "")


def test_cancelling_ends_the_command(agent: Agent) -> None:
    async def given_up() -> None:
        with anyio.CancelScope() as scope:
            async with anyio.create_task_group() as group:
                group.start_soon(agent.client.call_tool, "explain", {"from": "pipe"})
                await anyio.to_thread.run_sync(awaited, lambda: children(agent.pid))
                scope.cancel()

    agent.ask(given_up)
    awaited(lambda: not children(agent.pid))
    assert agent.call("plan", {"no": "more"}).is_error  # and the server lives


def test_nothing_listens(agent: Agent) -> None:
    descriptors = [os.readlink(path) for path in Path(f"/proc/{agent.pid}/fd").iterdir()]
    for table in ("tcp", "tcp6", "udp", "udp6"):
        rows = Path(f"/proc/{agent.pid}/net/{table}").read_text().splitlines()[1:]
        assert not {f"socket:[{row.split()[9]}]" for row in rows} & set(descriptors)


@pytest.mark.parametrize("how", ["closes its end", "kills the server"])
def test_a_lost_client_leaves_no_process(tmp_path: Path, how: str) -> None:
    os.mkfifo(tmp_path / "pipe")
    server = RawServer(tmp_path)
    for line in (b"{not json", b"[]", b"\xff\xfe", b'{"jsonrpc": "2.0", "id": 7}', b""):
        server.send(line)
    server.begin()
    server.request(1, "tools/call", name="explain", arguments={"from": "pipe"})
    (child,) = awaited(lambda: children(server.process.pid))
    if how == "kills the server":
        server.process.kill()
    server.process.communicate(timeout=30)
    awaited(lambda: not lives(child))
    assert server.process.returncode == (-signal.SIGKILL if how == "kills the server" else 0)


def test_a_signal_ends_server_and_command(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    server = RawServer(tmp_path)
    server.begin()
    server.request(1, "tools/call", name="explain", arguments={"from": "pipe"})
    (child,) = awaited(lambda: children(server.process.pid))
    server.process.terminate()
    server.process.wait(30)
    awaited(lambda: not lives(child))


def test_a_time_limit_says_what_it_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with agent_in(tmp_path, "--most-seconds", "0.3") as agent:
        result = agent.call("explain", {"from": "pipe"})
        assert result.is_error
        assert "was stopped after 0.3 s" in text_of(result)
        awaited(lambda: not children(agent.pid))


def test_without_the_extra_it_says_so() -> None:
    code = "import sys; sys.modules['mcp'] = None; sys.argv = ['fsdpbench', 'mcp']; "
    code += "from fsdpbench.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stderr == "fsdpbench: fsdpbench mcp needs mcp: pip install 'fsdpbench[mcp]'\n"


def test_large_answers_keep_their_beginnings_and_their_schema() -> None:
    content = {
        "points": [{"name": f"{n}" * 50, "values": list(range(100))} for n in range(2000)],
        "notes": ["a"],
    }
    said = shorten(content)
    assert said == f"points has its first {len(content['points'])}"
    assert len(json.dumps(content)) <= MOST_BYTES
    assert content["points"][0]["name"] == "0" * 50


def test_words_of_a_call_are_options_never_others() -> None:
    tool = Tool("run", "/nowhere")
    words = tool.words(
        {"model": "--help", "batch": 2, "compile": True, "advise": False, "script_arguments": ["-o"]}
    )
    assert words == ["run", "--json", "--model=--help", "--batch=2", "--compile=true", "--", "-o"]
