"""The code that a search leaves runs, in each of the APIs, and trains."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from fsdpbench.config import Config, Measurement
from fsdpbench.settings import Settings
from fsdpbench.tune.snippets import snippets

TRY = """
import importlib.util, os, sys, torch, torch.distributed as dist
os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="localhost")
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
for path in sys.argv[1:]:
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
    print(path, "trained")
"""


def config(system: str, **settings: object) -> Config:
    return Config(
        model="gpt-tiny", shape={}, system=system, device="sim", hardware="a100-80gb", gpus=1,
        gpus_per_node=1, settings=Settings.of(**settings), measurement=Measurement.default_for("sim"),
    )  # fmt: skip


BEST: dict[str, dict[str, object]] = {
    "impl-fsdp2": {"wrap": "every-2", "backward_prefetch": "post", "forward_prefetch": 1},
    "impl-fsdp1": {"limit_all_gathers": 3, "param_dtype": "bf16", "strategy": "SHARD_GRAD_OP"},
}


def test_every_snippet_trains(tmp_path: Path) -> None:
    paths = []
    for system, settings in BEST.items():
        sources = snippets(config(system, **{"param_dtype": "fp32", **settings}))
        assert len(sources) == 4
        assert next(iter(sources)) == f"best_{system.replace('-', '_')}.py"
        (tmp_path / system).mkdir()
        for name, source in sources.items():
            paths.append(str(tmp_path / system / name))
            Path(paths[-1]).write_text(source)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", TRY, *paths], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("trained") == 8


def test_what_an_api_does_not_have_is_said_there() -> None:
    wanted = {"backward_prefetch_depth": 2, "limit_all_gathers": 3, "backward_prefetch": "none"}
    sources = snippets(config("impl-fsdp1", **wanted))
    for missing in ("limit_all_gathers=3", "backward_prefetch_depth=2", "backward_prefetch=none"):
        assert f"Not the same here: {missing}" in sources["best_torch_fsdp2.py"]
    assert "Not the same here" not in sources["best_impl_fsdp1.py"]
