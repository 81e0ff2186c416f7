"""Configurations of the smallest model, and real ranks of them."""

from __future__ import annotations

import gzip
import importlib
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from fsdpbench.base.configuration.config import Config, Measurement
from fsdpbench.base.settings import Settings
from fsdpbench.engine.results.records import RankRecord, read_records
from fsdpbench.engine.results.result import Outcome
from fsdpbench.engine.worker import run_rank
from fsdpbench.launch.elastic import RankFunction, run_elastic
from fsdpbench.sweep.planning import make_config, make_target, without_absent

SHAPE = {"layers": 2, "d_model": 32, "heads": 2, "vocab": 64, "max_seq": 16}

collect_ignore = [] if torch.cuda.is_available() else ["test_cuda_ranks.py"]


@pytest.fixture(scope="session", autouse=True)
def imported() -> None:
    """What a rank needs: forked from this process, each would import it again."""
    for module in (
        "torch._dynamo",
        "torch.distributed.checkpoint.state_dict",
        "fsdpbench.engine.devices.real",
    ):
        importlib.import_module(module)


@pytest.fixture(scope="session")
def cpu_config() -> Callable[..., Config]:
    """Makes a configuration on `cpu`: its system, ranks, timeout in seconds, steps, and any setting."""

    def make(
        system: str = "torch-fsdp2",
        gpus: int = 2,
        timeout_s: float = 60.0,
        steps: tuple[int, int, int] = (1, 2, 2),
        **settings: Any,
    ) -> Config:
        target = make_target(
            model="gpt-tiny",
            shape=SHAPE,
            device="cpu",
            hardware=None,
            gpus=gpus,
            gpus_per_node=None,
            data=None,
            measurement=Measurement(*steps, timeout_s=timeout_s),
        )
        values = Settings.of(**{"batch": 2, "param_dtype": "fp32", **settings})
        return without_absent(make_config(target, system, values, target.workload()))

    return make


@dataclass(frozen=True)
class Launched:
    """A configuration that has run: its outcome and what it left."""

    outcome: Outcome
    folder: Path

    @property
    def records(self) -> list[RankRecord]:
        return read_records(self.folder)

    def trace(self, rank: int) -> dict[str, Any]:
        with gzip.open(self.folder / f"trace/rank{rank}_trace.json.gz") as file:
            content: dict[str, Any] = json.load(file)
        return content


@pytest.fixture(scope="session")
def launched_type() -> type[Launched]:
    return Launched


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Callable[..., Launched]]:
    """Runs a configuration in real ranks; afterwards none of their processes may be left."""
    before = _children()

    def run(config: Config, rank_function: RankFunction = run_rank) -> Launched:
        return Launched(run_elastic(config, tmp_path, rank_function), tmp_path)

    yield run
    assert _children() <= before


def _children() -> set[int]:
    """Processes whose parent is this one, ended ones that nobody has reaped included."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == os.getpid():
            found.add(int(path.parent.name))
    return found
