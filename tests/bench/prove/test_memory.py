"""The memory part of a proof: device and host, also where the script gathers its state to save it."""

from __future__ import annotations

from pathlib import Path

import pytest

from fsdpbench.answers.prove.parts import Request, prove
from fsdpbench.answers.prove.verdict import Part, Verdict
from fsdpbench.cli.requests.script_request import script_config
from fsdpbench.launch import fork_server

SCRIPT = """
import os, torch, torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard
dist.init_process_group("nccl")
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
model = nn.Sequential(*(nn.Sequential(nn.Linear(1024, 8192), nn.Linear(8192, 1024)) for _ in range(8)))
for block in model:
    fully_shard(block)
fully_shard(model)
model.cuda()
optimizer = torch.optim.AdamW(model.parameters())
for step in range(8):
    model(torch.randn(16, 1024, device="cuda")).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    if step == 3:
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        state = get_model_state_dict(model, options=options)
        if dist.get_rank() == 0:
            torch.save(state, "model.pt")
        del state
"""


@pytest.mark.campaign
def test_a_state_that_is_gathered_on_the_host_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(SCRIPT)
    fork_server.start("cpu")
    config = script_config({"script": Path("train.py"), "gpus": "8"}, ())
    assert config is not None
    (memory,) = prove(Request(config, frozenset({Part.MEMORY}))).parts
    assert memory.verdict is Verdict.OK
    # 8 x 2 x 1024 x 8192 elements of 4 bytes are 0.5 GiB.
    assert "0.5 GiB of host tensors on rank 0 in saving, at most 4.0 a node" in memory.summary
    assert not Path("model.pt").exists()
