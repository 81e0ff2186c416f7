"""The command line called in this process, so that tests share its imports and its fork server."""

from __future__ import annotations

import contextlib
import io
import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fsdpbench import cli
from fsdpbench.launch import fork_server

vars(sys)["modules"].setdefault("rfc3987_syntax", None)
import jsonschema  # noqa: E402  (as `fsdpbench.cli.agents.tools` does)


class CommandLine:
    """The command line in this process."""

    def json(self, *words: str) -> Any:
        """The document that a command prints, which must succeed."""
        done = self(*words)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def __call__(self, *words: str) -> subprocess.CompletedProcess[str]:
        """`fsdpbench` with these words: its exit code and what it wrote, as of a process of its own."""
        return call(*words)


def call(*words: str) -> subprocess.CompletedProcess[str]:
    out, err = io.StringIO(), io.StringIO()
    argv, on_sigterm = sys.argv, signal.getsignal(signal.SIGTERM)
    sys.argv = ["fsdpbench", *words]
    code: object = 0
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            cli.main()
    except SystemExit as ended:
        code = ended.code
    finally:
        sys.argv = argv
        signal.signal(signal.SIGTERM, on_sigterm)
    assert isinstance(code, int)
    return subprocess.CompletedProcess(["fsdpbench", *words], code, out.getvalue(), err.getvalue())


@pytest.fixture(scope="session", autouse=True)
def server_for_all() -> None:
    """The fork server that all tests of this process share knows what any of them needs: real ranks, and the
    compiler, which costs a second in every point that imports it itself.
    """
    fork_server._preload = [*fork_server._PRELOAD_REAL, "fsdpbench.engine.devices.preload_compiler"]
    fork_server.ensure()


@pytest.fixture(scope="session")
def fsdpbench() -> CommandLine:
    """Calls the command line; what a process of its own must prove (signals, limits) starts one instead."""
    return CommandLine()


@pytest.fixture(scope="session")
def matches_schema() -> Callable[[str, Any], None]:
    """Validates an output by its schema in docs/reference/schemas, which has to describe all of its keys."""

    def check(name: str, content: Any) -> None:
        path = Path(__file__).parents[2] / "docs" / "reference" / "schemas" / f"{name}.schema.json"
        schema = json.loads(path.read_text())
        jsonschema.Draft202012Validator(schema).validate(content)
        assert content.keys() - schema["properties"].keys() == set(), f"describe these keys in {path.name}"

    return check
