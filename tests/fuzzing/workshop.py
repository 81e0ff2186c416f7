"""A folder with one valid file of each kind that a command reads, for a case to use or to damage."""

from __future__ import annotations

import hashlib
import os
import shutil
from pathlib import Path

from forked_commands import CommandServer

TINY = (
    "--model", "gpt", "--shape", "layers=2,d_model=64,heads=2,vocab=256,max_seq=64", "--device", "sim",
    "--gpus", "2",
)  # fmt: skip
PROFILES = Path(__file__).parents[2] / "fsdpbench" / "sim" / "profiles"
SPACE = """\
model = "gpt"
shape = "layers=1,d_model=32,heads=1,vocab=64,max_seq=16"
device = "sim"
hardware = "a100-80gb"
gpus = [2, 4]
gpus_per_node = 2
system = ["impl-fsdp2"]
reference = "torch-ddp"
max_points = 1
sample_seed = 3
exclude = [{ match = { batch = 2, wrap = "root" } }]
when = [{ match = { strategy = "HYBRID_SHARD" }, settings = { shard_size = [2] } }]
[settings]
strategy = ["FULL_SHARD", "HYBRID_SHARD"]
batch = [1, 2]
wrap = ["block", "root"]
"""
THRESHOLDS = """\
[relative_change]
peak_reserved_bytes = 0.01

[measured]
level = 0.01
minimum_effect = { step_time_s = 0.03 }
"""
SCRIPT = """\
import torch, torch.distributed as dist
from torch.distributed.fsdp import fully_shard
dist.init_process_group("nccl")
torch.cuda.set_device(0)
model = torch.nn.Linear(64, 64, device="cuda")
fully_shard(model)
optimizer = torch.optim.SGD(model.parameters())
for step in range(8):
    model(torch.ones(2, 64, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    torch.save(torch.ones(2), "checkpoint.pt")
"""


def digest(folder: Path) -> dict[str, str]:
    """Every name below a folder, and what is there."""
    found = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_symlink():
            found[name] = f"-> {os.readlink(path)}"
        elif path.is_file():
            found[name] = hashlib.sha256(path.read_bytes()).hexdigest()
        else:
            found[name] = "folder"
    return found


def furnish(folder: Path, commands: CommandServer) -> None:
    """Make `run` (a sweep's folder), `point` (a configuration's), `baseline.json`, `result.json`,
    `space.toml`, `thresholds.toml`, `profile.toml` and `trace.json.gz` in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "space.toml").write_text(SPACE)
    (folder / "thresholds.toml").write_text(THRESHOLDS)
    shutil.copy(PROFILES / "a100-80gb.toml", folder / "profile.toml")
    for words in (
        ["sweep", *TINY, "--wrap", "block,root", "--system", "impl-fsdp2", "--max-points", "2", "-o", "run"],
        ["baseline", "create", "run", "baseline.json"],
    ):
        done = commands.run_case(words, folder, timeout=200)
        assert done.code == 0, done
    point = next(path.parent for path in (folder / "run").glob("*/result.json"))
    shutil.copytree(point, folder / "point")
    shutil.copy(point / "result.json", folder / "result.json")
    shutil.copy(next(point.glob("trace/*_trace.json.gz")), folder / "trace.json.gz")
