"""`--hf-config` and `--model hf:NAME`: from a file to points, without the file from then on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fsdpbench.base.errors import UsageError
from fsdpbench.cli.requests.request import make_request, request_of_space
from fsdpbench.sweep.hf_model import with_hf_model
from fsdpbench.workloads import get_workload

TINY: dict[str, Any] = {
    "model_type": "qwen3",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 64,
    "max_position_embeddings": 16,
}
MIXTURE = {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8}
GEMMA = {"model_type": "gemma2", "sliding_window": 6}
GPT_OSS = {**MIXTURE, "model_type": "gpt_oss", "sliding_window": 6}
PHI = {"model_type": "phi", "num_key_value_heads": 4, "head_dim": None}


def write(path: Path, **changes: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(TINY | changes))
    return path


def test_a_file_becomes_a_model_and_its_whole_shape(tmp_path: Path) -> None:
    file = write(tmp_path / "my-qwen.json")
    given = with_hf_model({"hf_config": str(file), "gpus": 2})
    assert given["model"] == "hf:my-qwen"
    assert given["gpus"] == 2
    assert "hf_config" not in given
    workload = get_workload(given["model"], given["shape"])
    assert (workload.family, workload.shape["head_width"], workload.default_seq) == ("decoder", 16, 16)


def test_a_folder_a_snapshot_and_the_local_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write(tmp_path / "my-model" / "config.json").parent
    assert with_hf_model({"hf_config": str(folder)})["model"] == "hf:my-model"
    monkeypatch.chdir(folder)
    assert with_hf_model({"hf_config": "."})["model"] == "hf:my-model"
    cached = tmp_path / "hub" / "models--Qwen--Qwen3-8B"
    write(cached / "snapshots" / "0old" / "config.json", num_hidden_layers=1)
    snapshot = write(cached / "snapshots" / "9new" / "config.json").parent
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("9new\n")
    assert with_hf_model({"hf_config": str(snapshot)})["model"] == "hf:Qwen/Qwen3-8B"
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    given = with_hf_model({"model": "hf:Qwen/Qwen3-8B"})
    assert (given["model"], given["shape"]["layers"]) == ("hf:Qwen/Qwen3-8B", 2)
    assert with_hf_model(given) == given  # the shape is there: nothing is looked for again
    with pytest.raises(UsageError, match=r"does not hold it, and nothing is downloaded"):
        with_hf_model({"model": "hf:meta-llama/Llama-3"})
    with pytest.raises(UsageError, match=r"nothing is downloaded"):
        with_hf_model({"model": "hf:../../etc"})


def test_fields_of_a_shape_replace_those_of_the_file(tmp_path: Path) -> None:
    given = with_hf_model({"hf_config": str(write(tmp_path / "q.json")), "shape": "layers=3,norms=composed"})
    assert given["model"] == "hf:q+layers=3+norms=composed"
    assert get_workload(given["model"], given["shape"]).shape["layers"] == 3


def test_what_nobody_named_fits_larger_models(tmp_path: Path) -> None:
    asked = {"hf_config": str(write(tmp_path / "q.json")), "gpus": 2, "device": "sim", "system": "impl-fsdp2"}
    assert not make_request(asked, {}, whole_space=False).assumed, "batches that fit are found"
    request = make_request(asked, {"wrap": ["block", "root"]}, whole_space=False)
    assert request.assumed == {"batch": 1, "activation_checkpointing": "full"}
    assert "; batch=1, activation_checkpointing=full, as not named" in request.announcement(1)
    points = request.plan().points
    assert {(p.settings.batch, p.settings.activation_checkpointing) for p in points} == {(1, "full")}
    named = make_request(asked, {"batch": [4, 8]}, whole_space=False)
    assert named.assumed == {"activation_checkpointing": "full"}
    preset = make_request({**asked, "preset": "memory"}, {}, whole_space=False)
    assert "activation_checkpointing" not in preset.assumed
    assert not make_request({"model": "gpt-tiny", "gpus": 2}, {}, whole_space=False).assumed


@pytest.mark.campaign
def test_a_run_says_what_nobody_named(fsdpbench: Any, tmp_path: Path) -> None:
    file = write(tmp_path / "q.json")
    words = ("--gpus", "2", "--device", "sim", "-o", str(tmp_path / "out"))
    done = fsdpbench("run", "--hf-config", str(file), *words)
    assert done.returncode == 0
    assert "; batch=1, activation_checkpointing=full, as not named" in done.stderr


def test_what_is_recorded_needs_no_file(tmp_path: Path) -> None:
    file = write(
        tmp_path / "g.json", model_type="gpt_oss", **{k: v for k, v in GPT_OSS.items() if k != "model_type"}
    )
    asked = {"hf_config": str(file), "gpus": 2, "device": "sim", "system": "impl-fsdp2,torch-fsdp2"}
    request = make_request(asked, {"batch": [1, 2]}, whole_space=False)
    file.unlink()
    space = json.loads(json.dumps({k: v for k, v in request.to_space().items() if v is not None}))
    again = request_of_space(space)
    assert again.plan().points == request.plan().points
    assert {point.model for point in again.plan().points} == {"hf:g"}


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ({"model_type": "zzz"}, "model_type 'zzz'"),
        ({"clip_qkv": 3.0}, "key clip_qkv is 3.0"),
        ({"num_key_value_heads": 3}, "kv_heads is 3"),
        ({"num_hidden_layers": 0}, "layers is 0"),
        ({"num_hidden_layers": 10**15}, "at most 10,000"),
        ({"model_type": "mixtral", "num_local_experts": 10**12}, "experts makes"),
    ],
)
def test_what_cannot_be_built_is_a_usage_error(
    fsdpbench: Any, tmp_path: Path, content: dict[str, Any], told: str
) -> None:
    file = write(tmp_path / "c.json", **content)
    done = fsdpbench("plan", "--hf-config", str(file), "--device", "sim", "--no-predict")
    assert done.returncode == 2
    assert told in done.stderr


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--hf-config", "nowhere.json"), "no such file or folder"),
        (("--hf-config", "."), "holds no config.json"),
        (("--hf-config", ".", "--model", "gpt-tiny"), "leave out --model gpt-tiny"),
        ((), "which model?"),
    ],
)
def test_paths_that_are_no_model(
    fsdpbench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], told: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for command in ("run", "sweep", "plan", "tune"):
        done = fsdpbench(command, *words, "--device", "sim")
        assert done.returncode == 2
        assert told in done.stderr, command


def losses(fsdpbench: Any, folder: Path, *words: str) -> dict[str, list[float]]:
    """Of each configuration, the losses of the first steps, of a sweep on two real ranks."""
    words += ("--device", "cpu", "--gpus", "2")
    fixed = (
        "--activation-checkpointing",
        "none",
        "--strategy",
        "FULL_SHARD",
    )  # the default preset varies them
    done = fsdpbench("sweep", *words, *fixed, "-o", str(folder), "--json")
    results = json.loads(done.stdout)["results"]
    assert {result["status"] for result in results} == {"ok"}, [r["cause"] for r in results]
    return {result["name"]: result["loss"][:8] for result in results}


@pytest.mark.campaign
@pytest.mark.parametrize(
    "changes", [{}, GEMMA, PHI, MIXTURE, GPT_OSS], ids=["qwen3", "gemma2", "phi", "moe", "oss"]
)
@pytest.mark.parametrize("lora", [0, 4])
def test_losses_do_not_hang_on_what_shards_the_model(
    fsdpbench: Any, tmp_path: Path, changes: dict[str, Any], lora: int
) -> None:
    file = write(tmp_path / "c.json", **changes)
    words = (
        "--hf-config", str(file), "--param-dtype", "fp32", "--batch", "2", "--wrap", "block",
        "--backward-prefetch", "pre", "--limit-all-gathers", "2", "--lora", str(lora),
        "--system", "torch-ddp,torch-fsdp1,torch-fsdp2,impl-fsdp1,impl-fsdp2",
    )  # fmt: skip
    found = losses(fsdpbench, tmp_path / "out", *words)
    assert len(found) == 5
    reference = next(values for name, values in found.items() if name.startswith("torch-ddp"))
    assert reference[0] != reference[-1]
    for name, values in found.items():
        assert values == pytest.approx(reference, rel=2e-5), name


@pytest.mark.campaign
def test_a_frozen_bf16_model_trains_alike_under_either_fully_shard(fsdpbench: Any, tmp_path: Path) -> None:
    file = write(tmp_path / "c.json")
    words = ("--hf-config", str(file), "--system", "torch-fsdp2,impl-fsdp2", "--lora", "4", "--batch", "2")
    fixed = ("--wrap", "block", "--backward-prefetch", "pre", "--reduce-dtype", "fp32")
    one, two = losses(fsdpbench, tmp_path / "out", *words, *fixed).values()
    assert one == pytest.approx(two, rel=1e-3)


@pytest.mark.campaign
@pytest.mark.parametrize("changes", [{}, MIXTURE], ids=["qwen3", "moe"])
def test_a_base_in_4_bits_trains_as_it_does_unsharded(
    fsdpbench: Any, tmp_path: Path, changes: dict[str, Any]
) -> None:
    file = write(tmp_path / "c.json", **changes)
    words = (
        "--hf-config", str(file), "--param-dtype", "fp32", "--batch", "2", "--wrap", "block",
        "--backward-prefetch", "pre", "--lora", "4", "--lora-base", "4bit",
        "--system", "torch-ddp,torch-fsdp2,impl-fsdp2",
    )  # fmt: skip
    found = losses(fsdpbench, tmp_path / "out", *words)
    reference = next(values for name, values in found.items() if name.startswith("torch-ddp"))
    assert len(found) == 3
    assert reference[0] != reference[-1]
    for name, values in found.items():
        assert values == pytest.approx(reference, rel=2e-5), name


@pytest.mark.campaign
@pytest.mark.parametrize("four_bit", [False, True], ids=["bf16", "4bit"])
@pytest.mark.parametrize("system", ["torch", "impl"])
def test_memory_is_2_bytes_a_frozen_parameter_and_16_a_trained_one(
    fsdpbench: Any, tmp_path: Path, system: str, four_bit: bool
) -> None:
    """What lies in a simulated GPU's memory after a step, gradients included, of a model sharded over 8; in
    4 bits the blocks' linear layers take 0.53 bytes a parameter."""
    script = tmp_path / "train.py"
    script.write_text(_SCRIPT.replace("SYSTEM", system).replace("FOUR_BIT", str(four_bit)))
    done = fsdpbench("run", "--script", str(script), "--gpus", "8", "-o", str(tmp_path / "out"), "--json")
    folder = Path(json.loads(done.stdout)["folder"])
    held, exact, frozen, trained, packed = json.loads((folder / "stdout.log").read_text().splitlines()[-1])
    assert packed == (1_157_627_904 if four_bit else 0)
    expected = (2 * (frozen - packed) + (0.5 + 2 / 64) * packed + 16 * trained) / 8
    assert trained > 1e7
    assert exact == expected  # parameters, gradients and states of a rank, to the byte
    assert held == pytest.approx(expected, rel=0.02)  # rounded to blocks, and the batch


_SCRIPT = """
import json, os, torch, torch.distributed as dist
from fsdpbench.workloads import get_workload
from fsdpbench.workloads.lora import Lora, LoraWorkload
if "SYSTEM" == "torch":
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
else:
    from fsdpbench.impl import MixedPrecisionPolicy, fully_shard

torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")
workload = LoraWorkload(get_workload("qwen3-8b", {"layers": 6}), Lora(128, four_bit=FOUR_BIT))
with torch.device("meta"):
    model = workload.build("full", 64)
trained = workload.adapter_parameters
frozen = workload.parameters - trained
policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
for block in model.blocks:
    fully_shard(block, mp_policy=policy)
fully_shard(model, mp_policy=policy)
model.to_empty(device="cuda")
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], fused=True)
for step in range(3):
    optimizer.zero_grad()
    tokens = torch.randint(1000, (1, 64), device="cuda")
    model(tokens, tokens).backward()
    optimizer.step()
model.reshard()
torch.cuda.synchronize()
packed = 2 * sum(p.numel() for p in model.parameters() if p.dtype is torch.uint8)
kept = [*model.parameters(), *(p.grad for p in model.parameters() if p.grad is not None)]
kept += [each for state in optimizer.state.values() for each in state.values() if each.dim()]
exact = sum(each.to_local().nbytes for each in kept)
print(json.dumps([torch.cuda.memory_allocated(), exact, frozen, trained, packed]))
"""


LIBRARY_CASES: dict[str, dict[str, Any]] = {
    "qwen3": TINY,
    "mistral": {**TINY, "model_type": "mistral", "sliding_window": 24},
    "gpt2": {
        "model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128, "vocab_size": 512,
    },
}  # fmt: skip


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--model", "qwen3-8b"), "qwen3-8b comes from no file of the library"),
        (("--hf-config", "FILE"), "is not installed here"),
        (("--hf-config", "FILE", "--shape", "layers=1"), "--shape changes our build alone"),
    ],
)
def test_the_librarys_own_modules_are_refused_where_they_cannot_be_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], told: str
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    files = {"FILE": write(tmp_path / "c.json")}
    asked: dict[str, Any] = {"gpus": 2, "device": "sim", "system": "impl-fsdp2"}
    for flag, value in zip(words[::2], words[1::2], strict=True):
        asked[flag.removeprefix("--").replace("-", "_")] = str(files.get(value, value))
    with pytest.raises(UsageError, match=told):
        make_request(asked, {"implementation": ["transformers"]}, whole_space=False).plan()


@pytest.mark.campaign
@pytest.mark.parametrize("device", ["sim", "cpu"])
@pytest.mark.parametrize("case", LIBRARY_CASES)
def test_the_librarys_own_modules_run_beside_ours(
    fsdpbench: Any, tmp_path: Path, case: str, device: str
) -> None:
    """Where it is installed: as many FLOPs; on CPU ranks losses do not hang on what shards it."""
    pytest.importorskip("transformers")
    file = tmp_path / "c.json"
    file.write_text(json.dumps(LIBRARY_CASES[case]))
    words = (
        "--hf-config", str(file), "--param-dtype", "fp32",
        "--batch", "2", "--wrap", "block", "--backward-prefetch", "pre", "--limit-all-gathers", "2",
        "--device", device, "--gpus", "2", "--implementation", "own,transformers",
        "--system", "torch-ddp,torch-fsdp2,impl-fsdp2,impl-fsdp1", "-o", str(tmp_path / "out"), "--json",
    )  # fmt: skip
    results = json.loads(fsdpbench("sweep", *words).stdout)["results"]
    assert {result["status"] for result in results} == {"ok"}, [r["cause"] for r in results]
    assert len(results) == 8
    assert len({round(r["tflops_per_gpu"] * r["step_time_s"], 9) for r in results}) == 1
    library = [r for r in results if r["name"].endswith("transformers")]
    assert len(library) == 4
    if device == "cpu":
        reference = library[0]["loss"][:8]
        for result in library:
            assert result["loss"][:8] == pytest.approx(reference, rel=2e-5), result["name"]
