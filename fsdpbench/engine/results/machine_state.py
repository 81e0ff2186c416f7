"""The state of this machine before and after a measurement, and warnings that follow from it.

    observe() before ──run──> observe() after ──> environment: {"state": {...}, "warnings": [...]}

Does not need torch: GPUs are queried with `nvidia-smi`, the rest is read from /proc and /sys.
"""

import os
import shutil
import subprocess
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from fsdpbench.base.configuration.config import Config
from fsdpbench.base.numbers import proc_figure

_GPU_FIELDS = (
    "index", "name", "driver_version", "clocks.sm", "clocks.max.sm", "temperature.gpu", "power.limit",
    "power.default_limit", "clocks_throttle_reasons.active",
)  # fmt: skip
_HOT_C = 85.0
_HARMLESS_THROTTLING = 0x1
"""The bit of `clocks_throttle_reasons` for an idle GPU (NVIDIA's NVML, nvmlClocksThrottleReasons)."""
_ASK_TIMEOUT_S = 10.0
_BUSY_SHARE = 0.1
_LOOK_S = 0.2


@dataclass(frozen=True)
class MachineState:
    """`busy_cores`: cores that other programs use. `gpus` and `gpu_processes`: output of nvidia-smi."""

    busy_cores: float | None
    cores: int
    governor: str | None
    swapped_bytes: int | None
    gpus: tuple[dict[str, str], ...] = ()
    gpu_processes: tuple[dict[str, str], ...] = ()


def observe(device: str) -> MachineState:
    """Return the current state. Never raises: what cannot be read is None or empty."""
    gpus: tuple[dict[str, str], ...] = ()
    processes: tuple[dict[str, str], ...] = ()
    if device == "cuda":
        gpus = _ask_gpus("--query-gpu", _GPU_FIELDS)
        processes = _ask_gpus("--query-compute-apps", ("pid", "used_memory"))
    governor = _first_line(Path("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor"))
    swapped = proc_figure("vmstat", "pswpout")  # 4 KiB pages since boot
    swapped = None if swapped is None else swapped * 4096
    return MachineState(_busy_cores(), usable_cores(), governor, swapped, gpus, processes)


def usable_cores() -> int:
    """Return the number of cores that this process may run on."""
    return len(os.sched_getaffinity(0))


def available_memory() -> int | None:
    """Return the bytes that can be allocated without swapping; None if the system does not report them."""
    found = proc_figure("meminfo", "MemAvailable:")
    return None if found is None else found * 1024


def doubts(config: Config, before: MachineState, after: MachineState) -> list[str]:
    """Return the reasons to doubt the figures of `config`, one sentence each; empty on a steady machine."""
    ranks_here = min(config.gpus, config.gpus_per_node)
    found = []
    if before.busy_cores is not None and before.busy_cores > _BUSY_SHARE * before.cores:
        found.append(f"other work ran beside it: {before.busy_cores:.1f} of {before.cores} cores were busy")
    if config.device == "cpu" and ranks_here > before.cores:
        found.append(f"{ranks_here} ranks shared {before.cores} cores")
    if before.governor not in (None, "performance"):
        found.append(f"the CPU's clock follows its load (governor {before.governor})")
    if (after.swapped_bytes or 0) > (before.swapped_bytes or 0):
        found.append("the machine swapped while it ran")
    if before.gpu_processes:
        pids = ", ".join(process.get("pid", "?") for process in before.gpu_processes)
        found.append(f"other processes were on the GPUs: {pids}")
    for gpu in after.gpus:
        found += [f"GPU {gpu.get('index', '?')}: {doubt}" for doubt in _gpu_doubts(gpu)]
    return found


def environment_of(config: Config, before: MachineState, after: MachineState) -> dict[str, object]:
    """Return `state` and `warnings` for the `environment` of a measured result."""
    return {
        "state": {"before": asdict(before), "after": asdict(after)},
        "warnings": doubts(config, before, after),
    }


def _gpu_doubts(gpu: dict[str, str]) -> list[str]:
    found = []
    limit, usual = _number(gpu.get("power.limit")), _number(gpu.get("power.default_limit"))
    if limit is not None and usual is not None and limit < usual:
        found.append(f"its power is capped at {limit:g} of {usual:g} W")
    temperature = _number(gpu.get("temperature.gpu"))
    if temperature is not None and temperature >= _HOT_C:
        found.append(f"it was at {temperature:g} degrees C")
    try:
        reasons = int(gpu.get("clocks_throttle_reasons.active", "0"), 16) & ~_HARMLESS_THROTTLING
    except ValueError:
        reasons = 0
    if reasons:
        found.append(f"its clocks were held back (reasons {reasons:#x})")
    return found


def _ask_gpus(query: str, fields: tuple[str, ...]) -> tuple[dict[str, str], ...]:
    program = shutil.which("nvidia-smi")
    if program is None:
        return ()
    try:
        asked = [program, f"{query}={','.join(fields)}", "--format=csv,noheader,nounits"]
        done = subprocess.run(asked, capture_output=True, text=True, timeout=_ASK_TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return ()
    lines = [line for line in done.stdout.splitlines() if line.strip()]
    return tuple(dict(zip(fields, map(str.strip, line.split(",")), strict=False)) for line in lines)


def _busy_cores() -> float | None:
    """Return the cores in use during `_LOOK_S`; the load average would include this bench's earlier work."""
    first = _cpu_ticks()
    time.sleep(_LOOK_S)
    second = _cpu_ticks()
    if first is None or second is None:
        return None
    elapsed = second[1] - first[1]
    return round((second[0] - first[0]) / elapsed * (os.cpu_count() or 1), 2) if elapsed > 0 else None


def _cpu_ticks() -> tuple[int, int] | None:
    """Return the (busy, total) ticks of all cores since boot, from /proc/stat's first line."""
    try:
        ticks = [int(word) for word in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]]
    except (OSError, ValueError):
        return None
    idle = sum(ticks[3:5])  # idle and iowait
    everything = sum(ticks[:8])
    return everything - idle, everything


def _first_line(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None


def _number(text: str | None) -> float | None:
    try:
        return None if text is None else float(text)
    except ValueError:
        return None
