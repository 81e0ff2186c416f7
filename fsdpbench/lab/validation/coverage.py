"""Whether published runs are inside their intervals, each with its own source held out.

The interval of a run is the one that its prediction would carry if its source had never been published.
Errors are given apart for sources that constants were fitted to (in sample) and for the others (held out).

Also runs of one chip are predicted with the keys that were fitted to another chip's. A few keys of a profile
were found from published training runs of that chip (the table of docs/simulator.md). What describes hardware
in general holds on another chip too; what was fitted to rows does not. So every run is simulated again with
the fitted keys of a chip whose runs it has no part in:

    runs on    a100-40gb, a100-80gb (one chip, fitted together)      h100-80gb
    keys from  h100-80gb                                             a100-80gb

Shares of a peak are taken as they are; the rate of attention's backward, which is of the software of the
runs (`attention.backward_rate` of its profile), as its ratio to the forward's. The efficiency of
memory-bound kernels was fitted to all runs together, and is held out from none.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from fsdpbench.base.configuration.config import Config
from fsdpbench.base.files.documents import to_toml
from fsdpbench.base.writing import write_whole
from fsdpbench.engine.results.residuals.intervals import is_measured, unknowns
from fsdpbench.engine.results.residuals.widths import LEVEL, Quantity, Unknown, Width, width_of
from fsdpbench.lab.validation.judge import Bar, error_bars
from fsdpbench.lab.validation.paper_network import Prediction, config_of
from fsdpbench.lab.validation.runs import runs_file
from fsdpbench.lab.validation.runs.case import Case, Figure, Network
from fsdpbench.sim.model.profile import HardwareProfile, load_profile
from fsdpbench.sim.model.software import load_software
from fsdpbench.sweep.planning import own_software, workload_named

MEMORY = {Figure[each.name]: each for each in Quantity if each is not Quantity.TIME}
HALF_WIDTH = 0.08
MEAN_HELD_OUT = 0.03
WORST_HELD_OUT = 0.08
_MEMORY_FREE = (Unknown.CHIP, Unknown.NETWORK, Unknown.COMPILED)
_KEYS_FROM = {"a100-40gb": "h100-80gb", "a100-80gb": "h100-80gb", "h100-80gb": "a100-80gb"}


@dataclass(frozen=True)
class Judged:
    """One published figure beside its interval, in the publication's unit."""

    prediction: Prediction
    figure: Figure
    width: Width

    @property
    def error(self) -> float:
        """As `Prediction.error`, of which it is known that it is there."""
        return self.prediction.error(self.figure) or 0.0

    @property
    def interval(self) -> tuple[float, float]:
        """In the figure's unit; a speed is lowest where the step is longest."""
        value, (low, high) = self.prediction.predicted(self.figure) or 0.0, self.width.around(1.0)
        return (value / high, value / low) if self.figure.is_speed else (value * low, value * high)

    @property
    def inside(self) -> bool:
        ratio = self.prediction.case.published[self.figure] / (self.prediction.predicted(self.figure) or 1.0)
        return self.width.covers(-math.log(ratio) if self.figure.is_speed else math.log(ratio))

    @property
    def half_width(self) -> float:
        """Half the interval as a share of its middle."""
        return self.width.half

    @property
    def known(self) -> bool:
        """Whether nothing made the interval wider."""
        return not self.width.because


@dataclass(frozen=True)
class Group:
    """Errors of the step times of runs that have something in common."""

    by: str
    name: str
    fitted: bool
    judged: tuple[Judged, ...]

    @property
    def mean(self) -> float:
        return statistics.fmean(abs(each.error) for each in self.judged)

    @property
    def worst(self) -> float:
        return max(abs(each.error) for each in self.judged)

    @property
    def bias(self) -> float:
        return statistics.fmean(each.error for each in self.judged)

    @property
    def inside(self) -> int:
        return sum(each.inside for each in self.judged)

    @property
    def half_width(self) -> float:
        """The median one."""
        return statistics.median(each.half_width for each in self.judged)


def judged_runs(predictions: Sequence[Prediction]) -> list[Judged]:
    """Every published time and memory of the runs that are known well enough to count."""
    return [
        Judged(prediction, figure, _width(prediction, figure))
        for prediction in predictions
        if not prediction.case.open and prediction.result.config
        for figure in prediction.case.published
        if (figure.is_time or figure in MEMORY) and prediction.error(figure) is not None
    ]


def groups_of(judged: Sequence[Judged]) -> list[Group]:
    """Step times by source, chip, size and length; sources that constants were fitted to stand apart."""
    times = [each for each in judged if each.figure.is_time]
    found: list[Group] = []
    for by, key in _KEYS.items():
        parts: dict[tuple[bool, str], list[Judged]] = {}
        for each in times:
            case = each.prediction.case
            parts.setdefault((case.fitted, key(case)), []).append(each)
        found += [Group(by, name, fitted, tuple(part)) for (fitted, name), part in sorted(parts.items())]
    return found


def interval_bars(judged: Sequence[Judged]) -> list[Bar]:
    """Return the bars for intervals: they cover, and they are narrow where software is known."""
    times = [each for each in judged if each.figure.is_time]
    memory = [each for each in judged if not each.figure.is_time]
    held_out_errors = [abs(each.error) for each in times if not each.prediction.case.fitted]
    of = f" of {len(held_out_errors)} runs"
    bars = error_bars("held-out sources", held_out_errors, (MEAN_HELD_OUT, WORST_HELD_OUT), of, "")
    parts = (("step times", "source", times), ("peaks of memory", "run", memory))
    for what, held_out, part in parts:
        if part:
            share = sum(each.inside for each in part) / len(part)
            name = f"{what} inside their interval, {held_out} held out"
            bars.append(Bar(name, f"at least {LEVEL:.0%}", f"{share:.0%} of {len(part)}", share >= LEVEL))
    known = [each.half_width for each in times if each.known]
    if known:
        median = statistics.median(known)
        reached = f"{median:.1%} ({len(known)} runs)"
        wanted, met = f"at most {HALF_WIDTH:.0%}", median <= HALF_WIDTH
        bars.append(Bar("median half width, known software", wanted, reached, met))
    return bars


def _width(prediction: Prediction, figure: Figure) -> Width:
    case, config = prediction.case, Config.from_dict(prediction.result.config or {})
    unknown: list[Unknown] = [reason for reason in unknowns(config) if reason is not Unknown.NETWORK]
    if case.network is Network.NOT_STATED and config.gpus > config.ranks_per_node:
        unknown.append(Unknown.NETWORK)
    if not figure.is_time:
        of_memory = [reason for reason in unknown if reason not in _MEMORY_FREE]
        # Each kind of memory was published by two sources at most: the run alone is held out.
        return width_of(MEMORY[figure], of_memory, without_run=case.name)
    if prediction.result.alloc_retries_per_step:
        unknown.append(Unknown.MEMORY)
    width = width_of(Quantity.TIME, unknown, bool(config.settings.compile), without=case.source)
    measured = is_measured(config.hardware or "")
    return width.with_network(prediction.result.network_share or 0.0, config.gpus, measured)


def _size(case: Case) -> str:
    parameters = workload_named(config_of(case)).parameters
    return "below 3B" if parameters < 3e9 else "3B to 20B" if parameters < 20e9 else "20B and more"


def _length(case: Case) -> str:
    seq = config_of(case).settings.seq or 0
    return "to 2048" if seq <= 2048 else "to 8192" if seq <= 8192 else "above 8192"


_KEYS: dict[str, Callable[[Case], str]] = {
    "source": lambda case: case.source,
    "chip": lambda case: case.profile,
    "size": _size,
    "length": _length,
}


@dataclass(frozen=True)
class HeldOut:
    """Step-time errors of one hardware's runs, with its own fitted keys and with another chip's."""

    hardware: str
    keys_from: str
    own: tuple[float, ...]
    foreign: tuple[float, ...]

    @property
    def own_mean(self) -> float:
        return statistics.fmean(map(abs, self.own))

    @property
    def foreign_mean(self) -> float:
        return statistics.fmean(map(abs, self.foreign))

    @property
    def foreign_bias(self) -> float:
        return statistics.fmean(self.foreign)


def held_out_cases(cases: Sequence[Case], folder: Path) -> list[Case]:
    """The cases on hardware with fitted keys, each on a profile with another chip's (written to `folder`)."""
    chips = {case.hardware: case.profile for case in cases}
    profiles = {
        hardware: _write(folder, hardware, chip) for hardware, chip in chips.items() if chip in _KEYS_FROM
    }
    return [
        dataclasses.replace(case, hardware=str(profiles[case.hardware]), chip=case.profile)
        for case in cases
        if case.hardware in profiles
    ]


def compare_held_out(own: Sequence[Prediction], foreign: Sequence[Prediction]) -> list[HeldOut]:
    """Both errors by hardware; runs that did not finish with either set of keys count in neither."""
    by_name = {(p.case.group, p.case.name): p for p in foreign}
    pairs: dict[str, list[tuple[float, float]]] = {}
    for prediction in own:
        other = by_name.get((prediction.case.group, prediction.case.name))
        if other is None or prediction.step_time_error is None or other.step_time_error is None:
            continue
        errors = pairs.setdefault(prediction.case.hardware, [])
        errors.append((prediction.step_time_error, other.step_time_error))
    return [
        HeldOut(hardware, _KEYS_FROM[hardware], *zip(*errors, strict=True))
        for hardware, errors in pairs.items()
    ]


def with_keys_of(profile: HardwareProfile, other: HardwareProfile) -> dict[str, dict[str, object]]:
    """Return the keys fitted to runs on `other` as they apply to `profile`, by section.

    The runs are of older kernels: where `profile` has newer ones too, the keys are those of its older ones.
    """
    other, older = other.with_older_kernels(), profile.with_older_kernels()
    backward = other.attention.backward_tflops / other.attention.forward_tflops * _software_share(other)
    rate = round(older.attention.forward_tflops * backward / _software_share(profile), 1)
    gemm: dict[str, object] = {"weight_grad": other.gemm.weight_grad}
    load: dict[str, object] = {"under_load": other.gemm.under_load}
    attention: dict[str, object] = {"under_load": other.attention.under_load, "backward_tflops": rate}
    contention: dict[str, object] = {"compute_slowdown": other.contention.compute_slowdown}
    if profile.older is None:
        return {"gemm": gemm | load, "attention": attention, "contention": contention}
    return {"gemm": load, "older": {"gemm": gemm, "attention": attention}, "contention": contention}


def _software_share(profile: HardwareProfile) -> float:
    """Attention's rate backward under the runs' software over that of the profile."""
    software = load_software(own_software(runs_file.system_of(profile.name)))
    return software.attention.backward_rate


def _write(folder: Path, hardware: str, chip: str) -> Path:
    """A profile of `chip` with the network of `hardware` and the fitted keys of another chip."""
    keys_from, own = _KEYS_FROM[chip], load_profile(hardware)
    keys = with_keys_of(load_profile(chip), load_profile(keys_from))
    keys["nic"] = {"gb_s_per_node": own.nic.gb_s_per_node}
    head = {"base": chip, "name": f"{own.name}-keys-of-{keys_from}", "gpus_per_node": own.gpus_per_node}
    folder.mkdir(parents=True, exist_ok=True)
    path = (folder / f"{head['name']}.toml").resolve()
    write_whole(path, to_toml({**head, **keys}))
    return path
