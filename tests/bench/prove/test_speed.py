"""The speed part of a proof: the same script against a committed baseline, and the exit code."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

SCRIPT = """
import os, torch, torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
dist.init_process_group("nccl")
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
model = nn.Sequential(*(nn.Sequential(nn.Linear(256, 1024), nn.Linear(1024, 256)) for _ in range(4))).cuda()
for block in model:
    fully_shard(block, reshard_after_forward=os.path.exists("reshards"))
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters())
for step in range(10):
    model(torch.randn(64, 256, device="cuda")).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.campaign
def test_a_slower_script_is_found_against_its_baseline(
    fsdpbench: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(SCRIPT)
    assert fsdpbench("run", "--script", "train.py", "--gpus", "8", "-o", "ran").returncode == 0
    assert fsdpbench("baseline", "create", "ran", "baseline.json").returncode == 0

    def proved(gpus: int) -> tuple[int, dict[str, Any]]:
        asked = ("--gpus", str(gpus), "--only", "speed,ranks", "--baseline", "baseline.json", "--json")
        done = fsdpbench("prove", "train.py", *asked)
        (speed,) = [part for part in json.loads(done.stdout)["parts"] if part["part"] == "speed"]
        return done.returncode, speed

    code, speed = proved(8)
    assert (code, speed["verdict"]) == (0, "ok")
    Path("reshards").touch()
    code, speed = proved(8)
    assert (code, speed["verdict"], speed["mark"]) == (1, "finding", "slower")
    assert "more all-gathers a step" in speed["findings"][0]
    code, speed = proved(16)
    assert (code, speed["verdict"]) == (3, "unknown")
    assert "baseline.json has no train-16x-" in speed["summary"]
    assert sorted(each.name for each in tmp_path.iterdir()) == [
        "baseline.json",
        "ran",
        "reshards",
        "train.py",
    ]
