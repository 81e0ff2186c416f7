"""Factors on a profile, fitted to measured step times, with intervals.

r = ln(measured / simulated) of every run. J = derivative of the logarithm of a step time by that of a factor,
from simulating each run again with 10 % less of the factor. One factor is found by bisection, several by
Gauss-Newton. The simulation has errors beyond these factors (from published runs of known software:
`width_of`). The runs of one source share that error, so it does not average out:

    cov(factors) = P (noise^2 I + model^2 1 1') P',    P = (J'J)^-1 J'

A fit is refused if there are more factors than runs, if the runs hardly depend on a factor or cannot separate
factors, or if a factor exceeds the chip's peak: the result would be meaningless.
"""

import dataclasses
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np

from fsdpbench.base.configuration.config import Config
from fsdpbench.base.errors import UsageError, error_text
from fsdpbench.base.files.documents import read_json_object, to_toml
from fsdpbench.base.reading import JsonObject, read_toml
from fsdpbench.base.writing import write_whole
from fsdpbench.engine.devices.detection import profile_like
from fsdpbench.engine.results.residuals.widths import LEVEL, Quantity, width_of
from fsdpbench.reports.result import Result, Status
from fsdpbench.sim.model.profile import HardwareProfile, load_profile, profile_names, stated_machine

Simulate = Callable[[Path], Sequence[Result]]
"""Returns the results of all runs, in order, on the profile in a file."""

_STEP = math.log(1.1)
_MOST_ROUNDS = 6
_MOST_HALVINGS = 12
_CLOSE = 0.002
_LEAST_SENSITIVITY = 0.1
_WIDEST = math.log(2.0)
_FARTHEST = math.log(4.0)
_SAME_STEP = 0.005
"""The smallest relative error of a step time, however similar its samples are (estimated)."""


@dataclass(frozen=True)
class MeasuredRun:
    """A run's `config` and its measured `value` of the result's `key`; higher is faster if `is_speed`.

    ``chip``: the similar packaged profile, empty if there is none; ``noise``: measured standard deviation of
    the value's logarithm.
    """

    name: str
    config: Config
    key: str
    value: float
    is_speed: bool
    chip: str
    noise: float = _SAME_STEP

    def slower(self, result: Result) -> float:
        """Return ln(measured / simulated step time). Raises `UsageError` if the simulation has none."""
        simulated = result.at(self.key)
        if result.status is not Status.OK or not simulated:
            cause = result.message or ""
            raise UsageError(f"{self.name}: its simulation ended with {result.status}. {cause}".strip())
        if result.alloc_retries_per_step:
            raise UsageError(f"{self.name}: the allocator retries when simulated; no rate follows from that")
        ratio = math.log(self.value / simulated)
        return -ratio if self.is_speed else ratio


def runs_of_results(paths: Sequence[Path], device: str) -> list[MeasuredRun]:
    """Return the runs of all `result.json` at `paths` or in folders there; all must be of `device`.

    Raises:
        UsageError: a file cannot be read, or has nothing to fit to; the message names the file and why.
    """
    return [_run(file, device) for path in paths for file in _files(path)]


def base_of(runs: Sequence[MeasuredRun]) -> str:
    """Return the packaged profile of all runs, with their node size if those on several nodes share one.
    Raises `UsageError` if the runs are from several chips, or from an unknown one."""
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
        raise UsageError(f"{path}: holds no result.json, nor do its folders")
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
        raise UsageError(f"{path}: is not the result of a run ({error})") from None
    if config.device != device or (device == "cuda" and simulated):
        ran = "a simulated GPU" if simulated else config.device
        raise UsageError(error_text("fit.no_gpu", path, ran))
    if config.script is not None or config.soak is not None:
        raise UsageError(f"{path}: a script's run or a soak cannot be simulated again from it")
    if result.get("status") != "ok" or not isinstance(step, int | float) or not 0 < step < math.inf:
        raise UsageError(f"{path}: has no step time (status {result.get('status')})")
    if retries:
        raise UsageError(f"{path}: its allocator retried; no rate follows from its step time")
    chip = config.hardware if device == "sim" else _chip(result)
    return MeasuredRun(
        path.parent.name, config, "step_time_s", float(step), False, chip or "", _noise(samples)
    )


def _chip(result: Mapping[str, Any]) -> str | None:
    """Return the packaged profile of the GPU that a result was measured on."""
    hardware = result.get("hardware") or {}
    name, memory = hardware.get("name"), hardware.get("memory_bytes")
    return profile_like(str(name), int(memory)) if name and isinstance(memory, int) else None


def _noise(samples: Sequence[float]) -> float:
    """Return the relative standard error of the median of `samples`."""
    if len(samples) < 2 or min(samples) <= 0:
        return _SAME_STEP
    logs = [math.log(sample) for sample in samples]
    mean = sum(logs) / len(logs)
    spread = math.sqrt(sum((value - mean) ** 2 for value in logs) / (len(logs) - 1))
    return max(_SAME_STEP, 1.25 * spread / math.sqrt(len(logs)))


@dataclass(frozen=True)
class Fit:
    """Factors with half of each one's interval (logarithm, `LEVEL`), the errors of the runs (above 0:
    simulated too slow) before and after, and the sensitivity of the runs to each factor."""

    profile: "ScaledProfile"
    log_widths: "dict[Factor, float]"
    before: tuple[float, ...]
    after: tuple[float, ...]
    sensitivity: "dict[Factor, float]"

    def interval(self, factor: "Factor") -> tuple[float, float]:
        middle, width = self.profile.factors[factor], self.log_widths[factor]
        return middle * math.exp(-width), middle * math.exp(width)


def fit(
    runs: Sequence[MeasuredRun], base: str, factors: "Sequence[Factor]", simulate: Simulate, folder: Path
) -> Fit:
    """Fit `factors` on the profile `base` to `runs`; profiles that are tried are written to `folder`.

    Raises:
        UsageError: the runs do not determine the factors; the message says which one and why.
    """
    _check(runs, factors)
    tried = _Tried(runs, base, factors, simulate, folder)
    before = tried.residuals(np.zeros(len(factors)))
    logs, residuals = (_one if len(factors) == 1 else _several)(tried, before)
    profile = tried.profile(logs)
    if (peak := profile.at_its_peak()) and np.abs(residuals).max() > _CLOSE:
        raise UsageError(error_text("fit.peak_too_low", ", ".join(peak), residuals.max()))
    slopes = tried.slopes(logs, residuals)
    sensitivity = _sensitivities(slopes, factors)
    widths = _widths(slopes, residuals, runs)
    found = dict(zip(factors, (float(width) for width in widths), strict=True))
    for factor, width in found.items():
        if width > _WIDEST:
            raise UsageError(error_text("fit.interval_too_wide", factor, math.exp(width)))
    return Fit(profile, found, _errors(before), _errors(residuals), sensitivity)


def _one(tried: "_Tried", before: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Find one factor by bisection between a slow and a fast one: a step may depend on it only if slow."""
    near, far = np.zeros(1), np.array([-_FARTHEST if before.mean() > 0 else _FARTHEST])
    at_near, at_far = before, tried.residuals(far)
    if np.abs(before.mean()) < _CLOSE:
        return near, before
    if tried.profile(far).at_its_peak() and at_far.mean() * before.mean() > 0:
        return far, at_far
    if at_far.mean() * before.mean() > 0:
        moved = float(np.abs(at_far - before).max()) / _FARTHEST
        if moved < _LEAST_SENSITIVITY:
            raise UsageError(_insensitive(tried.factors[0], moved))
        raise UsageError(_too_far(tried.factors, far, at_far))
    for _ in range(_MOST_HALVINGS):
        middle = (near + far) / 2
        found = tried.residuals(middle)
        if np.abs(found.mean()) < _CLOSE:
            break
        if found.mean() * at_near.mean() > 0:
            near, at_near = middle, found
        else:
            far = middle
    return middle, found


def _several(tried: "_Tried", before: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Find several factors by Gauss-Newton; the runs must depend on every factor at the base's value."""
    logs, residuals = np.zeros(len(tried.factors)), before
    for _ in range(_MOST_ROUNDS):
        slopes = tried.slopes(logs, residuals)
        _sensitivities(slopes, tried.factors)
        change = np.linalg.pinv(slopes) @ residuals
        logs = logs + np.clip(change, -_FARTHEST / 2, _FARTHEST / 2)
        if np.abs(logs).max() > _FARTHEST:
            raise UsageError(_too_far(tried.factors, logs, residuals))
        residuals = tried.residuals(logs)
        if np.abs(change).max() < _CLOSE:
            break
    return logs, residuals


def _check(runs: Sequence[MeasuredRun], factors: "Sequence[Factor]") -> None:
    distinct = {(run.config.name, run.config.model, run.config.gpus) for run in runs}
    if len(distinct) < len(factors):
        raise UsageError(error_text("fit.too_few_runs", ", ".join(factors), len(factors), len(distinct)))
    one_node = all(run.config.gpus <= run.config.ranks_per_node for run in runs)
    if one_node and (wanted := [factor for factor in factors if factor in BETWEEN_NODES]):
        raise UsageError(error_text("fit.no_run_on_nodes", wanted[0]))


@dataclass
class _Tried:
    """Simulations of the runs on scaled profiles."""

    runs: Sequence[MeasuredRun]
    base: str
    factors: "Sequence[Factor]"
    simulate: Simulate
    folder: Path
    count: int = 0

    def profile(self, logs: np.ndarray) -> "ScaledProfile":
        scales = {factor: math.exp(log) for factor, log in zip(self.factors, logs, strict=True)}
        return ScaledProfile(self.base, scales)

    def residuals(self, logs: np.ndarray) -> np.ndarray:
        """Return ln(measured / simulated step time) of every run."""
        self.count += 1
        path = (self.folder / f"tried-{self.count}.toml").resolve()
        self.profile(logs).write(path, {}, "tried by calibrate --from-result")
        results = self.simulate(path)
        return np.array([run.slower(result) for run, result in zip(self.runs, results, strict=True)])

    def slopes(self, logs: np.ndarray, residuals: np.ndarray) -> np.ndarray:
        """Return d ln(step time) / d ln(factor), for each run (rows) and factor (columns)."""
        columns = []
        for index in range(len(logs)):
            moved = logs.copy()
            moved[index] -= _STEP
            columns.append((self.residuals(moved) - residuals) / _STEP)
        return np.column_stack(columns)


def _sensitivities(slopes: np.ndarray, factors: "Sequence[Factor]") -> "dict[Factor, float]":
    found = {factor: float(np.abs(slopes[:, at]).max()) for at, factor in enumerate(factors)}
    for factor, value in found.items():
        if value < _LEAST_SENSITIVITY:
            raise UsageError(_insensitive(factor, value))
    return found


def _widths(slopes: np.ndarray, residuals: np.ndarray, runs: Sequence[MeasuredRun]) -> np.ndarray:
    """Return half the width of each interval of a factor's logarithm."""
    quantile = NormalDist().inv_cdf((1 + LEVEL) / 2)
    model = width_of(Quantity.TIME, ()).log / quantile
    free = len(runs) - slopes.shape[1]
    scatter = float(residuals @ residuals) / free if free else 0.0
    noise = np.diag([max(run.noise**2, scatter) for run in runs])
    project = np.linalg.pinv(slopes)
    covariance = project @ (noise + model**2 * np.ones((len(runs), len(runs)))) @ project.T
    return np.asarray(quantile * np.sqrt(np.diag(covariance)))


def _errors(residuals: np.ndarray) -> tuple[float, ...]:
    return tuple(math.expm1(-float(residual)) for residual in residuals)


def _insensitive(factor: "Factor", value: float) -> str:
    return error_text("fit.changes_less", factor, value * 10)


def _too_far(factors: "Sequence[Factor]", logs: np.ndarray, residuals: np.ndarray) -> str:
    scaled = ", ".join(f"{factor} x{math.exp(log):.2f}" for factor, log in zip(factors, logs, strict=True))
    left = math.expm1(-float(residuals.mean()))
    return error_text("fit.scaled", scaled, left)


# The parts of a profile that measured runs can scale, and the scaled profile's file.
# compute   rates of matrix products and attention in training   gemm.under_load, attention.under_load
# memory    bandwidth that memory-bound kernels reach            bandwidth.efficiency.*
# network   bandwidth between nodes                              nic.gb_s_per_node
# latency   time of a hop and of a call between nodes            nic.base_us, nic.protocols.*.nic_hop_us
# host      the CPU's time of a call                             cpu.*, without cudaMalloc and cudaFree


class Factor(StrEnum):
    """A part of a profile that a user's runs scale as a whole; above 1 is faster."""

    COMPUTE = "compute"
    MEMORY = "memory"
    NETWORK = "network"
    LATENCY = "latency"
    HOST = "host"


BETWEEN_NODES = (Factor.NETWORK, Factor.LATENCY)


@dataclass(frozen=True)
class ScaledProfile:
    """A profile (packaged or a file, possibly with `+node-N+nic-M`) with some of its parts scaled."""

    base: str
    factors: Mapping[Factor, float]

    @property
    def _unstated(self) -> str:
        """Return the base without the node and network stated in its name."""
        return re.sub(r"(\+node-\d+)?(\+nic-[\d.e+-]+)?$", "", self.base)

    def keys(self) -> dict[str, dict[str, Any]]:
        """Return the scaled keys by section. Rates are limited to the chip's peak."""
        profile = load_profile(self.base)
        tables: dict[str, dict[str, Any]] = {}
        if (factor := self.factors.get(Factor.COMPUTE)) is not None:
            for name, section in (("gemm", profile.gemm), ("attention", profile.attention)):
                tables[name] = {"under_load": _share(section.under_load * factor)}
        if (factor := self.factors.get(Factor.MEMORY)) is not None:
            efficiency, most = profile.bandwidth.efficiency, self._most_of_memory(profile)
            tables["bandwidth"] = {
                "efficiency": {kind: _share(share * factor, most) for kind, share in efficiency.items()}
            }
        network, latency = (self.factors.get(factor) for factor in BETWEEN_NODES)
        if network is not None or self.base != self._unstated:
            tables["nic"] = {"gb_s_per_node": round(profile.nic.gb_s_per_node * (network or 1.0), 4)}
        if latency is not None:
            hops = [
                dataclasses.replace(protocol, nic_hop_us=round(protocol.nic_hop_us / latency, 4))
                for protocol in profile.nic.protocols
            ]
            tables.setdefault("nic", {})["base_us"] = round(profile.nic.base_us / latency, 4)
            tables["nic"]["protocols"] = [dataclasses.asdict(protocol) for protocol in hops]
        if (factor := self.factors.get(Factor.HOST)) is not None:
            costs = dataclasses.asdict(profile.cpu)
            tables["cpu"] = {
                name: round(us / factor, 4) for name, us in costs.items() if not name.startswith("cuda_")
            }
        return tables

    @staticmethod
    def _most_of_memory(profile: HardwareProfile) -> float:
        """Return the largest share of bandwidth of eager kernels that faster fused kernels allow."""
        return math.floor(1e4 / max(1.0, profile.bandwidth.fused_gain)) / 1e4

    def at_its_peak(self) -> list[str]:
        """Return the factors whose rates have all reached the chip's peak."""
        tables = self.keys()
        shares = {
            Factor.COMPUTE: [tables.get(name, {}).get("under_load", 0.0) for name in ("gemm", "attention")],
            Factor.MEMORY: list(tables.get("bandwidth", {}).get("efficiency", {"": 0.0}).values()),
        }
        most = {Factor.COMPUTE: 1.0, Factor.MEMORY: self._most_of_memory(load_profile(self.base))}
        return [factor.value for factor, values in shares.items() if max(values) >= most[factor]]

    def write(self, path: Path, sources: Mapping[str, str], source: str) -> HardwareProfile:
        """Write the profile to a file, and return it as read back."""
        profile, name = load_profile(self.base), self._unstated
        # A file can only build on packaged profiles. If the base is a file, its content is copied.
        below: JsonObject = {"base": name}
        if name.lower() not in profile_names():
            below = read_toml(Path(name))
        head = below | {"name": path.stem, "title": profile.title, "source": source}
        if self.base != name:
            head["gpus_per_node"] = profile.gpus_per_node
        for section, values in {**self.keys(), "sources": dict(sources)}.items():
            head[section] = {**below.get(section, {}), **values}
        write_whole(path, to_toml(head))
        return load_profile(path)


def _share(value: float, most: float = 1.0) -> float:
    return round(min(most, value), 4)
