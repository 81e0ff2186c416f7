"""Checkpoints that scripts write, read back and spread, as they do on GPUs."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from conftest import RunScript

FSDP2 = """
import os, sys
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions, get_model_state_dict, get_state_dict, set_model_state_dict,
)
from torch.distributed.fsdp import fully_shard

dist.init_process_group("nccl")
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)).cuda()
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters())

def step():
    model(torch.ones(4, 64, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()

step()
"""


def test_a_sharded_checkpoint_is_whole_and_can_be_read_back(run_probe: RunScript, tmp_path: str) -> None:
    run = run_probe(
        FSDP2
        + """
state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer)))
dcp.save(state, checkpoint_id=sys.argv[1])
dcp.load(state, checkpoint_id=sys.argv[1])
print(sum(entry.stat().st_size for entry in os.scandir(sys.argv[1]) if entry.name.endswith(".distcp")))
for _ in range(6):
    step()
""",
        f"{tmp_path}/saved",
    )
    assert run.result["status"] == "ok", run.cause
    # This rank's eighth of 2 x (64 x 64 + 64) parameters and their two moments, and what a file adds.
    assert int(run.output) > 3 * 4 * 2 * (64 * 64 + 64) // 8


def test_whole_states_are_spread_from_rank_0(run_probe: RunScript) -> None:
    run = run_probe(
        FSDP2
        + """
whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
assert whole["0.weight"].shape == (64, 64) and whole["0.weight"].device.type == "cpu"
spread = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
set_model_state_dict(model, whole, options=spread)
for _ in range(6):
    step()
"""
    )
    assert run.result["status"] == "ok", run.cause


@pytest.mark.parametrize("original", [False, True])
@pytest.mark.parametrize("kind", ["FULL_STATE_DICT", "SHARDED_STATE_DICT"])
def test_fsdp1_gives_its_states(kind: str, original: bool, run_probe: RunScript) -> None:
    name = kind.partition("_")[0].capitalize()
    run = run_probe(
        f"""
        import torch.distributed as dist
        from torch.distributed import fsdp
        from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, StateDictType
        dist.init_process_group("nccl")
        model = FSDP(torch.nn.Linear(64, 64).cuda(), device_id=0, use_orig_params={original})
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(7):
            model(torch.ones(4, 64, device="cuda")).sum().backward()
            optimizer.step()
            if _ == 2:
                on_host = fsdp.{name}OptimStateDictConfig(offload_to_cpu=True)
                with FSDP.state_dict_type(model, StateDictType.{kind}, None, on_host):
                    assert set(model.state_dict()) == {{"weight", "bias"}}
                    states = FSDP.optim_state_dict(model, optimizer)
                    bias = states["state"]["bias"]["exp_avg"]  # no part of it is on this rank
                    assert bias.shape == (64,) and states["state"]["bias"]["step"] == _ + 1
                    optimizer.load_state_dict(FSDP.optim_state_dict_to_load(model, optimizer, states))
                assert len(FSDP.full_optim_state_dict(model, optimizer)["state"]) == 2
        """
    )
    assert run.result["status"] == "ok", run.cause


def test_a_tokenizer_is_saved_as_scripts_write_the_call(run_probe: RunScript, tmp_path: str) -> None:
    pytest.importorskip("tokenizers")
    run = run_probe(
        FSDP2
        + """
from tokenizers import Tokenizer, models
tokenizer = Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
os.chdir(sys.argv[1])
tokenizer.save("first.json")
tokenizer.save("second.json", pretty=False)
tokenizer.save(path="third.json", pretty=True)
print([open(f"{name}.json").read().count("\\n") for name in ("first", "second", "third")])
for _ in range(6):
    step()
""",
        str(tmp_path),
    )
    assert run.result["status"] == "ok", run.cause
    first, second, third = json.loads(run.output)
    assert first == third > second == 0
