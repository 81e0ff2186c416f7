"""Forecasts of a plan: time, disk, and the points that do not fit. Each point is simulated once, untraced.

    points ──as simulated──> a pool of short runs ──> memory and step time of each ──┐
    the first of them, once more with its trace ──> what a trace adds ──────────────┴──> Forecast

The prediction runs the training code itself on simulated GPUs, so out-of-memory errors come from the
simulated caching allocator. For points on a CPU, memory is the sum over all ranks.

The batch for each activation checkpointing is the largest one that leaves a margin of memory. It is
extrapolated from simulations of two small batches, because memory grows linearly with the batch.
"""

import functools
import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from fsdpbench.base.configuration.config import DEFAULT_HARDWARE, Config, Measurement, shard_size_of
from fsdpbench.base.errors import UsageError, error_text
from fsdpbench.base.files.documents import table_beside
from fsdpbench.base.settings import SETTINGS, Settings, Value, show_value
from fsdpbench.base.writing import remove
from fsdpbench.engine.devices.detection import profile_of_this_machine
from fsdpbench.engine.results.machine_state import available_memory
from fsdpbench.engine.results.provenance import content_key
from fsdpbench.engine.results.records import Status
from fsdpbench.reports.pages.ranking import cost_of, shared_ranks
from fsdpbench.reports.result import Interval, Result
from fsdpbench.sim.model.profile import ProfileError, load_profile, stated_machine
from fsdpbench.sweep.planning import make_config, workload_named
from fsdpbench.sweep.runner import simulate
from fsdpbench.sweep.spaces.presets import CHECKPOINTING
from fsdpbench.sweep.spaces.space import Rule, Space
from fsdpbench.sweep.trials import Progress, Trial, run_in, thrown_away, with_room
from fsdpbench.systems import get_system

PROBE = Measurement(2, 1, 0, timeout_s=120.0, most_warmup_steps=12, most_timed_steps=8)
_ROOMY_HARDWARE = "h200"
"""Points on a CPU are simulated on the GPU with the most memory, to find out how much they need."""
_START_S = {"cpu": 6.0, "cuda": 25.0}
"""Seconds to start and stop the ranks of one real configuration (importing torch, creating the group)."""
_TORCH_BYTES = 300 << 20
"""Memory of a process that has imported torch and created a gloo group."""
_TRACE_BYTES_A_SECOND = 4 << 20
"""Size of a compressed real trace: about 100,000 events per second of 40 bytes each."""
MARGIN = 0.1  # of the memory; in nine of ten cases predictions of memory are closer
_TRIED = (1, 4)
_USUAL = (1, 2, 3, 4, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64, 80, 96, 128, 192, 256, 384, 512, 768, 1024)


@dataclass(frozen=True)
class Prediction:
    """One predicted point; seconds, bytes. `status` None: the simulation gave no answer (`reason`: why)."""

    config: Config
    status: Status | None
    reason: str | None = None
    step_time_s: float | None = None
    peak_reserved_bytes: int | None = None
    host_s: float = 0.0
    throughput: float | None = None
    """Samples (or tokens, if the workload has them) per second and GPU."""
    alloc_retries_per_step: float | None = None
    interval: Interval | None = None
    """The interval for the real figures; None for points on a CPU and points without figures."""

    @property
    def risky(self) -> bool:
        """Return whether the memory fits only if the prediction's error is favourable."""
        return self.interval is not None and self.interval.risky

    @property
    def fits(self) -> bool | None:
        """Return whether the point fits; None if unknown."""
        return self.status is Status.OK if self.status in (Status.OK, Status.OOM) else None


@dataclass(frozen=True)
class Forecast:
    """The predictions of all points, and the whole sweep's wall time (seconds) and disk space (bytes)."""

    predictions: tuple[Prediction, ...]
    wall_s: float
    disk_bytes: int

    def that_fit(self, fits: bool | None) -> list[Prediction]:
        """Return the predictions that fit, do not fit, or (None) for which that is unknown."""
        return [prediction for prediction in self.predictions if prediction.fits is fits]

    @property
    def ranks(self) -> list[int | None]:
        """Return each prediction's rank by throughput; indistinguishable ones share a rank."""
        speeds = ((each.throughput if each.fits else None, each.interval) for each in self.predictions)
        return shared_ranks([cost_of(speed, interval) if speed else None for speed, interval in speeds])


def forecast(points: Sequence[Config], jobs: int, tell: Callable[[int], None]) -> Forecast:
    """Simulate `points`, `jobs` at a time. `tell` is called with the number of points done.

    Raises `BenchError` if nothing can be started.
    """
    with thrown_away("plan") as folder:
        simulated = [as_simulated(config) for config in points]
        # `cannot_fit` is about GPU memory, so it does not apply to points on a CPU.
        hopeless = [
            None if config is None or point.device == "cpu" else cannot_fit(config)
            for point, config in zip(points, simulated, strict=True)
        ]
        trials = _run_once(simulated, hopeless, folder, jobs, tell)
        predictions = tuple(
            Prediction(config, Status.OOM, reason) if reason is not None else _prediction(config, trial)
            for config, trial, reason in zip(points, trials, hopeless, strict=True)
        )
        extra_s, trace_bytes = _cost_of_a_trace(points, predictions, folder)
    running = [prediction for prediction in predictions if prediction.status is not None]
    each = [_wall_s(prediction, extra_s) for prediction in running]
    disk = sum(_disk_bytes(prediction, trace_bytes) for prediction in running)
    side_by_side = jobs if points and points[0].device == "sim" else 1
    return Forecast(predictions, sum(each) / side_by_side, disk)


def best_first(forecast: Forecast) -> Forecast:
    """Return the forecast sorted: fastest point first, then unknown speeds, then points that do not fit."""

    def place(prediction: Prediction) -> tuple[bool, bool, float]:
        return prediction.fits is False, prediction.throughput is None, -(prediction.throughput or 0.0)

    return replace(forecast, predictions=tuple(sorted(forecast.predictions, key=place)))


def as_simulated(config: Config, hardware: str | None = None) -> Config | None:
    """Return `config` on simulated GPUs of `hardware` (default: those most like its own), untraced. None if
    its system does not support it there."""
    if hardware is None:
        hardware = (
            _ROOMY_HARDWARE
            if config.device == "cpu"
            else config.hardware or profile_of_this_machine() or DEFAULT_HARDWARE
        )
    if config.device != "sim" and config.gpus > config.gpus_per_node:
        hardware = stated_machine(hardware, config.gpus_per_node)
    probe = replace(PROBE, timeout_s=config.measurement.timeout_s)
    changed = replace(config, device="sim", hardware=hardware, measurement=probe)
    return None if get_system(config.system).not_applicable(changed) else changed


def as_probe(config: Config, hardware: str | None, timeout_s: float | None, purpose: str) -> Config:
    """Return `config` simulated untraced on GPUs of `hardware`; a script keeps its number of steps.
    `purpose`: a word such as `explained` for the `UsageError` if its system cannot be simulated."""
    if config.script is not None:
        return replace(config, measurement=replace(config.measurement, traced_steps=0))
    simulated = as_simulated(config, hardware)
    if simulated is None:
        raise UsageError(f"{config.system} cannot do this on simulated GPUs: nothing can be {purpose}")
    probe = simulated.measurement
    return replace(simulated, measurement=replace(probe, timeout_s=timeout_s or probe.timeout_s))


def _run_once(
    configs: Sequence[Config | None],
    hopeless: Sequence[str | None],
    folder: Path,
    jobs: int,
    tell: Callable[[int], None],
) -> list[Trial | None]:
    """Return the trials in order. Simulate equal configurations once, and skip those that cannot fit."""
    first: dict[str, int] = {}
    distinct: list[Config] = []
    places: list[int | None] = []
    for config, reason in zip(configs, hopeless, strict=True):
        if config is None or reason is not None:
            places.append(None)
            continue
        identity = json.dumps(config.to_dict(), sort_keys=True, default=str)
        if identity not in first:
            first[identity] = len(distinct)
            distinct.append(config)
        places.append(first[identity])
    saved = len(configs) - len(distinct)
    tell(saved)
    trials = run_in(folder, distinct, jobs, lambda done: tell(saved + done))
    return [None if place is None else trials[place] for place in places]


def _prediction(config: Config, trial: Trial | None) -> Prediction:
    if trial is None:
        return Prediction(config, None, "its system cannot do this on simulated GPUs")
    status, host_s = trial.status, trial.took_s
    if status is Status.OOM and (config.device != "cpu" or _more_than_there_is(config, trial.result)):
        return Prediction(config, status, trial.cause, host_s=host_s)
    if status is not Status.OK:
        return Prediction(config, None if status is Status.OOM else status, trial.cause, host_s=host_s)
    if config.device == "cpu":
        return _on_this_cpu(config, trial)
    return Prediction(
        config,
        status,
        None,
        trial.step_time_s,
        trial.reserved,
        host_s,
        throughput=trial.result.throughput,
        alloc_retries_per_step=trial.result.alloc_retries_per_step,
        interval=trial.interval,
    )


def _more_than_there_is(config: Config, result: Result) -> bool:
    """Return whether ranks that each filled a simulated GPU would fill this machine's memory."""
    free = available_memory()
    return free is not None and config.gpus * result.machine["memory_bytes"] > free


def _on_this_cpu(config: Config, trial: Trial) -> Prediction:
    """Compare the memory of all ranks with the machine's; compute the time from FLOPs and a core's rate."""
    needed = config.gpus * ((trial.allocated or 0) + _TORCH_BYTES)
    free = available_memory()
    cores = min(config.gpus, os.cpu_count() or 1)
    took = config.gpus * (trial.flops or 0.0) / (cores * _flops_a_core())
    if free is not None and needed > free:
        reason = f"all ranks together need about {needed / 2**30:.1f} GiB, {free / 2**30:.1f} GiB are free"
        return Prediction(config, Status.OOM, reason, took, needed, trial.took_s)
    return Prediction(config, Status.OK, None, took, needed, trial.took_s)


@functools.cache
def _flops_a_core() -> float:
    """Return FLOP/s of one core for small models: half of the rate of an fp32 matrix product."""
    size = 384
    a = np.ones((size, size), dtype=np.float32)
    best = float("inf")
    for _ in range(20):
        began = time.perf_counter()
        a @ a
        best = min(best, time.perf_counter() - began)
    return 0.5 * 2 * size**3 / best / max(os.cpu_count() or 1, 1)


def _cost_of_a_trace(
    points: Sequence[Config], predictions: Sequence[Prediction], folder: Path
) -> tuple[float, int]:
    """Run one simulated point again with a trace; return the seconds and bytes that tracing adds."""
    sample = next((p for p in predictions if p.status is Status.OK and p.config.device == "sim"), None)
    if sample is None:
        return 0.0, 0
    (traced,) = run_in(folder, [sample.config], 1)
    assert traced.folder is not None
    size = sum(path.stat().st_size for path in traced.folder.rglob("*") if path.is_file())
    microbatches = sample.config.settings.grad_accum
    return max(0.0, traced.took_s - sample.host_s) / microbatches, size // microbatches


def _wall_s(prediction: Prediction, extra_s: float) -> float:
    config, measurement = prediction.config, prediction.config.measurement
    if config.device == "sim":
        traced = prediction.status is Status.OK
        return prediction.host_s + (extra_s * config.settings.grad_accum if traced else 0.0)
    steps = max(measurement.warmup_steps, measurement.most_warmup_steps // 2)
    steps += measurement.timed_steps + measurement.traced_steps
    return _START_S[config.device] + steps * (prediction.step_time_s or 0.0)


def _disk_bytes(prediction: Prediction, trace_bytes: int) -> int:
    config = prediction.config
    if prediction.status is not Status.OK:
        return 16 << 10
    if config.device == "sim":
        return trace_bytes * config.settings.grad_accum
    seconds = config.measurement.traced_steps * (prediction.step_time_s or 0.0)
    return config.gpus * (64 << 10) + round(config.gpus * seconds * _TRACE_BYTES_A_SECOND)


# Points that cannot fit by arithmetic alone need not be simulated. A rank holds its share of parameters,
# gradients and AdamW's states, 16 bytes per parameter in fp32, all at the same time in the optimizer's step.
# If these exceed the memory that the allocator can use, no other setting helps. The bound never exceeds the
# truth: if an unknown setting might reduce memory, there is no bound.

_STATE_BYTES = 16
_GRADIENT_BYTES = 4
_SGD_BYTES = 8
_MUON_BYTES = 12  # a lower bound: matrices have one moment
_TWO_BYTE_STATES = 12
_REPLICATED = ("torch-ddp", "single")
_SHARDED = ("impl-fsdp1", "impl-fsdp2", "torch-fsdp1", "torch-fsdp2")
_UNDERSTOOD = table_beside(__file__, "prediction.toml")["understood"]
"""Settings whose effect on the bound is known; any other one that is not at its default makes it unknown."""


def cannot_fit(config: Config) -> str | None:
    """Return why the training state of `config` does not fit on simulated GPUs; None if it may fit."""
    needed, usable = state_bytes(config), usable_bytes(config)
    if needed is None or usable is None or needed <= usable:
        return None
    return error_text("prediction.cannot_fit", needed / 2**30, usable / 2**30)


def usable_bytes(config: Config) -> int | None:
    """Return the bytes that torch can use on a simulated GPU; None if the profile cannot be read."""
    try:
        return None if config.hardware is None else load_profile(config.hardware).usable_memory_bytes
    except ProfileError:
        return None


def state_bytes(config: Config) -> int | None:
    """Return a lower bound of a rank's bytes in its optimizer's step; None if unknown."""
    settings = config.settings
    strange = any(
        value != SETTINGS[name].default
        for name, value in settings.to_dict().items()
        if name not in _UNDERSTOOD and name in SETTINGS
    )
    if strange or settings.cpu_offload or config.script is not None or config.what_if is not None:
        return None
    workload = workload_named(config)
    if workload.training_state_bytes != _STATE_BYTES * workload.parameters:
        return None  # it has tables with their own dtype and sharding
    each = _bytes_a_parameter(config)
    if config.system in _REPLICATED:
        return each * workload.parameters
    if config.system not in _SHARDED:
        return None
    return each * workload.parameters // (shard_size_of(config) * settings.tp)


def saved_bytes(config: Config) -> int | None:
    """Return the bytes of a checkpoint, with each parameter and optimizer state once; None for a script and
    for models whose states have other dtypes."""
    if config.script is not None or config.what_if is not None:
        return None
    workload = workload_named(config)
    if workload.training_state_bytes != _STATE_BYTES * workload.parameters:
        return None
    return (_bytes_a_parameter(config) - _GRADIENT_BYTES) * workload.parameters


def _bytes_a_parameter(config: Config) -> int:
    """Return the bytes per parameter of the parameter, its gradient and its optimizer states."""
    each = {"sgd": _SGD_BYTES, "muon": _MUON_BYTES}.get(config.settings.optimizer, _STATE_BYTES)
    return each if config.settings.optimizer_dtype is None else min(each, _TWO_BYTE_STATES)


def fitting_batches(
    space: Space, jobs: int, tell: Callable[[str], None], kept: Path | None = None
) -> tuple[Rule, ...]:
    """Return rules that set the batch for each activation checkpointing in `space` (simulated GPUs); none if
    it cannot be simulated. `tell` is called with a line about them; `kept`: the folder of simulations."""
    if kept is None:
        with thrown_away("batches") as folder:
            return fitting_batches(space, jobs, tell, folder)
    if kept.is_symlink():
        remove(kept)
    values, system = space.lists[CHECKPOINTING], get_system(space.systems[0])
    usable = (1 - MARGIN) * load_profile(space.targets[0].hardware or "").usable_memory_bytes
    asked = [(value, batch) for value in values for batch in _TRIED]
    configs = [_config(space, value, batch) for value, batch in asked]
    if any(system.not_applicable(config) for config in configs):
        return ()
    held = dict(zip(asked, _held(configs, jobs, kept), strict=True))
    few, more = _TRIED
    found = {value: _most(usable, (few, held[value, few]), (more, held[value, more])) for value in values}
    # A large batch has its peak elsewhere, and memory grows faster: between two points a line is safe.
    largest = _held([_config(space, value, batch) for value, batch in found.items()], jobs, kept)
    for (value, batch), reserved in zip(list(found.items()), largest, strict=True):
        if reserved is None or reserved > usable:
            found[value] = _most(usable, (more, held[value, more]), (batch, reserved))
    words = ", ".join(f"{batch} with {show_value(value)}" for value, batch in found.items())
    tell(f"  batch by activation_checkpointing: {words} (the largest that leave {MARGIN:.0%} of memory)")
    return tuple(Rule({CHECKPOINTING: (value,)}, {"batch": (batch,)}) for value, batch in found.items())


def _config(space: Space, value: Value, batch: int) -> Config:
    first = {name: listed[0] for name, listed in space.lists.items()}
    settings = Settings.of(**{**first, CHECKPOINTING: value, "batch": batch})
    return make_config(space.targets[0], space.systems[0], settings, space.targets[0].workload())


def _held(configs: list[Config], jobs: int, kept: Path) -> list[int | None]:
    """Return each peak of reserved bytes on GPUs with room for all; None if it runs out even there."""
    roomy = [with_room(replace(config, measurement=PROBE)) for config in configs]
    results = simulate(roomy, kept, Progress(), jobs)
    return [Trial(config, results[content_key(config)]).reserved for config in roomy]


def _most(usable: float, few: tuple[int, int | None], more: tuple[int, int | None]) -> int:
    """Return the largest usual batch within `usable` bytes on the line through two points (batch, bytes)."""
    if few[1] is None or more[1] is None:
        return few[0]
    each = max(1.0, (more[1] - few[1]) / max(more[0] - few[0], 1))
    return max((batch for batch in _USUAL if batch <= few[0] + (usable - few[1]) / each), default=1)
