"""Step times of every model family on one GPU, predicted on simulated hardware and measured, side by side.

    python ci/families_on_gpu.py PROFILE.toml [--device cuda] [--only t5,llama]

Each model runs under `single` (no sharding), so that the comparison is of kernels and host alone.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

# A size of each family that trains in 80 GB, and one that a CPU can try.
ON_GPU: dict[str, list[str]] = {
    "gpt": ["--model", "gpt-1.3b", "--batch", "4"],
    "t5": ["--model", "t5-large", "--batch", "8"],
    "llama": [
        *("--model", "llama", "--batch", "2", "--seq", "4096", "--shape"),
        "layers=12,d_model=4096,d_ff=11008,heads=32,kv_heads=8,vocab=32000",
    ],
    "regnet": ["--model", "regnet-y-32gf", "--batch", "64"],
    "deepvit": ["--model", "deepvit", "--batch", "32", "--shape", "layers=16,d_model=2048,heads=16"],
    "dhen": ["--model", "dhen", "--batch", "1024", "--shape", "rows=100000"],
}
ON_CPU = {family: ["--model", f"{family}-tiny", "--batch", "2"] for family in ON_GPU}


def run(arguments: list[str], folder: Path) -> dict[str, Any]:
    """The result of one `fsdpbench run`. Raises RuntimeError with the last line of its errors."""
    command = [sys.executable, "-m", "fsdpbench", "run", *arguments, "--system", "single", "--gpus", "1"]
    done = subprocess.run(
        [*command, "-o", str(folder), "--json"], capture_output=True, text=True, timeout=300
    )
    try:
        result: dict[str, Any] = json.loads(done.stdout)
    except ValueError:
        raise RuntimeError(
            done.stderr.strip().splitlines()[-1] if done.stderr.strip() else "no output"
        ) from None
    return result


def compare(family: str, arguments: list[str], profile: str, device: str) -> float | None:
    """Print one row; the relative error of the prediction, None if there is none."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        try:
            real = run([*arguments, "--device", device], folder / "real")
            foretold = run([*arguments, "--device", "sim", "--hardware", profile], folder / "sim")
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            print(f"{family:<8}  {error}", flush=True)
            return None
    if real["status"] != "ok" or foretold["status"] != "ok":
        print(f"{family:<8}  measured {real['status']}, predicted {foretold['status']}", flush=True)
        return None
    measured, predicted = real["step_time_s"], foretold["step_time_s"]
    error = predicted / measured - 1
    peaks = [(result["peak_memory_bytes"] or {}).get("reserved") for result in (real, foretold)]
    memory = " ".join("-" if peak is None else f"{peak / 2**30:.1f}" for peak in peaks)
    print(
        f"{family:<8} {measured * 1e3:>10.1f} ms measured {predicted * 1e3:>10.1f} ms predicted"
        f" {error:>+8.1%}   GiB reserved, measured and predicted: {memory}",
        flush=True,
    )
    return error


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("profile", help="hardware profile: a name or a file")
    parser.add_argument("--device", default="cuda", help="cuda, or cpu to try the script out at tiny sizes")
    parser.add_argument("--tiny", action="store_true", help="the tiny size of each family, on any device")
    parser.add_argument("--only", default=",".join(ON_GPU), help="families, comma-separated")
    options = parser.parse_args()
    models = ON_CPU if options.tiny or options.device != "cuda" else ON_GPU
    errors = [
        compare(family, models[family], options.profile, options.device) for family in options.only.split(",")
    ]
    known = [abs(error) for error in errors if error is not None]
    if known:
        print(f"mean error {statistics.fmean(known):.1%}, worst {max(known):.1%}")
    return 0 if len(known) == len(errors) else 1


if __name__ == "__main__":
    sys.exit(main())
