"""Scripts run as `fsdpbench run --script` runs them, in processes forked from one server."""

from __future__ import annotations

import json
import textwrap
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from fsdpbench.base.configuration.config import WhatIf
from fsdpbench.cli.requests.script_request import script_config
from fsdpbench.launch.pool import PointPool

_DEADLINE_S = 240.0

TRAINING = """
import torch

def train(steps, device="cuda"):
    model = torch.nn.Linear(64, 64).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        model(torch.randn(8, 64, device=device)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
"""
"""What probes begin with: a training loop, for scripts that need steps and are about something else."""


@dataclass(frozen=True)
class ScriptRun:
    """How a script's run ended."""

    result: dict[str, Any]
    folder: Path

    @property
    def output(self) -> str:
        return (self.folder / "stdout.log").read_text()

    @property
    def cause(self) -> str:
        return str((self.result["cause"] or {}).get("message"))

    def written(self, path: Path | str) -> Path:
        """Where the run keeps what the script wrote to `path`."""
        return self.folder / "files" / str(path).lstrip("/")

    @property
    def decisions(self) -> list[tuple[str, Any, int]]:
        """What the script decided by placeholders: operation, answer, count."""
        return [(d["operation"], d["answer"], d["count"]) for d in self.result["placeholder_decisions"]]

    def record(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.folder / "trace" / "rank0_record.json").read_text())
        return found


RunScript = Callable[..., ScriptRun]


@pytest.fixture(scope="session")
def pool() -> Iterator[PointPool]:
    with PointPool(1) as running:
        yield running


@pytest.fixture
def run_script(pool: PointPool, tmp_path: Path) -> RunScript:
    """`run_script(path, *arguments, gpus=8, **options)`; options are those of the command line. `varied`: a
    variation of `--advise`, which is run instead."""
    runs = iter(range(100))

    def run(
        path: Path,
        *arguments: str,
        gpus: int = 8,
        varied: str | None = None,
        sanitize: bool = False,
        **options: Any,
    ) -> ScriptRun:
        config = script_config(
            {"script": path, "gpus": str(gpus), "script_arguments": arguments, **options}, ()
        )
        assert config is not None
        config = replace(config, sanitize=sanitize)
        if varied is not None:
            config = replace(config, what_if=WhatIf(variation=varied))
        folder = tmp_path / f"run{next(runs)}"
        folder.mkdir()
        pool.start(config, folder)
        deadline = time.monotonic() + _DEADLINE_S
        while time.monotonic() < deadline:
            for _, finished, result in pool.finished(1.0):
                return ScriptRun(result.to_dict(), finished)
        raise AssertionError(f"{path} is still running")

    return run


@pytest.fixture
def run_probe(run_script: RunScript, tmp_path: Path) -> RunScript:
    """`run_probe(text, ...)`: a script made of `TRAINING` and this text."""
    probes = iter(range(100))

    def run(text: str, *arguments: str, **options: Any) -> ScriptRun:
        path = tmp_path / f"probe{next(probes)}.py"
        path.write_text(TRAINING + textwrap.dedent(text))
        return run_script(path, *arguments, **options)

    return run
