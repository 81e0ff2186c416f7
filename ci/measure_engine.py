"""Measures the sweep engine and prints it as text, to be kept in ci/measured/.

    python ci/measure_engine.py sweep     200 simulated configurations of gpt-2.8b, traces kept
    python ci/measure_engine.py tune      a search in a space of more than 2,000 points

Wall time means something on a quiet machine only, so the load and the processor time are printed beside it.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from importlib.metadata import version
from pathlib import Path
from typing import Any

COMMANDS = {
    "sweep": "sweep --model gpt-2.8b --gpus 8 --device sim --preset wide --max-points 200",
    "tune": "tune --model gpt-2.8b --gpus 8 --device sim --memory 80GB --for tokens_per_s",
}
MARK = "FSDPBENCH_MEASURED"


def main(what: str) -> None:
    """Run one of `COMMANDS` in a folder that is thrown away, and print what it took."""
    keep_bytecode()
    words = COMMANDS[what].split()
    environment = {**os.environ, MARK: uuid.uuid4().hex}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "run"
        command = [sys.executable, "-c", "from fsdpbench.cli import main; main()", *words, "-o", str(folder)]
        busy_before, began = busy_cores(), time.monotonic()
        process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
        peak = [0]
        watcher = threading.Thread(target=watch, args=(process, environment[MARK], peak))
        watcher.start()
        output, _ = process.communicate()
        wall = time.monotonic() - began
        watcher.join()
        found = [json.loads(path.read_text()) for path in folder.rglob("result.json")]
        size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        traces = len(list(folder.rglob("*_trace.json.gz")))
    cpu = sum(result["bench"]["cpu_s"] or 0.0 for result in found)
    statuses = {result["status"] for result in found}
    counts = {status: sum(result["status"] == status for result in found) for status in sorted(statuses)}
    print(f"command        fsdpbench {COMMANDS[what]}")
    print(f"date           {time.strftime('%Y-%m-%d')}")
    print(f"machine        {processor()}, {os.cpu_count()} cores")
    print(f"versions       Python {platform.python_version()}, torch {version('torch')}")
    print(f"exit code      {process.returncode}")
    print(f"results        {len(found)}: {counts}; {traces} traces, {size / 2**20:.0f} MiB in all")
    print(f"wall time      {wall:.1f} s, other work beside it: {busy_before:.1f} cores busy before the start")
    print(f"processor time {cpu:.1f} s in the points, {cpu / max(len(found), 1):.2f} s a point")
    print(f"peak memory    {peak[0] / 2**30:.2f} GiB (sum of the proportional set sizes of all processes)")
    print("last lines")
    for line in output.strip().splitlines()[-3:]:
        print(f"  {line.strip().replace(str(folder), 'RUN')}")


def keep_bytecode() -> None:
    """Let what is measured find the bytecode of its modules, as pip leaves it, by a run before. Where Python
    must write none, the command and its server compile 450 modules again at each start."""
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    words = ("run", "--device", "sim", "--model", "gpt-125m", "--gpus", "2", "-o")
    with tempfile.TemporaryDirectory() as temporary:
        command = [sys.executable, "-m", "fsdpbench", *words, f"{temporary}/run"]
        subprocess.run(command, check=True, capture_output=True)


def watch(process: subprocess.Popen[Any], mark: str, peak: list[int], every_s: float = 6.0) -> None:
    """Seldom: counting the pages of all processes takes a tenth of a second, in which they cannot map any."""
    while process.poll() is None:
        peak[0] = max(peak[0], memory_of(mark))
        time.sleep(every_s)


def memory_of(mark: str) -> int:
    """Bytes of all processes with `mark` in their environment, shared pages divided among them."""
    total = 0
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (path / "environ").read_bytes():
                lines = (path / "smaps_rollup").read_text().splitlines()
                total += next(int(line.split()[1]) for line in lines if line.startswith("Pss:")) * 1024
        except (OSError, StopIteration):
            continue
    return total


def busy_cores() -> float:
    """Cores at work over two seconds."""

    def ticks() -> tuple[int, int]:
        words = [int(word) for word in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
        return sum(words) - words[3] - words[4], sum(words)

    first = ticks()
    time.sleep(2.0)
    second = ticks()
    return (second[0] - first[0]) / (second[1] - first[1]) * (os.cpu_count() or 1)


def processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "CPU")


if __name__ == "__main__":
    main(sys.argv[1])
