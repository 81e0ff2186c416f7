"""How long one simulated configuration takes as a whole process, and whether its work grows with the cluster.

    python ci/measure_simulator.py [--runs 5]

Four cases, whose runs take turns: the least and the median wall time, the least processor time of all
processes of a run, and, from a run of its own, the most memory that they hold together (Linux). Times mean
something on a quiet machine only, so the load is printed.
"""

from __future__ import annotations

import argparse
import ctypes
import gzip
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections import Counter
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from measure_engine import MARK, busy_cores, keep_bytecode, processor, watch

SYSTEMS = ("impl-fsdp2", "torch-fsdp2")
CASES = {
    "GPT-2.8B on 8": "--model gpt-2.8b --gpus 8",
    "GPT-175B on 512": "--model gpt-175b --gpus 512 --activation-checkpointing full --batch 1 --seq 2048",
}
_COUNTED = "--model gpt-2.8b --batch 2 --gpus"
_PR_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True)
class Run:
    """Seconds: until the command ended, and of processor time of all its processes."""

    wall_s: float
    cpu_s: float


def run(words: str, system: str, folder: Path, watched: list[int] | None = None) -> Run:
    """One configuration, until nothing of it is left; into `watched` goes the most memory that it held (what
    it took says nothing then)."""
    command = [sys.executable, "-m", "fsdpbench", "run", "--device", "sim", *words.split()]
    mark = uuid.uuid4().hex
    began = time.monotonic()
    process = subprocess.Popen(
        [*command, "--system", system, "-o", str(folder)],
        env={**os.environ, MARK: mark},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    if watched is not None:
        watch(process, mark, watched, every_s=0.1)
    wall = cpu = 0.0
    while True:
        try:
            pid, status, usage = os.wait4(-1, 0)  # the fork server too: its parent was the command
        except ChildProcessError:
            break
        cpu += usage.ru_utime + usage.ru_stime
        if pid == process.pid:
            wall = time.monotonic() - began
            process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} ended with exit code {process.returncode}")
    return Run(wall, cpu)


def operators(folder: Path) -> tuple[int, int]:
    """Operators of the host and kernels in the trace in `folder`."""
    (path,) = folder.rglob("*_trace.json.gz")
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    count = Counter(event.get("cat") for event in events)
    return count["cpu_op"], count["kernel"]


def measure(runs: int) -> None:
    """Run the cases alternately and print a line for each."""
    found: dict[tuple[str, str], list[Run]] = {}
    for _ in range(runs):
        for case, words in CASES.items():
            for system in SYSTEMS:
                with tempfile.TemporaryDirectory() as temporary:
                    taken = run(words, system, Path(temporary) / "run")
                found.setdefault((case, system), []).append(taken)
    for (case, system), each in found.items():
        peak = [0]
        with tempfile.TemporaryDirectory() as temporary:
            run(CASES[case], system, Path(temporary) / "run", watched=peak)
        walls, times = [one.wall_s for one in each], [one.cpu_s for one in each]
        print(
            f"{case:<16} {system:<12} wall {min(walls):5.2f} s, median {statistics.median(walls):5.2f} s; "
            f"processor {min(times):5.2f} s; memory {peak[0] / 2**30:.2f} GiB",
            flush=True,
        )


def count() -> None:
    """Print how many operators and kernels a step of GPT-2.8B has on few and on many GPUs."""
    for system in SYSTEMS:
        counts = []
        for gpus in (8, 512):
            with tempfile.TemporaryDirectory() as temporary:
                run(f"{_COUNTED} {gpus}", system, Path(temporary) / "run")
                host, kernels = operators(Path(temporary))
            counts.append(f"on {gpus} GPUs {host} operators and {kernels} kernels")
        print(f"{'GPT-2.8B':<16} {system:<12} traced steps have {', '.join(counts)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=5)
    options = parser.parse_args()
    keep_bytecode()
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    print(f"command   python ci/measure_simulator.py {' '.join(sys.argv[1:])}".rstrip())
    print(
        f"date      {time.strftime('%Y-%m-%d')}, {busy_cores():.1f} cores busy with other work at the start"
    )
    print(f"machine   {processor()}, {os.cpu_count()} cores")
    print(f"versions  Python {platform.python_version()}, torch {version('torch')}")
    print(f"cases     {'; '.join(f'fsdpbench run --device sim {words}' for words in CASES.values())}")
    print(f"runs      {options.runs} of each, alternately", flush=True)
    measure(options.runs)
    count()
    print(f"load      {os.getloadavg()[0]:.1f} in the last minute")


if __name__ == "__main__":
    main()
