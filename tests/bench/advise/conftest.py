"""Scripts run on the simulated cluster, as they are, varied, or patched."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from fsdpbench.answers.advise.candidates import Candidate, candidates
from fsdpbench.answers.advise.edits import NoDiffError, diff_of
from fsdpbench.base.configuration.config import WhatIf
from fsdpbench.base.result_sections import ObservedScript
from fsdpbench.cli.requests.script_request import script_config
from fsdpbench.launch.pool import PointPool
from fsdpbench.reports.result import Result

_DEADLINE_S = 240.0


@dataclass(frozen=True)
class Tried:
    """A script in a folder, and what its run came to."""

    folder: Path
    result: dict[str, Any]

    @property
    def findings(self) -> list[dict[str, Any]]:
        assert self.result["status"] == "ok", self.result["cause"]
        gradients = self.result["script"]["observed"]["gradients"]
        found: list[dict[str, Any]] = gradients["findings"]
        return found

    @property
    def figures(self) -> tuple[float, int]:
        """Step time and reserved memory."""
        assert self.result["status"] == "ok", self.result["cause"]
        return self.result["step_time_s"], self.result["peak_memory_bytes"]["reserved"]

    @property
    def candidates(self) -> list[Candidate]:
        return candidates(Result.of(self.result))

    @property
    def observed(self) -> ObservedScript:
        found = Result.of(self.result).observed
        assert found is not None
        return found

    def diff(self, candidate: Candidate) -> str | None:
        """What to change for it; None where no diff can be made."""
        assert candidate.edits, "without a diff there is a reason"
        if isinstance(candidate.edits, str):
            return None
        try:
            return diff_of(candidate.edits, str(self.folder))
        except NoDiffError:
            return None


Run = Callable[..., Tried]


@pytest.fixture(scope="session")
def points() -> Iterator[PointPool]:
    with PointPool(1) as running:
        yield running


@pytest.fixture
def run(points: PointPool, tmp_path: Path) -> Run:
    """`run(files, variation)`: the script `train.py` of these files, on 8 GPUs, varied where one is named;
    `diff`: a change of the files."""
    numbers = iter(range(1000))

    def execute(
        files: Mapping[str, str], variation: str | None = None, *, diff: str | None = None, gpus: int = 8
    ) -> Tried:
        folder = tmp_path / f"script{next(numbers)}"
        folder.mkdir()
        for name, text in files.items():
            (folder / name).write_text(text)
        if diff is not None:
            words = ["patch", "-p1", "-s"]
            subprocess.run(words, input=diff.encode(), cwd=folder, check=True, capture_output=True)
        asked = {"script": folder / "train.py", "gpus": str(gpus), "hardware": "h100-80gb"}
        config = script_config(asked, ())
        assert config is not None
        if variation is not None:
            config = replace(config, what_if=WhatIf(variation=variation))
        out = folder / "run"
        out.mkdir()
        points.start(config, out)
        deadline = time.monotonic() + _DEADLINE_S
        while time.monotonic() < deadline:
            for _, _, result in points.finished(1.0):
                return Tried(folder, result.to_dict())
        raise AssertionError(f"{folder} is still running")

    return execute
