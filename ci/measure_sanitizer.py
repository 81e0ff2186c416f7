"""The cost of the sanitizer: three steps of a configuration with it, as a ratio to the same without.

    python ci/measure_sanitizer.py [--runs 3] [CASE…]

Each run is a process forked from one that has imported torch and built nothing; runs with and without take
turns, in both orders. The result has the median ratios of wall and processor time, and the most memory of
the runs with it.
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

from fsdpbench.base.configuration.config import Config, Measurement
from fsdpbench.base.settings import SETTINGS, Settings
from fsdpbench.engine.devices.base import Placement
from fsdpbench.engine.worker import run_rank
from fsdpbench.sweep.planning import make_config, make_target, without_absent

CASES = {
    "gpt-125m": ("gpt-125m", 8, {}),
    "gpt-2.8b": ("gpt-2.8b", 8, {}),
    "gpt-175b": ("gpt-175b", 512, {"activation_checkpointing": "full", "batch": "1", "seq": "2048"}),
}
SYSTEMS = ("impl-fsdp2", "torch-fsdp2")


def configuration(case: str, system: str, *, sanitize: bool) -> Config:
    """A case's configuration: three steps, none of them traced."""
    model, gpus, given = CASES[case]
    target = make_target(
        model=model, shape={}, device="sim", hardware="a100-80gb", gpus=gpus, gpus_per_node=None, data=None,
        measurement=Measurement(1, 2, 0, timeout_s=600.0), sanitize=sanitize,
    )  # fmt: skip
    settings = Settings.of(**{name: SETTINGS[name].read(text) for name, text in given.items()})
    return without_absent(make_config(target, system, settings, target.workload()))


def run(config: Config) -> tuple[float, float, int]:
    """Wall and processor seconds, and peak memory in bytes, of one run in a forked process."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        folder = tempfile.mkdtemp()
        wall, processor = time.perf_counter(), time.process_time()
        status = run_rank(config, Placement(0, config.gpus, 0), Path(folder))
        spent = (time.perf_counter() - wall, time.process_time() - processor)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        shutil.rmtree(folder)
        os.write(writer, f"{status} {spent[0]} {spent[1]} {peak}".encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        words = pipe.read().split()
    os.waitpid(child, 0)
    if words[:1] != ["ok"]:
        raise RuntimeError(f"{config.name}: {words or 'the process ended without a message'}")
    return float(words[1]), float(words[2]), int(words[3])


def measure(case: str, system: str, runs: int) -> str:
    """One line: ratios and memory."""
    plain, sanitized = (configuration(case, system, sanitize=on) for on in (False, True))
    wall, processor, peaks, seconds = [], [], [], []
    for index in range(runs):
        if index % 2:
            new, old = run(sanitized), run(plain)
        else:
            old, new = run(plain), run(sanitized)
        wall.append(new[0] / old[0])
        processor.append(new[1] / old[1])
        peaks.append(new[2])
        seconds.append(new[1])
    return (
        f"{case:9} {CASES[case][1]:4} {system:12} {statistics.median(wall):6.2f} "
        f"{statistics.median(processor):10.2f} {min(seconds):8.1f} {max(peaks) / 2**30:9.2f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("cases", nargs="*")
    given = parser.parse_args()
    import fsdpbench.launch.preload  # noqa: F401  torch and all that a run imports

    print("ratios, with the sanitizer to without, of three steps; processor seconds and GiB with it")
    print(f"{'model':9} {'GPUs':>4} {'system':12} {'wall':>6} {'processor':>10} {'seconds':>8} {'GiB':>9}")
    for case in given.cases or CASES:
        for system in SYSTEMS:
            print(measure(case, system, given.runs), flush=True)
    print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores; Python {sys.version.split()[0]}")


if __name__ == "__main__":
    main()
