"""Ways in which memory runs out, each as a user meets it: the first proposal is carried out, and fits."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fsdpbench.answers.explain.advice import Change, grows, steps_until_full
from fsdpbench.base.configuration.config import WhatIf
from fsdpbench.reports.result import Result
from fsdpbench.sweep.trials import Trial

CommandLine = Callable[..., Any]
MESSAGE = """
[rank3]:   File "/home/u/pretrain.py", line 171, in main
[rank3]:     loss.backward()
[rank3]:   File "/v/lib/python3.11/site-packages/torch/autograd/graph.py", line 824, in _engine_run_backward
[rank3]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 4.64 GiB. GPU 3 has a total capacity of
[rank3]: 79.11 GiB of which 2.93 GiB is free. Including non-PyTorch memory, this process has 76.17 GiB memory
[rank3]: in use. Of the allocated memory 71.02 GiB is allocated by PyTorch, and 0.60 GiB is
[rank3]: reserved by PyTorch but unallocated.
"""
QWEN_32B = {
    "model_type": "qwen3", "head_dim": 128, "hidden_act": "silu", "hidden_size": 5120,
    "intermediate_size": 25600, "max_position_embeddings": 40960,
    "num_attention_heads": 64, "num_hidden_layers": 64,
    "num_key_value_heads": 8, "rms_norm_eps": 1e-06, "rope_theta": 1000000, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16", "vocab_size": 151936,
}  # fmt: skip
KEEPS = """
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
dist.init_process_group("nccl")
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(1024, 4096, device="cuda"), nn.Linear(4096, 1024, device="cuda")
    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))
model = nn.Sequential(*[Block() for _ in range(4)])
for block in model:
    fully_shard(block)
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters())
losses = []
for _ in range(8):
    x = torch.randn(SIZE, 1024, device="cuda")
    loss = model(x).exp().sum()
    losses.append(model(x).exp().mean(1))WRITTEN
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def explained(fsdpbench: CommandLine, *words: str) -> dict[str, Any]:
    content: dict[str, Any] = fsdpbench.json("explain", "--json", *words)
    return content


@pytest.mark.campaign
def test_a_message_alone_says_what_it_can(fsdpbench: CommandLine, tmp_path: Path) -> None:
    (tmp_path / "oom.txt").write_text(MESSAGE)
    found = explained(fsdpbench, str(tmp_path / "oom.txt"))
    assert "simulation" not in found
    assert (found["message"]["phase"], found["message"]["ranks"]) == ("backward", [3])
    told = fsdpbench("explain", str(tmp_path / "oom.txt")).stdout
    assert "not fragmentation" in told
    assert "unknown: a message does not tell" in told


@pytest.mark.campaign
@pytest.mark.parametrize("system", ["torch-fsdp2", "impl-fsdp2"])
def test_a_message_and_the_models_configuration(system: str, fsdpbench: CommandLine, tmp_path: Path) -> None:
    """Simulated, one runs out and one has retries: neither is told that it fits."""
    (tmp_path / "oom.txt").write_text(MESSAGE)
    (tmp_path / "config.json").write_text(json.dumps(QWEN_32B))
    where = ("--hf-config", str(tmp_path), "--gpus", "8", "--device", "sim", "--hardware", "h100-80gb")
    what = ("--system", system, "--seq", "4096")
    found = explained(fsdpbench, "--from", str(tmp_path / "oom.txt"), *where, *what, "--batch", "2")
    first = found["simulation"]["changes"][0]["write"]
    given = "" if first.startswith("--batch") else "--batch 2 "
    assert "PYTORCH" not in first, "written as flags"
    run = ("run", *where, *what, *f"{given}{first}".split(), "-o", str(tmp_path / "run"), "--json")
    result = json.loads(fsdpbench(*run).stdout)
    assert (result["status"], result["alloc_retries_per_step"]) == ("ok", 0), first


@pytest.mark.campaign
def test_losses_that_are_kept_alive(fsdpbench: CommandLine, tmp_path: Path) -> None:
    """What is proposed is written into the script; it does not grow any more."""
    script = tmp_path / "train.py"
    script.write_text(KEEPS.replace("SIZE", "65536").replace("WRITTEN", ""))
    on = ("--gpus", "8", "--hardware", "a100-40gb")
    found = explained(fsdpbench, "--script", str(script), *on)["simulation"]
    assert found["account"]["growth"]["per_step_bytes"] > 1 << 30
    first = found["changes"][0]
    assert first["write"].startswith(".detach() what the loop keeps")
    script.write_text(
        KEEPS.replace("SIZE", "65536").replace("WRITTEN", "\n    losses[-1] = losses[-1].detach()")
    )
    found = explained(fsdpbench, "--script", str(script), *on)["simulation"]
    assert found["status"] == "ok"
    assert found["account"]["growth"]["per_step_bytes"] < 1 << 20
    assert not found["changes"]


@pytest.mark.campaign
def test_a_sweep_that_ran_out_in_the_first_step_of_its_optimizer(
    fsdpbench: CommandLine, tmp_path: Path
) -> None:
    folder = str(tmp_path / "runs")
    words = ("--model", "gpt-6.7b", "--gpus", "8", "--device", "sim", "--hardware", "h100-80gb")
    fsdpbench("sweep", *words, "--system", "torch-ddp", "--batch", "1", "-o", folder)
    found = explained(fsdpbench, folder)["simulation"]
    assert (found["account"]["step"], found["account"]["phase"]) == (1, "optimizer")
    first = found["changes"][0]["write"]
    assert first == "--system torch-fsdp2"
    done = fsdpbench("run", *words, "--batch", "1", *first.split(), "-o", str(tmp_path / "run"), "--json")
    assert json.loads(done.stdout)["status"] == "ok"


def frame(file: str, line: int, name: str) -> dict[str, Any]:
    return {"filename": file, "line": line, "name": name}


@pytest.mark.campaign
def test_a_snapshot_with_the_script_that_made_it(fsdpbench: CommandLine, tmp_path: Path) -> None:
    """The file says who held memory; with the script, what stops it is simulated."""
    script = tmp_path / "train.py"
    script.write_text(KEEPS.replace("SIZE", "65536").replace("WRITTEN", ""))
    kept, gib = [frame("train.py", 21, "<module>")], 1 << 30
    history = [
        {"action": "alloc", "size": gib, "addr": gib * place, "stream": 0, "time_us": place, "frames": kept}
        for place in range(1, 30)
    ]
    history.append(
        {"action": "oom", "size": 2 * gib, "device_free": gib, "stream": 0, "time_us": 99, "frames": kept}
    )
    blocks = [{"size": gib, "requested_size": gib, "state": "active_allocated", "address": gib * place}
              for place in range(1, 30)]  # fmt: skip
    segment = {"device": 0, "address": gib, "total_size": 29 * gib, "allocated_size": 29 * gib,
               "active_size": 29 * gib, "stream": 0, "segment_type": "large", "blocks": blocks}  # fmt: skip
    snapshot = tmp_path / "memory.pickle"
    snapshot.write_bytes(pickle.dumps({"segments": [segment], "device_traces": [history]}))
    told = ("--from", str(snapshot), "--script", str(script), "--gpus", "8", "--hardware", "a100-40gb")
    found = explained(fsdpbench, *told)
    (device,) = found["snapshot"]
    assert (device["asked"], device["lines"][0]["line"]) == (2 * gib, "train.py:21 <module>")
    assert min(device["alive_by_age_bytes"]) > 0
    assert found["simulation"]["changes"][0]["write"].startswith(".detach() what")


def test_growth_that_fills_memory_soon_is_no_fit() -> None:
    growth = {"per_step_bytes": 10, "at_step_ends_bytes": [0, 10, 20]}
    account = {"growth": growth, "free_bytes": 500, "unused_bytes": 500}
    trial = Trial(Any, Result.of({"status": "ok", "memory_account": account}))  # type: ignore[arg-type]
    assert steps_until_full(trial.account) == 103
    assert grows(trial)
    roomy = Result.of({"status": "ok", "memory_account": account | {"free_bytes": 10**9}})
    assert not grows(Trial(Any, roomy))  # type: ignore[arg-type]
    assert not grows(Trial(Any, Result.of({"status": "ok"})))  # type: ignore[arg-type]


def test_a_change_of_a_varied_script_is_done_beside_the_variation() -> None:
    earlier = WhatIf(variation="detach-kept", account=True)
    assert WhatIf(variation="checkpoint").after(earlier).variation == "checkpoint+detach-kept"
    after = WhatIf(allocator="x:1").after(earlier)
    assert (after.allocator, after.variation, after.account) == ("x:1", "detach-kept", True)
    assert Change("a", "").with_(Change("b", "", unpriced=True)).unpriced
