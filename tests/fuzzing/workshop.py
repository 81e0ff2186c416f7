"""A folder with one valid file of each kind that a command reads, for a case to use or to damage."""

from __future__ import annotations

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
