"""What Dynamo makes of wrapped units is the same on simulated GPUs as on real ranks: graphs, breaks, causes.

On the CPU its kernels are not compiled, which would take C++ a minute a case and changes none of this.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fsdpbench.base.configuration.config import Config
from fsdpbench.engine.devices.base import Placement
from fsdpbench.engine.results.records import RankRecord, Status, read_records
from fsdpbench.engine.worker import run_rank
from fsdpbench.launch.elastic import run_elastic

pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
WRAPS = (
    "block",
    "every-2",
    "size:10000",
    "block+token_embedding",
    "block+token_embedding+lm_head",
    "GPTFeedForward+GPTAttention",
    "GPTBlock+Projection",  # each product of a block is a unit inside of a unit
    "size:1000",
    "root",
)
SYSTEMS = ("torch-fsdp2", "impl-fsdp2", "torch-fsdp1", "impl-fsdp1")
HOW: dict[str, dict[str, Any]] = {
    "full": {"activation_checkpointing": "full", "compile_loss": True},
    "none": {},
}


def on_cpu(config: Config, placement: Placement, folder: Path) -> Status:
    """A rank that traces graphs, and runs them eager."""
    torch._TorchCompileInductorWrapper.__call__ = lambda self, model, inputs: model.forward
    return run_rank(config, placement, folder)


def _run_simulated(config: Config, placement: Placement, folder: Path) -> None:
    from fsdpbench.sim import preload

    preload()  # names the device, for good
    run_rank(config, placement, folder)


def simulated(config: Config, folder: Path) -> RankRecord:
    """The record of rank 0 on simulated GPUs."""
    settings = {"device": "sim", "hardware": "h100-80gb"}
    arguments = (replace(config, **settings), Placement(0, config.gpus, 0), folder)
    process = multiprocessing.get_context("fork").Process(target=_run_simulated, args=arguments)
    process.start()
    process.join()
    return read_records(folder)[0]


@pytest.mark.campaign
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.parametrize("system", SYSTEMS)
def test_graphs_and_breaks(
    system: str, wrap: str, how: str, cpu_config: Callable[..., Config], tmp_path: Path
) -> None:
    if (system, wrap, how) == ("impl-fsdp1", "GPTBlock+Projection", "none"):
        pytest.xfail("a side leaves no record in time: not understood (docs/compile.md)")
    config = cpu_config(system, steps=(1, 1, 0), wrap=wrap, compile=True, **HOW[how])
    for folder in ("cpu", "sim"):
        (tmp_path / folder).mkdir()
    run_elastic(config, tmp_path / "cpu", on_cpu)
    real, here = read_records(tmp_path / "cpu")[0], simulated(config, tmp_path / "sim")

    told = [dict(record.compilation or {}) for record in (here, real)]
    if system.endswith("fsdp1"):
        # Inside of a unit its hooks break at their first stream, which the CPU does not have, or soon after.
        for each in told:
            each["graph_breaks"] = sum(each["graph_breaks"].values())
    keys = ("traced", "graph_breaks", "recompilations")
    assert [told[0][key] for key in keys] == [told[1][key] for key in keys]
    assert (here.status, here.cause) == (real.status, real.cause)
    # Our hooks can be traced, torch's break graphs. Nothing compiles what is no unit, nor torch's own layers
    # by themselves; and inside of a checkpoint a break leaves nothing.
    nothing = wrap == "root"
    if system == "torch-fsdp2":
        nothing |= wrap == "size:1000" or (wrap == "GPTBlock+Projection" and how == "full")
    if system.endswith("fsdp2"):
        assert (real.status is Status.ERROR) is nothing
    assert ((real.compilation or {})["traced"] > (how == "full")) is (real.status is Status.OK)
