"""The code that a search leaves says what ran, in the API that ran, and trains."""

from __future__ import annotations

import ast
import builtins
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from fsdpbench.base.configuration.config import Config, Measurement
from fsdpbench.base.settings import Settings
from fsdpbench.base.settings.values import is_mixed
from fsdpbench.engine.results.store import Store
from fsdpbench.sweep.planning import without_absent
from fsdpbench.sweep.snippets import snippets, write_recommended

TRY = """
import importlib.util, os, sys, torch, torch.distributed as dist
child = os.fork()
rank = "1" if child else "0"
os.environ.update(RANK=rank, WORLD_SIZE="2", LOCAL_RANK=rank, MASTER_ADDR="localhost")
dist.init_process_group("gloo", store=dist.FileStore(sys.argv[1], 2), rank=int(rank), world_size=2)
for path in sys.argv[2:]:
    spec = importlib.util.spec_from_file_location("snippet", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    class Block(torch.nn.Linear): pass
    torch.manual_seed(0)
    model = module.parallelize(torch.nn.Sequential(*(Block(4, 4) for _ in range(4))), Block)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(3):
        loss = model(torch.ones(2, 4)).float().square().sum()
        loss.backward(); optimizer.step(); optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0], (path, losses)
    print(path, "trained", flush=True)
if child:
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def config(system: str, **settings: object) -> Config:
    return Config(
        model="gpt-tiny", shape={}, system=system, device="sim", hardware="a100-80gb", gpus=2,
        gpus_per_node=2, settings=Settings.of(**settings), measurement=Measurement.default_for("sim"),
    )  # fmt: skip


BEST: dict[str, list[dict[str, object]]] = {
    "impl-fsdp2": [
        {
            "wrap": "every-2",
            "backward_prefetch": "post",
            "keep_last_unsharded": True,
            "activation_offload": "true:1+false:1",
        },
        {"memory_handover": "record_stream", "limit_all_gathers": "auto", "backward_prefetch": "none"},
    ],
    "impl-fsdp1": [
        {
            "limit_all_gathers": 3,
            "param_dtype": "bf16",
            "strategy": "SHARD_GRAD_OP",
            "activation_offload": "true:1+false:3",
        },
        {"limit_all_gathers": "off", "backward_prefetch_depth": 2, "memory_handover": "events"},
    ],
    "torch-fsdp2": [
        {"param_dtype": "bf16", "reduce_dtype": "fp32", "strategy": "SHARD_GRAD_OP"},
        {"activation_checkpointing": "full:1+op:1+none:2", "reshard_after_forward": "true:3+false:1"},
        {"wrap": "every-1:2+every-2:1", "forward_prefetch": "1:2+2:1", "backward_prefetch_depth": "1:2+2:1"},
    ],
    "torch-fsdp1": [
        {"limit_all_gathers": "off", "wrap": "root"},
        {"keep_last_unsharded": True, "activation_offload": True},
    ],
    "torch-ddp": [{}],
}


def winners() -> list[Config]:
    """Configurations as a search has them: what their system does not have is None."""
    return [
        without_absent(config(system, **{"param_dtype": "fp32", **settings}))
        for system, choices in BEST.items()
        for settings in choices
    ]


@pytest.mark.campaign
def test_every_snippet_trains(tmp_path: Path) -> None:
    paths = []
    for index, winner in enumerate(winners()):
        ((name, source),) = snippets([winner]).items()
        assert name == f"best_{winner.system.replace('-', '_')}.py"
        paths.append(str(tmp_path / f"{index}_{name}"))
        Path(paths[-1]).write_text(source)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", TRY, str(tmp_path / "store"), *paths],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("trained") == 2 * len(paths)


ON_BLOCKS = """
import importlib.util, sys, torch, torch.distributed as dist
from fsdpbench.workloads import get_workload
from fsdpbench.workloads.families.gpt import GPTBlock
dist.init_process_group("gloo", store=dist.FileStore(sys.argv[1], 2), rank=int(sys.argv[2]), world_size=2)
torch.set_num_threads(1)
found = []
for path in sys.argv[3:]:
    spec = importlib.util.spec_from_file_location("snippet", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    torch.manual_seed(0)
    model = module.parallelize(get_workload("gpt-tiny", shape={"layers": 4}).build(), GPTBlock)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.001)
    tokens = torch.arange(64).view(2, 32) % 60
    losses = []
    for _ in range(4):
        loss = model(tokens, tokens)
        loss.backward(); optimizer.step(); optimizer.zero_grad()
        losses.append(loss.item())
    found.append(losses)
assert found[0][-1] < found[0][0], found
assert all(losses == found[0] for losses in found), found
"""
BY_UNIT = {
    "activation_checkpointing": "full:1+op:1+op-every-3:1+none:1",
    "reshard_after_forward": "true:3+false:1",
    "activation_offload": "true:2+false:1+true:1",
    "forward_prefetch": "2:1+0:2+1:1",
    "backward_prefetch_depth": "1:3+2:1",
}
OF_SIZES = {
    "wrap": "every-1:2+every-2:1",
    "activation_offload": "true:1+false:2",
    "reshard_after_forward": "true:2+false:1",
    "forward_prefetch": "1:1+2:2",
}


@pytest.mark.campaign
def test_code_by_unit_trains_as_uniform_code_does(tmp_path: Path) -> None:
    """torch's and ours, on two CPU ranks: all losses are equal."""
    paths = []
    for system in ("torch-fsdp2", "impl-fsdp2"):
        for number, settings in enumerate(({}, BY_UNIT, OF_SIZES)):
            winner = without_absent(config(system, param_dtype="fp32", **settings))
            paths.append(tmp_path / f"{system}_{number}.py")
            paths[-1].write_text(snippets([winner])[f"best_{system.replace('-', '_')}.py"])
    words = [sys.executable, "-W", "ignore", "-c", ON_BLOCKS, str(tmp_path / "store")]
    ranks = [subprocess.Popen([*words, str(rank), *map(str, paths)]) for rank in range(2)]
    assert [rank.wait(timeout=240) for rank in ranks] == [0, 0]


ON_SIMULATED_GPUS = """
import os, torch, torch.distributed as dist
{source}
class Block(torch.nn.Linear): pass
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")
model = parallelize(torch.nn.Sequential(*(Block(64, 64) for _ in range(4))).cuda(), Block)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(7):
    model(torch.ones(2, 64, device="cuda")).float().sum().backward(); optimizer.step(); optimizer.zero_grad()
"""


@pytest.mark.campaign
@pytest.mark.parametrize("system", BEST)
def test_every_snippet_runs_as_a_script_on_simulated_gpus(
    system: str, fsdpbench: Callable[..., Any], tmp_path: Path
) -> None:
    """The first of a system, pasted into a script for two GPUs."""
    (source,) = snippets([without_absent(config(system, **BEST[system][0]))]).values()
    path = tmp_path / "train.py"
    path.write_text(ON_SIMULATED_GPUS.replace("{source}", source))
    done = fsdpbench("run", "--script", str(path), "--gpus", "2", "--json", "-o", str(tmp_path / "run"))
    assert json.loads(done.stdout)["status"] == "ok", done.stdout


_SAID = {
    "pre": ("pre", "BackwardPrefetch.BACKWARD_PRE"),
    "post": ("post", "BackwardPrefetch.BACKWARD_POST"),
    "none": (None, "None"),
}


@pytest.mark.parametrize("winner", winners(), ids=lambda winner: winner.name)
def test_it_says_what_ran_and_nothing_else(winner: Config) -> None:
    """Argument by argument, for the API of the system that ran."""
    (source,) = snippets([winner]).values()
    said = _arguments(source)
    settings = winner.settings
    for name in ("limit_all_gathers", "memory_handover", "backward_prefetch_depth"):
        value = getattr(settings, name)
        if winner.system == "torch-fsdp1" and name == "limit_all_gathers":
            assert said.pop(name) == str(value != "off")
        elif value is None or is_mixed(value):  # the system does not have it, or took its own default
            assert name not in said
        else:
            assert said.pop(name) == repr(False if value == "off" else value)
    for name in ("forward_prefetch_depth", "forward_prefetch"):
        if name in said:
            assert int(ast.literal_eval(said.pop(name))) == settings.forward_prefetch
    if "backward_prefetch" in said:
        value, enum = _SAID[settings.backward_prefetch or ""]
        assert said.pop("backward_prefetch") in (repr(value), enum)
    precision = said.pop("mp_policy", None) or said.pop("mixed_precision", "")
    for dtype in {settings.param_dtype, settings.reduce_dtype} - {"fp32", None}:
        assert {"bf16": "bfloat16", "fp16": "float16"}[str(dtype)] in precision
    rest = {"mesh", "device_mesh", "sharding_strategy", "auto_wrap_policy", "device_id", "use_orig_params"}
    assert said.keys() - rest == ({"gradient_as_bucket_view"} if winner.system == "torch-ddp" else set())
    if "sharding_strategy" in said:
        assert said["sharding_strategy"] == f"ShardingStrategy.{settings.strategy}"
    assert f"batch={settings.batch}" in source.split("# The training script's part:")[1]


@pytest.mark.parametrize("winner", winners(), ids=lambda winner: winner.name)
def test_every_name_is_imported(winner: Config) -> None:
    (source,) = snippets([winner]).values()
    nodes = list(ast.walk(ast.parse(source)))
    imports = [each for node in nodes if isinstance(node, ast.Import | ast.ImportFrom) for each in node.names]
    known = {*dir(builtins), *(each.asname or each.name.partition(".")[0] for each in imports)}
    known |= {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    known |= {node.arg for node in nodes if isinstance(node, ast.arg)}
    names = [node for node in nodes if isinstance(node, ast.Name)]
    known |= {node.id for node in names if isinstance(node.ctx, ast.Store)}
    assert {node.id for node in names} <= known


def _arguments(source: str) -> dict[str, str]:
    """The keyword arguments of the call that wraps, as source."""
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    wrapping = ("dict", "FullyShardedDataParallel", "DistributedDataParallel")
    (call,) = (call for call in calls if isinstance(call.func, ast.Name) and call.func.id in wrapping)
    return {str(keyword.arg): ast.unparse(keyword.value) for keyword in call.keywords}


def test_code_is_written_for_the_systems_that_ran_alone() -> None:
    best, slower, other = (
        config("impl-fsdp2", batch=4), config("impl-fsdp2", batch=2), config("torch-fsdp1", batch=1)
    )  # fmt: skip
    sources = snippets([best, slower, other, config("single")])
    assert list(sources) == ["best_impl_fsdp2.py", "best_torch_fsdp1.py"]
    assert "batch=4" in sources["best_impl_fsdp2.py"]


def swept(folder: Path, tried: Sequence[tuple[Config, str, float | None, bool]]) -> None:
    """A run of configurations, each with its status, throughput and whether it is risky."""
    store = Store.open_or_create(folder)
    store.write_space({"schema": 1}, [each for each, *_ in tried])
    for each, status, speed, risky in tried:
        work = store.work_folder(each)
        content = {
            "schema": 1, "config": each.to_dict(), "device": "sim", "cause": None, "status": status,
            "step_time_s": 1.0, "tokens_per_s_per_gpu": speed, "samples_per_s_per_gpu": 1.0,
            "interval": {"level": 0.9, "step_time_s": [0.9, 1.1], "work": 0.9, "risky": risky},
        }  # fmt: skip
        (work / "result.json").write_text(json.dumps(content))
        store.commit(each, work)


def test_a_sweep_leaves_the_best_of_torchs_and_of_ours_as_code(tmp_path: Path) -> None:
    tried = (
        ("torch-fsdp1", 1, "ok", 90.0),
        ("torch-fsdp2", 1, "ok", 100.0),
        ("impl-fsdp2", 2, "ok", 110.0),
        ("impl-fsdp2", 1, "ok", 110.0),
        ("impl-fsdp1", 1, "oom", None),
        ("torch-ddp", 1, "ok", 200.0),
    )
    swept(tmp_path, [(config(name, batch=n), status, speed, n == 2) for name, n, status, speed in tried])
    (tmp_path / "best_impl_fsdp1.py").write_text("of an earlier sweep")
    names = [path.name for path in write_recommended(tmp_path)]
    assert names == ["best_torch_fsdp2.py", "best_impl_fsdp2.py"]
    assert sorted(path.name for path in tmp_path.glob("*.py")) == sorted(names)
    assert "batch=1," in (tmp_path / "best_impl_fsdp2.py").read_text(), (
        "of two alike the one that is not risky"
    )


def test_of_two_alike_the_code_is_of_the_one_with_the_same_settings_for_all_units(tmp_path: Path) -> None:
    mixed, uniform = (
        config("torch-fsdp2", batch=1, activation_checkpointing=how) for how in ("full:2+none:2", "full")
    )
    swept(tmp_path, [(mixed, "ok", 101.0, False), (uniform, "ok", 100.0, False)])
    (path,) = write_recommended(tmp_path)
    assert "RECOMPUTED = " not in path.read_text()
