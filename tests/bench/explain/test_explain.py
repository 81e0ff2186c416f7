"""`fsdpbench explain`: what is said to hold memory adds up, and what is said to fit does."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from fsdpbench.answers.explain import advice
from fsdpbench.base.result_sections import BatchOption, LoaderCall, ObservedScript, ShardingCall
from fsdpbench.cli.requests.script_request import config_asked_for, script_config
from fsdpbench.engine.results.records import Status
from fsdpbench.reports.result import Result
from fsdpbench.sweep.trials import Trial

CommandLine = Callable[..., Any]
BIG_BATCH = "--model gpt-tiny --gpus 8 --device sim --batch 40000"
OUT_OF_MEMORY = {
    "activations": BIG_BATCH,
    "optimizer states": "--model gpt-6.7b --gpus 8 --device sim --system torch-ddp --batch 1",
    "gathered parameters": "--model gpt-6.7b --gpus 8 --device sim --system torch-fsdp1 --wrap "
    "root --batch 10",
    "at the limit": "--model gpt-2.8b --gpus 8 --device sim --system torch-fsdp2 --batch 14",
    "one GPU": "--model gpt-1.3b --gpus 1 --device sim --system single --batch 24",
}
WIDE = "layers=4,d_model=10240,heads=80"
"""6 billion parameters in few operators."""
SCRIPT = """
import sys, torch, torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
dist.init_process_group("nccl")
batch, kept = int(sys.argv[2]), []
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
for _ in range(8):
    out = model(torch.randn(batch, 1024, device="cuda"))
    if len(sys.argv) > 3:
        kept.append(out)
    out.sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def explained(fsdpbench: CommandLine, *words: str) -> dict[str, Any]:
    content: dict[str, Any] = fsdpbench.json("explain", *words, "--json")
    return content


def assert_adds_up(account: dict[str, Any]) -> None:
    names = ("waiting_bytes", "unused_bytes", "outside_bytes", "free_bytes")
    held = sum(account["held_bytes"].values())
    assert abs(held + sum(account[name] for name in names) - account["total_bytes"]) < 1024


def test_what_held_memory_adds_up_to_the_gpu_and_a_change_that_fits_has_a_price(
    fsdpbench: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = ("--batch 20000 --grad-accum 2", "--reduce-dtype bf16")
    every = advice.changes_for
    monkeypatch.setattr(
        advice, "changes_for", lambda *asked: [change for change in every(*asked) if change.write in wanted]
    )
    found = explained(fsdpbench, *BIG_BATCH.split())["simulation"]
    account = found["account"]
    assert_adds_up(account)
    assert (found["status"], account["step"], account["phase"]) == ("oom", 1, "forward")
    assert max(account["held_bytes"], key=account["held_bytes"].get) == "activations"
    assert found["needed_bytes"] > account["total_bytes"]
    (fits,) = found["changes"]
    assert fits["write"] == wanted[0]
    assert 0 < fits["price"] < 0.05
    assert found["not_enough"] == [wanted[1]]


def test_bad_questions_are_told_what_to_ask(fsdpbench: CommandLine, tmp_path: Path) -> None:
    (tmp_path / "log.txt").write_text("all is well")
    for words, told in (
        ([], "explain what?"),
        (["nowhere.txt"], "no such file"),
        ([str(tmp_path / "log.txt")], "cannot tell"),
        ([str(tmp_path)], "neither a run folder nor"),
        (["--batch", "4"], "Name it with --model"),
        (["a.txt", "b.txt"], "one FILE"),
    ):
        done = fsdpbench("explain", *words)
        assert (done.returncode, told in done.stderr) == (2, True), (words, done.stderr)


def test_every_proposal_of_a_configuration_can_run_and_differs_from_it() -> None:
    for text in OUT_OF_MEMORY.values():
        config = changes_config(text)
        assert config is not None
        found = advice.changes_for(config)
        assert len({change.write for change in found}) == len(found) > 3
        for change in found:
            assert change.applied_to(config).to_dict() != config.to_dict()


@pytest.mark.campaign
@pytest.mark.parametrize("words", OUT_OF_MEMORY.values(), ids=list(OUT_OF_MEMORY))
def test_the_first_change_of_five_runs_that_run_out_fits(
    words: str, fsdpbench: CommandLine, tmp_path: Path
) -> None:
    found = explained(fsdpbench, *words.split())["simulation"]
    assert found["status"] == "oom"
    assert_adds_up(found["account"])
    prices = [change["price"] for change in found["changes"] if not change["last_resort"]]
    assert prices == sorted(prices)
    first = found["changes"][0]["write"]
    assert "PYTORCH" not in first, "written as flags"
    done = fsdpbench("run", *words.split(), *first.split(), "-o", str(tmp_path / "run"), "--json")
    assert json.loads(done.stdout)["status"] == "ok", first


@pytest.mark.campaign
def test_a_script_that_runs_out_is_told_the_line_and_what_fits(
    fsdpbench: CommandLine, tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    told = ("--script", str(script), "--gpus", "8", "--")
    done = fsdpbench("explain", "--json", *told, "--batch", "900000")
    found = json.loads(done.stdout)["simulation"]
    assert found["account"]["phase"] == "forward"
    assert found["account"]["line"].startswith("train.py:")
    held = found["account"]["held_bytes"]
    assert held["inputs and others"] == pytest.approx(900_000 * 1024 * 4, rel=0.01)
    assert held["parameters"] == pytest.approx(4 * 4 * (8 * 1024 * 1024 + 5 * 1024) / 8, rel=0.01)
    writes = [change["write"] for change in found["changes"]]
    assert "-- --batch 450000" in writes
    assert any("checkpoint" in write for write in writes)
    assert not any("DataLoader" in write for write in writes), "the script has none"


def test_changes_of_a_script_are_those_of_what_it_does(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    config = script_config({"script": tmp_path / "train.py", "gpus": "8"}, ())
    assert config is not None
    seen = ObservedScript(batch=BatchOption("--batch", 12))
    replicated = {change.write for change in advice.changes_for(config, seen)}
    assert {"-- --batch 6", "-- --batch 3", "--gpus 16"} <= replicated
    assert not any("shard" in write or "DataLoader" in write or "zero_grad" in write for write in replicated)
    seen = msgspec.structs.replace(seen, sharding=[ShardingCall()], loaders=[LoaderCall()])
    sharded = {change.write for change in advice.changes_for(config, seen)}
    assert "fully_shard(model, ...)" in sharded
    assert any(write.startswith("reshard_after_forward=True") for write in sharded)
    assert len(advice.changes_for(config)) > len(sharded) - 2, "all of them, where nothing was seen"


@pytest.mark.campaign
def test_blocks_of_a_replicated_script_can_be_recomputed(fsdpbench: CommandLine, tmp_path: Path) -> None:
    script, shards = tmp_path / "train.py", "for block in model:\n    fully_shard(block)\nfully_shard(model)"
    assert shards in SCRIPT
    script.write_text(SCRIPT.replace(shards, "model = nn.parallel.DistributedDataParallel(model)"))
    words = ("--script", str(script), "--gpus", "8", "--", "--batch", "600000")
    found = json.loads(fsdpbench("explain", "--json", *words).stdout)["simulation"]
    assert any("checkpoint" in change["write"] for change in found["changes"])
    assert found["configurations_simulated"] < 10


@pytest.mark.campaign
def test_what_a_script_keeps_of_every_step_is_found(fsdpbench: CommandLine, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    growth = {}
    for more in ((), ("keep",)):
        done = fsdpbench("explain", "--json", "--script", str(script), "--", "--batch", "1024", *more)
        growth[more] = json.loads(done.stdout)["simulation"]["account"]["growth"]
    assert growth[()]["per_step_bytes"] == 0
    assert growth[("keep",)]["per_step_bytes"] == 4 * 1024 * 1024
    assert growth[("keep",)]["where"][0]["line"] == "train.py:12"


def test_a_run_on_gpus_is_simulated_on_those_that_are_alike(fsdpbench: CommandLine, tmp_path: Path) -> None:
    from fsdpbench.cli.commands.explain import Explanation, _read

    text = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.11 GiB"
    config = changes_config(BIG_BATCH).to_dict() | {"device": "cuda", "hardware": None}
    path = tmp_path / "result.json"
    for name, wanted in (("NVIDIA H100 80GB HBM3", "h100-80gb"), ("GTX 9", None)):
        hardware = {"name": name, "memory_bytes": 85_000_000_000}
        path.write_text(
            json.dumps({"status": "oom", "config": config, "hardware": hardware, "cause": {"message": text}})
        )
        if wanted is None:
            assert "--hardware" in fsdpbench("explain", str(path)).stderr
            continue
        explanation = Explanation()
        found, gpus = _read(str(path), None, explanation)
        assert found is not None
        assert (gpus, "2.00 GiB asked for" in explanation.texts[0]) == (wanted, True)


def changes_config(text: str) -> Any:
    """The configuration that a command line names."""

    options: dict[str, Any] = dict.fromkeys(
        ("script", "module", "check_ranks", "steps_by", "script_arguments")
    )
    words = shlex.split(text)
    options |= {k.removeprefix("--"): v for k, v in zip(words[::2], words[1::2], strict=True)}
    return config_asked_for(options, ())


def test_the_page_stands_alone_and_escapes_what_it_quotes(fsdpbench: CommandLine, tmp_path: Path) -> None:
    log, page = tmp_path / "oom.txt", tmp_path / "oom.html"
    log.write_text(
        '  File "<script>alert(1)</script>.py", line 3, in f\nCUDA out of memory. Tried to allocate 2.00 GiB.'
    )
    assert fsdpbench("explain", str(log), "-o", str(page)).returncode == 0
    text = page.read_text()
    assert "2.00 GiB" in text
    assert "<script" not in text
    assert "http" not in text, "nothing is loaded"


def test_of_what_needs_many_times_the_memory_pairs_are_tried(
    fsdpbench: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted, every = ("--batch 100000 --grad-accum 8", "--loss fused"), advice.changes_for
    monkeypatch.setattr(
        advice, "changes_for", lambda *asked: [change for change in every(*asked) if change.write in wanted]
    )
    words = "--model llama-tiny --gpus 8 --device sim --batch 800000"
    found = explained(fsdpbench, *words.split())["simulation"]
    assert found["needed_bytes"] > 16 * 80 * 2**30
    tried = [*found["not_enough"], *(change["write"] for change in found["changes"])]
    assert {*wanted, " ".join(wanted)} == set(tried)


def test_parameters_gradients_and_optimizer_are_told_apart(fsdpbench: CommandLine) -> None:
    """Replicated in fp32 they take 4 bytes a parameter each, and AdamW's second state finds no room."""
    from fsdpbench.sweep.hf_model import parse_shape
    from fsdpbench.workloads import get_workload

    words = f"--model gpt-2.8b --shape {WIDE} --gpus 8 --device sim --system torch-ddp --batch 1 --seq 64"
    found = explained(fsdpbench, *words.split(), "--no-changes")["simulation"]
    state = 4 * get_workload("gpt-2.8b", shape=parse_shape(WIDE)).parameters
    account = found["account"]
    assert_adds_up(account)
    assert account["phase"] == "optimizer"
    for kind in ("parameters", "gradients"):
        assert account["held_bytes"][kind] == pytest.approx(state, rel=0.01), kind
    assert state < account["held_bytes"]["optimizer states"] < 2 * state
    assert found["needed_bytes"] >= 4 * state


def test_a_model_of_hugging_face_is_explained_as_run_would_run_it(tmp_path: Path) -> None:
    shape = {
        "model_type": "qwen3", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "head_dim": 16, "num_attention_heads": 4, "num_key_value_heads": 2,
        "vocab_size": 64, "max_position_embeddings": 16,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(shape))
    options = {"hf_config": str(tmp_path), "gpus": "8", "device": "sim", "script_arguments": ()}
    config = config_asked_for(options, ())
    assert config is not None
    assert (config.gpus, config.shape["layers"], config.settings.seq) == (8, 2, 16)
    assert config.system == "torch-fsdp2", "what is explained ran outside, where that is the usual system"


def test_pairs_are_tried_until_enough_of_them_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    config = changes_config(BIG_BATCH)
    assert config is not None
    fits = iter((Status.OOM, Status.OK, Status.OK, Status.OOM, Status.OK, Status.OK, Status.OK))
    tried: list[int] = []

    def simulate(configs: Any, jobs: int, tell: Any) -> list[Trial]:
        tried.append(len(configs))
        return [Trial(each, Result(status=next(fits))) for each in configs]

    monkeypatch.setattr(advice, "simulate", simulate)
    several = [advice.Change(f"--x {place}", "") for place in range(9)]
    found = advice._until_some_fit(config, several, 1, lambda line: None)
    assert (tried, len(found)) == ([3, 3], 6)
