"""Runs the pytest-benchmark suites (host time of a step, trace decoder, simulator) on two sides, alternately,
and compares them by the gate's statistics (`compare_benchmarks.py`).

    python ci/run_benchmarks.py --base ../before          a checkout against this one
    python ci/run_benchmarks.py                           this checkout against itself: nothing may be slower

Sides alternate (A B, B A, ...), so that a drift of the machine hits both. `--rounds` runs of each: from
several on the run is the replicate; with one the rounds inside it are compared, which know less of the
machine's noise, so that a large `--minimum-effect` belongs to it.

Exit as `compare_benchmarks.py`; 5 if a suite fails.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

SUITES = ("tests/impl/benchmarks", "tests/sim/benchmarks", "tests/reports/trace/test_decoder_benchmark.py")
QUICK = "test_read or test_analyse or impl-flat-12-False or (test_simulated_step and impl-fsdp2)"
_HERE = Path(__file__).resolve().parents[1]
_TIMEOUT_S = 900


def main(words: Sequence[str] | None = None) -> int:
    """`words`: the command line's, None for this process's own."""
    parser = argparse.ArgumentParser(description="Run the benchmark suites on two sides and compare.")
    parser.add_argument(
        "--base", type=Path, default=_HERE, help="checkout to compare with (default: this one)"
    )
    parser.add_argument("--rounds", type=int, default=1, help="runs of the suites on each side")
    parser.add_argument("--quick", action="store_true", help="a few benchmarks of each suite")
    parser.add_argument("--minimum-effect", default="0.03", help="0.03: 3 %%")
    arguments = parser.parse_args(words)
    with tempfile.TemporaryDirectory(prefix="fsdpbench-benchmarks-") as folder:
        files: dict[str, list[str]] = {"before": [], "after": []}
        for number in range(arguments.rounds):
            order = ("before", "after") if number % 2 == 0 else ("after", "before")
            for side in order:
                checkout = arguments.base.resolve() if side == "before" else _HERE
                file = Path(folder) / f"{side}-{number}.json"
                if not run_suites(checkout, file, quick=arguments.quick):
                    print(f"run_benchmarks: the suites fail in {checkout}", file=sys.stderr)
                    return 5
                files[side].append(str(file))
        compare = [sys.executable, str(_HERE / "ci" / "compare_benchmarks.py")]
        compare += [",".join(files["before"]), ",".join(files["after"])]
        compare += ["--minimum-effect", arguments.minimum_effect]
        return subprocess.run(compare, check=False, env=_environment(_HERE)).returncode


def run_suites(checkout: Path, file: Path, *, quick: bool) -> bool:
    """Run the suites of a checkout with its own sources; whether they passed."""
    words = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", *SUITES]
    words += ["--benchmark-enable", "--benchmark-json", str(file), "--benchmark-quiet"]
    # Fewer rounds could not show a change at the gate's level.
    words += ["--benchmark-min-rounds", "12"]
    words += ["-k", QUICK] if quick else []
    done = subprocess.run(
        words,
        check=False,
        cwd=checkout,
        env=_environment(checkout),
        timeout=_TIMEOUT_S,
        stdout=subprocess.PIPE,
        text=True,
    )
    if done.returncode:
        print(done.stdout[-3000:], file=sys.stderr)
    return done.returncode == 0


def _environment(checkout: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(checkout)}


if __name__ == "__main__":
    sys.exit(main())
