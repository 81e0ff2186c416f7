"""Drawn arguments and lines on one live `fsdpbench mcp`: it lives, and uses no file outside of its folder.

Outside lie files with a word that no answer may hold; their content, and the time of their last access, stay.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "bench" / "cli"))
from agents import SHAPE, Agent, RawServer, agent_in, children
from workshop import SCRIPT, digest

from fsdpbench.cli.agents.tools import TOOLS, Tool

SECRET = "a-word-of-the-outside"
ROOT = Path(__file__).resolve().parents[2]
LONGEST_S = 240.0
EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "50"))
"""Of each part; each run draws others."""


@pytest.fixture(scope="module")
def agent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Agent]:
    place = tmp_path_factory.mktemp("mcp")
    outside, work = place / "outside", place / "work"
    outside.mkdir()
    (work / "inner").mkdir(parents=True)
    message = (ROOT / "docs" / "examples" / "oom.txt").read_text()
    for folder, word in ((outside, SECRET), (work, "inside")):
        (folder / "oom.txt").write_text(message.replace("train.py", f"{word}.py"))
        (folder / "config.json").write_text(json.dumps({"model_type": word}))
        (folder / "space.toml").write_text(f'model = "{word}"\n')
        (folder / "train.py").write_text(f"print('{word}')\n" + SCRIPT)
    (work / "climbs.toml").write_text('model = "gpt"\nhf_config = "../outside/config.json"\n')
    (work / "inner" / "trace.json").symlink_to(outside / "config.json")
    (work / "link").symlink_to(outside)
    (work / "link.txt").symlink_to(outside / "oom.txt")
    with agent_in(work, "--most-seconds", "120") as found:
        yield found


def forget_reads(outside: Path) -> None:
    """Make the next read of each file set its time of access, as relative times of access do."""
    for path in outside.iterdir():
        os.utime(path, (0, path.stat().st_mtime))


def read(outside: Path) -> list[str]:
    return [path.name for path in outside.iterdir() if path.stat().st_atime > 0]


PATHS = st.sampled_from(["oom.txt", "config.json", "space.toml", "train.py", "new.html", "runs", ""])
FOLDERS = [
    "..",
    "../outside",
    "link",
    "inner/../../outside",
    "./link/.",
    "{outside}",
    "/",
    "/proc/self/cwd/..",
]
ESCAPES = st.builds(os.path.join, st.sampled_from(FOLDERS), PATHS)
FRAMES = st.sampled_from(
    ["{}", "@{}", "x={}", "a,{}", "hf:{}", "file://{}", " {}", "{}\n", "lognormal:{},0.5", "~/{}"]
)
HOSTILE = st.builds(str.format, FRAMES, st.one_of(ESCAPES, ESCAPES, PATHS))
INSIDE = st.sampled_from(
    ["oom.txt", "inner", "climbs.toml", "link.txt", "runs/none", ".", "train.py", "space.toml"]
)
TEXT = st.text(st.characters(codec="utf-8"), max_size=30)
NUMBERS = st.one_of(st.integers(), st.floats(allow_nan=False, allow_infinity=False))
VALUES = st.recursive(
    st.one_of(HOSTILE, HOSTILE, INSIDE, TEXT, NUMBERS, st.booleans(), st.none()),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(TEXT, inner, max_size=2)),
    max_leaves=4,
)
CHEAP: dict[str, dict[str, Any]] = {
    "plan": SHAPE | {"batch": 1, "no_predict": True},
    "run": {**SHAPE, "device": "none"},
    "explain": {"no_changes": True},
    "prove": {"only": "speed", "gpus": 2},
    "expect": {"measured": "1s", "model": "none"},
}
"""What keeps a call that is not refused short."""


PLACES = {
    "from", "script_arguments", "paths", "against", "before", "after", "thresholds", "script", "baseline",
    "space", "hf_config", "hardware", "software", "data", "output", "junit", "seq_lengths", "model",
}  # fmt: skip
"""Arguments that a path may be in."""


@st.composite
def calls(draw: st.DrawFn) -> tuple[str, dict[str, Any]]:
    name = draw(st.sampled_from(list(TOOLS)))
    parameters = Tool(name, "/").parameters
    places = [each for each in parameters if each in PLACES]
    names = st.sampled_from([*places * 8, *parameters, draw(TEXT)])
    arguments = dict(CHEAP.get(name, {}))
    for each in draw(st.lists(names, max_size=3, unique=True)):
        takes_list = each in parameters and parameters[each].nargs == -1
        paths = st.one_of(HOSTILE, INSIDE, PATHS)
        likely = st.lists(paths, min_size=1, max_size=2) if takes_list else paths
        arguments[each] = draw(VALUES if draw(st.sampled_from(range(10))) == 9 else likely)
    return name, arguments


@pytest.mark.campaign
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("part", range(20))
def test_drawn_arguments(agent: Agent, part: int, capsys: pytest.CaptureFixture[str]) -> None:
    outside = agent.folder.parent / "outside"
    before, kinds = digest(outside), Counter[str]()
    names = set(os.listdir(agent.folder.parent))
    slowest = 0.0

    @settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    @given(calls())
    def attack(call: tuple[str, dict[str, Any]]) -> None:
        nonlocal slowest
        name, arguments = call
        arguments = json.loads(json.dumps(arguments).replace("{outside}", str(outside)))
        forget_reads(outside)
        began = time.monotonic()
        result = agent.call(name, arguments)
        slowest = max(slowest, time.monotonic() - began)
        text = "".join(block.text for block in result.content)
        refused = "is outside of" in text
        kinds["refused path" if refused else "error" if result.is_error else "answer"] += 1
        assert slowest < LONGEST_S
        assert not (result.is_error and "\n" in text)
        assert "Traceback" not in text
        assert "exit code 5" not in text
        assert SECRET not in text
        assert read(outside) == []  # before they are read here
        assert digest(outside) == before
        assert set(os.listdir(agent.folder.parent)) == names
        assert children(agent.pid) == []

    attack()
    with capsys.disabled():
        print(
            f"\narguments, part {part}: {dict(kinds)}, none read or written outside, slowest {slowest:.1f} s"
        )


@pytest.mark.campaign
@pytest.mark.timeout(3600)
def test_drawn_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Lines that are no request leave a server that answers the next."""
    server = RawServer(tmp_path)
    server.begin()
    count = 0
    scalars = st.one_of(TEXT, NUMBERS, st.booleans(), st.none())
    requests = st.fixed_dictionaries(
        {"jsonrpc": st.sampled_from(["2.0", "1.0", 2])},
        optional={
            "id": st.one_of(st.text(max_size=3).map("x".__add__), st.none(), st.floats(allow_nan=False)),
            "method": st.sampled_from(["tools/call", "tools/list", "prompts/get", "initialize", "none", ""]),
            "params": st.one_of(
                scalars,
                st.dictionaries(st.sampled_from(["name", "arguments", "_meta", "cursor"]), scalars),
            ),
        },
    )
    lines = st.one_of(
        st.binary(max_size=200).map(lambda line: line.replace(b"\n", b"")),
        requests.map(lambda content: json.dumps(content).encode()),
        st.integers(1, 20_000).map(lambda depth: b"[" * depth),
    )

    @settings(max_examples=2000, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    @given(lines)
    def attack(line: bytes) -> None:
        nonlocal count
        count += 1
        server.send(line)
        server.request(count, "ping")
        assert "error" not in server.answer(count)

    attack()
    server.process.communicate(timeout=30)
    assert server.process.returncode == 0
    with capsys.disabled():
        print(f"\nlines: {count} tried, each followed by an answered ping")


def test_the_attack_sees_what_is_read(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("text")
    forget_reads(tmp_path)
    assert read(tmp_path) == []
    (tmp_path / "file").read_text()
    assert read(tmp_path) == ["file"]
    shutil.rmtree(tmp_path)
