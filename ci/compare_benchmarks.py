"""Compares two saved files of pytest-benchmark by the gate's statistics.

    pytest tests/impl/benchmarks tests/sim/benchmarks -n 0 --benchmark-enable --benchmark-json before-1.json
    python ci/compare_benchmarks.py before-1.json,before-2.json,... after-1.json,after-2.json,...

Each side is one file or several between commas. With several files a side the run is the replicate, as it is
for sweeps: one figure a file, its fastest round. With one file a side the rounds themselves are compared,
which know nothing of what differs between two runs of one program; a note says so.

Exit 0 no benchmark is slower, 1 some are, 2 a file cannot be used, 3 cannot judge (another machine or Python,
too few runs).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from fsdpbench.answers.check.thresholds import (
    USUAL_LEVEL,
    USUAL_MINIMUM_EFFECT,
    effect,
    holm,
    least_p_value,
    p_value,
    runs_needed,
)
from fsdpbench.base.errors import BenchError, CannotJudgeError, ExitCode, UsageError

Samples = dict[str, list[float]]


def main(words: Sequence[str] | None = None) -> ExitCode:
    """`words`: the command line's, None for this process's own."""
    parser = argparse.ArgumentParser(description="Compare two saved runs of pytest-benchmark.")
    parser.add_argument("before", help="file, or several between commas")
    parser.add_argument("after", help="file, or several between commas")
    parser.add_argument("--level", type=float, default=USUAL_LEVEL, help="chance of a false alarm")
    parser.add_argument("--minimum-effect", type=float, default=USUAL_MINIMUM_EFFECT, help="0.03: 3 %%")
    arguments = parser.parse_args(words)
    try:
        before, after = (read_side(text) for text in (arguments.before, arguments.after))
        slower = report(before, after, arguments.level, arguments.minimum_effect)
    except BenchError as error:
        print(f"compare_benchmarks: {error}", file=sys.stderr)
        return error.exit_code
    if "," not in arguments.before + arguments.after:
        print("note: one file a side; what differs from run to run is not in the p values")
    return ExitCode.REGRESSION if slower else ExitCode.OK


def read_side(text: str) -> tuple[Samples, dict[str, str]]:
    """Seconds by benchmark, and the machine they belong to."""
    files = [read_file(Path(part)) for part in text.split(",")]
    machines = [machine_of(content) for content in files]
    if any(machine != machines[0] for machine in machines):
        raise CannotJudgeError(f"{text}: the files are of different machines or Python versions")
    samples: Samples = {}
    for content in files:
        for benchmark in content["benchmarks"]:
            rounds = benchmark["stats"]["data"]
            samples.setdefault(benchmark["fullname"], []).extend([min(rounds)] if len(files) > 1 else rounds)
    return samples, machines[0]


def read_file(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
        if not all(benchmark["stats"]["data"] for benchmark in content["benchmarks"]):
            raise KeyError("data")
    except OSError as error:
        raise UsageError(f"{path}: cannot be read ({error.strerror})") from None
    except (ValueError, KeyError, TypeError):
        raise UsageError(f"{path}: is not a --benchmark-json file with its rounds") from None
    return dict(content)


def machine_of(content: Mapping[str, Any]) -> dict[str, str]:
    """Return the parts that must be equal; the machine's name need not be."""
    info = content.get("machine_info") or {}
    cpu = info.get("cpu") or {}
    python = ".".join(str(info.get("python_version")).split(".")[:2])
    return {"processor": str(cpu.get("brand_raw")), "cores": str(cpu.get("count")), "python": python}


def report(
    before: tuple[Samples, dict[str, str]],
    after: tuple[Samples, dict[str, str]],
    level: float,
    minimum_effect: float,
) -> list[str]:
    """Print a line for each benchmark; the names of those that are slower."""
    (old, machine), (new, other) = before, after
    differing = [
        f"{key}: {machine[key]} against {other[key]}" for key in machine if machine[key] != other[key]
    ]
    if differing:
        raise CannotJudgeError(f"the sides are not alike: {'; '.join(differing)}")
    names = [name for name in old if name in new]
    if not names:
        raise CannotJudgeError("no benchmark is on both sides")
    fewest = min(min(len(old[name]), len(new[name])) for name in names)
    if least_p_value(fewest, fewest) * len(names) > level:
        needed = runs_needed(level / len(names))
        raise CannotJudgeError(f"{fewest} runs cannot show a change at level {level:g}: {needed} are needed")
    chances = holm([p_value(old[name], new[name]) for name in names])
    slower = []
    for name, chance in zip(names, chances, strict=True):
        change = effect(old[name], new[name])
        shown = chance < level and abs(change) >= minimum_effect
        verdict = ("slower" if change > 0 else "faster") if shown else "noise"
        times = f"{median(old[name]) * 1e3:.4g} -> {median(new[name]) * 1e3:.4g} ms"
        print(f"{verdict:>6}  {name}: {times} ({change:+.1%}, p {chance:.2g})")
        slower += [name] if verdict == "slower" else []
    for name in [*(old.keys() - new.keys()), *(new.keys() - old.keys())]:
        print(f"  only on one side: {name}")
    print(f"{len(names)} benchmarks compared: {len(slower)} slower.")
    return slower


if __name__ == "__main__":
    sys.exit(int(main()))
