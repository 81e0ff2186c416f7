"""Throughput of every system on two gloo ranks of this machine, against the better of torch's FSDP1 and 2.

    python ci/measure_cpu_systems.py [--repeat 5]

Two models: 8 blocks of width 512, and 24 small blocks, both in fp32 with AdamW. Runs of all systems take
turns, so that a ratio is of runs beside each other; its spread is over the rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

SYSTEMS = ("impl-fsdp2", "impl-fsdp1", "torch-fsdp2", "torch-fsdp1", "torch-ddp")
MODELS = {
    "8 blocks of 512": "layers=8,d_model=512,heads=8,vocab=1024,max_seq=128",
    "24 blocks of 64": "layers=24,d_model=64,heads=2,vocab=256,max_seq=128",
}
SWEEP = (
    "sweep --model gpt --gpus 2 --device cpu --wrap block --param-dtype fp32 --reduce-dtype fp32 "
    "--activation-checkpointing none --optimizer adamw --backward-prefetch pre --limit-all-gathers 2 "
    "--strategy FULL_SHARD --forward-prefetch 0 --compile false"
)


def step_times(shape: str, repeat: int, seq: int, batch: int) -> dict[str, list[float]]:
    """Median step times of each run, by system; runs of one round share an index."""
    with tempfile.TemporaryDirectory() as temporary:
        words = [*SWEEP.split(), "--shape", shape, "--system", ",".join(SYSTEMS), "--repeat", str(repeat)]
        words += ["--seq", str(seq), "--batch", str(batch), "-o", temporary]
        subprocess.run([sys.executable, "-m", "fsdpbench", *words], check=True, stdout=subprocess.DEVNULL)
        return read_step_times(Path(temporary))


def read_step_times(folder: Path) -> dict[str, list[float]]:
    """Return the step times of a sweep's folder, as `step_times` does."""
    found: dict[str, list[float]] = {}
    for path in sorted(folder.glob("*/result.json")):
        if re.search(r"\.run\d+$", path.parent.name):
            continue  # a further run: the first one's result has its figures beside its own
        result = json.loads(path.read_text())
        if result["status"] == "ok":
            runs = (result.get("repeats") or {}).get("step_time_s") or [result["step_time_s"]]
            found.setdefault(result["config"]["system"], []).extend(runs)
    return found


def report(name: str, times: dict[str, list[float]]) -> None:
    """A line a system: its step time, and its throughput against the better of torch's two."""
    rounds = min(map(len, times.values()))
    best = [min(times["torch-fsdp2"][k], times["torch-fsdp1"][k]) for k in range(rounds)]
    print(f"{name}, {rounds} rounds")
    for system in SYSTEMS:
        ratios = sorted(best[k] / times[system][k] for k in range(rounds))
        median = statistics.median(times[system][:rounds])
        print(
            f"  {system:<12} {median * 1e3:>8.1f} ms   {statistics.median(ratios):>5.2f}x the throughput "
            f"({ratios[0]:.2f} to {ratios[-1]:.2f})",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--seq", type=int, default=64)
    parser.add_argument("--batch", type=int, default=2)
    options = parser.parse_args()
    print(f"command   python ci/measure_cpu_systems.py {' '.join(sys.argv[1:])}".rstrip())
    print(f"date      {time.strftime('%Y-%m-%d')}, load {os.getloadavg()[0]:.1f} at the start")
    print(f"machine   {platform.machine()}, {os.cpu_count()} cores")
    print(f"versions  Python {platform.python_version()}, torch {version('torch')}")
    print(f"each rank {options.batch} x {options.seq} tokens a step")
    for name, shape in MODELS.items():
        report(name, step_times(shape, options.repeat, options.seq, options.batch))


if __name__ == "__main__":
    main()
