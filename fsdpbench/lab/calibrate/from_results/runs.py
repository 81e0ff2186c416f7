"""Measured runs: a configuration, what it took, and how sure that is."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsdpbench.base.configuration.config import Config
from fsdpbench.base.errors import UsageError
from fsdpbench.base.files.documents import read_json_object
from fsdpbench.engine.devices.detection import profile_like
from fsdpbench.reports.result import Result, Status
from fsdpbench.sim.model.profile import stated_machine

_SAME_STEP = 0.005
"""A step time is trusted to this share at best, however alike its samples are (estimated)."""


@dataclass(frozen=True)
class MeasuredRun:
    """The measured speed of a run of `config`: `value` in the result's `key`; more is faster if `is_speed`.

    ``chip``: the packaged profile that is alike, empty if none is; ``noise``: standard deviation of the
    value's logarithm, as measured.
    """

    name: str
    config: Config
    key: str
    value: float
    is_speed: bool
    chip: str
    noise: float = _SAME_STEP

    def slower(self, result: Result) -> float:
        """ln(measured over simulated step time). Raises `UsageError` where the simulation has none."""
        simulated = result.at(self.key)
        if result.status is not Status.OK or not simulated:
            cause = result.message or ""
            raise UsageError(f"{self.name}: its simulation ended with {result.status}. {cause}".strip())
        if result.alloc_retries_per_step:
            raise UsageError(f"{self.name}: the allocator retries when simulated; no rate follows from that")
        ratio = math.log(self.value / simulated)
        return -ratio if self.is_speed else ratio


def runs_of_results(paths: Sequence[Path], device: str) -> list[MeasuredRun]:
    """The runs whose `result.json`, or folders with such, are at `paths`; all of `device`.

    Raises:
        UsageError: a file cannot be read, or holds nothing to fit to; it names the file and why.
    """
    return [_run(file, device) for path in paths for file in _files(path)]


def base_of(runs: Sequence[MeasuredRun]) -> str:
    """Return the packaged profile of all runs, with the node size that those on several nodes share, if they
    do. Raises `UsageError` where they are of several chips, or of an unknown one."""
    chips = sorted({run.chip for run in runs})
    if len(chips) != 1 or not chips[0]:
        known = ", ".join(filter(None, chips)) or "no packaged profile that is alike"
        raise UsageError(f"--from-result: the runs are of {known}; name the profile to scale by --base")
    sizes = {run.config.gpus_per_node for run in runs if run.config.gpus > run.config.ranks_per_node}
    stated = len(sizes) == 1 and "+" not in chips[0]
    stated = stated and not any(run.config.gpus_used_per_node for run in runs)
    return stated_machine(chips[0], sizes.pop()) if stated else chips[0]


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    found = sorted(path.glob("result.json")) or sorted(path.glob("*/result.json"))
    if not found:
        raise UsageError(f"--from-result {path}: holds no result.json, nor do its folders")
    return found


def _run(path: Path, device: str) -> MeasuredRun:
    result = read_json_object(path)
    try:
        config = Config.from_dict(result["config"])
        step = result["step_time_s"]
        samples = [float(value) for value in (result.get("measured") or {}).get("step_times_s") or []]
        retries = bool(result.get("alloc_retries_per_step"))
        simulated = bool((result.get("hardware") or {}).get("simulated"))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UsageError(f"--from-result {path}: is not the result of a run ({error})") from None
    if config.device != device or (device == "cuda" and simulated):
        ran = "a simulated GPU" if simulated else config.device
        raise UsageError(
            f"--from-result {path}: ran on {ran}; a profile is fitted to runs on GPUs "
            "(--device sim fits to simulated ones, to try it out)"
        )
    if config.script is not None or config.soak is not None:
        raise UsageError(f"--from-result {path}: a script's run or a soak cannot be simulated again from it")
    if result.get("status") != "ok" or not isinstance(step, int | float) or not 0 < step < math.inf:
        raise UsageError(f"--from-result {path}: has no step time (status {result.get('status')})")
    if retries:
        raise UsageError(f"--from-result {path}: its allocator retried; no rate follows from its step time")
    chip = config.hardware if device == "sim" else _chip(result)
    return MeasuredRun(
        path.parent.name, config, "step_time_s", float(step), False, chip or "", _noise(samples)
    )


def _chip(result: Mapping[str, Any]) -> str | None:
    """The packaged profile of the GPU that a result was measured on."""
    hardware = result.get("hardware") or {}
    name, memory = hardware.get("name"), hardware.get("memory_bytes")
    return profile_like(str(name), int(memory)) if name and isinstance(memory, int) else None


def _noise(samples: Sequence[float]) -> float:
    """Standard error of a median of `samples`, as a share of it."""
    if len(samples) < 2 or min(samples) <= 0:
        return _SAME_STEP
    logs = [math.log(sample) for sample in samples]
    mean = sum(logs) / len(logs)
    spread = math.sqrt(sum((value - mean) ** 2 for value in logs) / (len(logs) - 1))
    return max(_SAME_STEP, 1.25 * spread / math.sqrt(len(logs)))
