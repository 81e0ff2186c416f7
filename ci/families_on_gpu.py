"""Step times of every model family on one GPU, predicted on simulated hardware and measured, side by side.

    python ci/families_on_gpu.py PROFILE.toml [--device cuda] [--only t5,llama]
    python ci/families_on_gpu.py --measure FOLDER                  on the GPU: the measured results alone
    python ci/families_on_gpu.py PROFILE.toml --measured FOLDER    elsewhere: predict what was measured there

Most runs are under `single` (no sharding), so that the comparison is of kernels and host alone; `small` and
`fsdp` are bound by the host.
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

_LLAMA = [
    *("--model", "llama", "--batch", "2", "--seq", "4096", "--shape"),
    "layers=12,d_model=4096,d_ff=11008,heads=32,kv_heads=8,vocab=32000",
]
# Sizes that train in 80 GB, with settings that change the kernels; and sizes that a CPU can try.
ON_GPU: dict[str, list[str]] = {
    "gpt": ["--model", "gpt-1.3b", "--batch", "4"],
    "t5": ["--model", "t5-large", "--batch", "8"],
    "llama": _LLAMA,
    "compiled": [*_LLAMA, "--compile", "true"],
    "recomputed": [*_LLAMA, "--activation-checkpointing", "full"],
    "composed": [*_LLAMA, "--norm", "composed", "--rotary", "complex"],
    "chunked": [*_LLAMA, "--loss", "chunked"],
    "small": ["--model", "gpt-350m", "--batch", "1", "--seq", "512"],
    "fsdp": ["--model", "gpt-350m", "--batch", "1", "--seq", "512", "--system", "torch-fsdp2"],
    "regnet": ["--model", "regnet-y-32gf", "--batch", "64"],
    "deepvit": ["--model", "deepvit", "--batch", "32", "--shape", "layers=16,d_model=2048,heads=16"],
    "dhen": ["--model", "dhen", "--batch", "1024", "--shape", "rows=100000"],
}
ON_CPU = {
    family: ["--model", f"{family}-tiny", "--batch", "2"]
    for family in ("gpt", "t5", "llama", "regnet", "deepvit", "dhen")
}


def run(arguments: list[str], folder: Path) -> dict[str, Any]:
    """The result of one `fsdpbench run`. Raises RuntimeError with the last line of its errors."""
    system = [] if "--system" in arguments else ["--system", "single"]
    command = [sys.executable, "-m", "fsdpbench", "run", *arguments, *system, "--gpus", "1"]
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


def measure(family: str, arguments: list[str], device: str, folder: Path) -> None:
    """Run one model on the device; its result goes to `folder` as FAMILY.json, or the error is printed."""
    with tempfile.TemporaryDirectory() as temporary:
        try:
            result = run([*arguments, "--device", device], Path(temporary))
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            print(f"{family:<10}  {error}", flush=True)
            return
    (folder / f"{family}.json").write_text(json.dumps(result))
    print(f"{family:<10} {result['status']}  {(result['step_time_s'] or 0) * 1e3:>10.1f} ms", flush=True)


def compare(family: str, arguments: list[str], profile: str, folder: Path) -> float | None:
    """Print one row; the relative error of the prediction, None if there is none."""
    if not (folder / f"{family}.json").is_file():
        return None
    real = json.loads((folder / f"{family}.json").read_text())
    with tempfile.TemporaryDirectory() as temporary:
        try:
            foretold = run([*arguments, "--device", "sim", "--hardware", profile], Path(temporary))
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            print(f"{family:<10}  {error}", flush=True)
            return None
    if real["status"] != "ok" or foretold["status"] != "ok":
        print(f"{family:<10}  measured {real['status']}, predicted {foretold['status']}", flush=True)
        return None
    measured, predicted = real["step_time_s"], foretold["step_time_s"]
    off = predicted / measured - 1
    peaks = [(result["peak_memory_bytes"] or {}).get("reserved") for result in (real, foretold)]
    memory = " ".join("-" if peak is None else f"{peak / 2**30:.1f}" for peak in peaks)
    print(
        f"{family:<10} {measured * 1e3:>10.1f} ms measured {predicted * 1e3:>10.1f} ms predicted"
        f" {off:>+8.1%}   GiB reserved, measured and predicted: {memory}",
        flush=True,
    )
    return off


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("profile", nargs="?", help="hardware profile: a name or a file")
    parser.add_argument("--device", default="cuda", help="cuda, or cpu to try the script out at tiny sizes")
    parser.add_argument("--tiny", action="store_true", help="the tiny size of each family, on any device")
    parser.add_argument("--only", help="families, comma-separated")
    parser.add_argument("--measure", type=Path, help="folder for measured results; nothing is predicted")
    parser.add_argument("--measured", type=Path, help="folder of measured results; nothing is measured")
    options = parser.parse_args()
    if (options.profile is None) == (options.measure is None):
        parser.error("name a PROFILE to predict with, or --measure FOLDER")
    models = ON_CPU if options.tiny or options.device != "cuda" else ON_GPU
    families = options.only.split(",") if options.only else list(models)
    with tempfile.TemporaryDirectory() as temporary:
        folder: Path = options.measured or options.measure or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        if options.measured is None:
            for family in families:
                measure(family, models[family], options.device, folder)
        if options.profile is None:
            return 0 if all((folder / f"{family}.json").is_file() for family in families) else 1
        errors = [compare(family, models[family], options.profile, folder) for family in families]
    known = [abs(error) for error in errors if error is not None]
    if known:
        print(f"mean error {statistics.fmean(known):.1%}, worst {max(known):.1%}")
    return 0 if len(known) == len(errors) else 1


if __name__ == "__main__":
    sys.exit(main())
