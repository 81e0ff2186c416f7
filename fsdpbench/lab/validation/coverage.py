"""The accuracy targets of the simulation, and checks that intervals cover published runs of held-out sources.

The interval of a run is the one that its prediction would have if its source had never been published.
Errors are reported separately for sources that constants were fitted to (in sample) and others (held out).

In addition, runs on one chip are predicted with keys that were fitted to another chip. A few keys of a
profile were fitted to published training runs on that chip (the table of docs/simulator.md). Keys that
describe hardware in general also hold on other chips; fitted ones may not. So every run is simulated again
with the fitted keys of a chip whose keys do not depend on it:

    runs on    a100-40gb, a100-80gb (one chip, fitted together)      h100-80gb
    keys from  h100-80gb                                             a100-80gb

Shares of a peak are copied. The rate of attention's backward belongs to the software of the runs
(`attention.backward_rate` of its profile), so it is copied as a ratio to the forward's. The efficiency of
memory-bound kernels was fitted to all runs together, and cannot be held out.
"""

import dataclasses
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from fsdpbench.base.configuration.config import Config
from fsdpbench.base.files.documents import to_toml
from fsdpbench.base.writing import write_whole
from fsdpbench.engine.results.residuals.intervals import is_measured, unknowns
from fsdpbench.engine.results.residuals.widths import LEVEL, Quantity, Unknown, Width, width_of
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
MEAN_STEP_TIME = 0.04
WORST_STEP_TIME = 0.10
PLATEAU = 0.05
T5 = 0.05
_T5_GROUP = "FSDP paper, Fig 7c"
PREFETCH_GAIN_POINTS = 3.0
COLLAPSE_SHARE = (0.40, 0.65)
ALLOCATED_GB = 2.0
RESERVED_GB = 4.0


@dataclass(frozen=True)
class Bar:
    """A target: the required value, the value reached, and whether it is met."""

    name: str
    wanted: str
    reached: str
    met: bool


def judge(predictions: Sequence[Prediction]) -> list[Bar]:
    """Return every target that these predictions can decide."""
    groups = group_errors(predictions).values()
    bars = error_bars(
        "step time", [abs(error) for group in groups for error in group], (MEAN_STEP_TIME, WORST_STEP_TIME),
        "", " cases",
    )  # fmt: skip
    paper = [p for p in predictions if p.case.model == "gpt-175b" and not p.case.assumed]
    prefetching = [p for p in paper if p.case.settings.get("backward_prefetch") != "none"]
    bars += _worst("Fig 7b, plateau", PLATEAU, [p for p in prefetching if not p.case.collapsed])
    bars += [*_prefetch_gain(paper), *_collapse(paper), *_memory(paper)]
    return bars + _worst("Fig 7c, T5-11B", T5, [p for p in predictions if p.case.group == _T5_GROUP])


def bar_lines(bars: Sequence[Bar]) -> list[str]:
    """Return the targets as a Markdown table; nothing if there are none."""
    rows = [f"| {b.name} | {b.wanted} | {b.reached} | {'met' if b.met else '**not met**'} |" for b in bars]
    return ["| bar | wanted | reached | |", "|---|---|---|---|", *rows] if rows else []


def group_errors(predictions: Iterable[Prediction]) -> dict[str, list[float]]:
    """Return step-time errors of the cases that count, by group; 1 for a case that did not finish."""
    groups: dict[str, list[float]] = {}
    for prediction in predictions:
        if prediction.speed is None or prediction.case.assumed or prediction.case.collapsed:
            continue
        error = prediction.step_time_error
        groups.setdefault(prediction.case.group, []).append(1.0 if error is None else error)
    return groups


def error_bars(
    what: str, errors: Sequence[float], bounds: tuple[float, float], of: str, cases: str
) -> list[Bar]:
    """Return targets for the mean and the worst of `errors` (absolute shares); none without errors.

    `bounds`: the largest mean and the largest error allowed. `of`, `cases`: words after the two counts.
    """
    if not errors:
        return []
    mean, worst = statistics.fmean(errors), max(errors)
    over = sum(error > bounds[1] for error in errors)
    reached = f"{worst:.1%} ({over} of {len(errors)}{cases} over {bounds[1]:.0%})"
    return [
        Bar(f"{what}, mean error", f"at most {bounds[0]:.0%}", f"{mean:.1%}{of}", mean <= bounds[0]),
        Bar(f"{what}, worst error", f"at most {bounds[1]:.0%}", reached, not over),
    ]


def _worst(name: str, within: float, predictions: Sequence[Prediction]) -> list[Bar]:
    """Return the target for the largest error of the step time, which is 1 for a run that did not finish."""
    errors = [1.0 if p.step_time_error is None else abs(p.step_time_error) for p in predictions]
    if not errors:
        return []
    return [Bar(name, f"within {within:.0%}", f"{max(errors):.1%} at worst", max(errors) <= within)]


def _prefetch_gain(paper: Sequence[Prediction]) -> list[Bar]:
    """Return the target for the gain of backward prefetch, in per cent of the throughput without it."""
    off = {p.case.gpus: p for p in paper if p.case.settings.get("backward_prefetch") == "none"}
    on = {p.case.gpus: p for p in paper if p.case.gpus in off and p not in off.values() and _batch(p) == 1}
    gaps = []
    for gpus, without in off.items():
        values = [p.predicted(Figure.HARDWARE_TFLOPS) for p in (on[gpus], without)] if gpus in on else []
        if not values or None in values:
            continue
        predicted = 100 * (values[0] / values[1] - 1)  # type: ignore[operator]
        one, other = (p.case.published[Figure.HARDWARE_TFLOPS] for p in (on[gpus], without))
        published = 100 * (one / other - 1)
        gaps.append((abs(predicted - published), predicted, published))
    if not gaps:
        return []
    worst, predicted, published = max(gaps)
    wanted = f"within {PREFETCH_GAIN_POINTS:g} points"
    reached = f"{worst:.1f} points at worst ({predicted:.1f} % where {published:.1f} % was measured)"
    return [Bar("Fig 6b, gain of backward prefetch", wanted, reached, worst <= PREFETCH_GAIN_POINTS)]


def _collapse(paper: Sequence[Prediction]) -> list[Bar]:
    plateau = [
        value
        for p in paper
        if _batch(p) == 2 and not p.case.collapsed
        if (value := p.predicted(Figure.HARDWARE_TFLOPS)) is not None
    ]
    fallen = [p for p in paper if p.case.collapsed]
    if not plateau or not fallen:
        return []
    value = fallen[0].predicted(Figure.HARDWARE_TFLOPS)
    retries = fallen[0].result.alloc_retries_per_step
    share = None if value is None else value / statistics.fmean(plateau)
    low, high = COLLAPSE_SHARE
    reached = "did not finish" if share is None else f"{share:.0%} with {retries:g} retries a step"
    wanted, met = f"retries, {low:.0%} to {high:.0%} of the plateau", low <= (share or 0.0) <= high
    return [Bar("Fig 7b, collapse at 128 GPUs and batch 2", wanted, reached, met and bool(retries))]


def _memory(paper: Sequence[Prediction]) -> list[Bar]:
    bars = []
    for figure, allowed in ((Figure.ALLOCATED, ALLOCATED_GB), (Figure.RESERVED, RESERVED_GB)):
        gaps = [
            (abs(value - p.case.published[figure]), p.case.name)
            for p in paper
            if figure in p.case.published and (value := p.predicted(figure)) is not None
        ]
        if gaps:
            worst, name = max(gaps)
            reached = f"{worst:.1f} GB at worst ({name})"
            bars.append(Bar(f"Fig 8b, {figure.words}", f"within {allowed:g} GB", reached, worst <= allowed))
    return bars


def _batch(prediction: Prediction) -> object:
    return prediction.case.settings["batch"]


@dataclass(frozen=True)
class Judged:
    """One published figure with its interval, in the publication's unit."""

    prediction: Prediction
    figure: Figure
    width: Width

    @property
    def error(self) -> float:
        """Return `Prediction.error`, which is known for these figures."""
        return self.prediction.error(self.figure) or 0.0

    @property
    def interval(self) -> tuple[float, float]:
        """Return the interval in the figure's unit; a speed is lowest if the step is longest."""
        value, (low, high) = self.prediction.predicted(self.figure) or 0.0, self.width.around(1.0)
        return (value / high, value / low) if self.figure.is_speed else (value * low, value * high)

    @property
    def inside(self) -> bool:
        ratio = self.prediction.case.published[self.figure] / (self.prediction.predicted(self.figure) or 1.0)
        return self.width.covers(-math.log(ratio) if self.figure.is_speed else math.log(ratio))

    @property
    def half_width(self) -> float:
        """Return half the interval relative to its middle."""
        return self.width.half

    @property
    def known(self) -> bool:
        """Return whether no unknown made the interval wider."""
        return not self.width.because


@dataclass(frozen=True)
class Group:
    """Step-time errors of runs that have a property in common."""

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
        """Return the median half width."""
        return statistics.median(each.half_width for each in self.judged)


def judged_runs(predictions: Sequence[Prediction]) -> list[Judged]:
    """Return every published time and memory figure of runs that are known well enough to count."""
    return [
        Judged(prediction, figure, _width(prediction, figure))
        for prediction in predictions
        if not prediction.case.open and prediction.result.config
        for figure in prediction.case.published
        if (figure.is_time or figure in MEMORY) and prediction.error(figure) is not None
    ]


def groups_of(judged: Sequence[Judged]) -> list[Group]:
    """Group step times by source, chip, size and length, each divided into fitted and held-out sources."""
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
    """Return the targets for intervals: coverage, and width for known software."""
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
        # At most two sources published each kind of memory, so only the run itself is held out.
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
    """Step-time errors of the runs on one chip, with its own fitted keys and with another chip's."""

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
    """Return cases on hardware with fitted keys, each on a profile with another chip's, in `folder`."""
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
    """Return both errors by hardware, without runs that did not finish with either set of keys."""
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

    The runs used older kernels. If `profile` also has newer ones, the keys apply to its older ones.
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
    """Return attention's backward rate under the runs' software, relative to that of the profile."""
    software = load_software(own_software(runs_file.system_of(profile.name)))
    return software.attention.backward_rate


def _write(folder: Path, hardware: str, chip: str) -> Path:
    """Write a profile of `chip` with the network of `hardware` and fitted keys of another chip."""
    keys_from, own = _KEYS_FROM[chip], load_profile(hardware)
    keys = with_keys_of(load_profile(chip), load_profile(keys_from))
    keys["nic"] = {"gb_s_per_node": own.nic.gb_s_per_node}
    head = {"base": chip, "name": f"{own.name}-keys-of-{keys_from}", "gpus_per_node": own.gpus_per_node}
    folder.mkdir(parents=True, exist_ok=True)
    path = (folder / f"{head['name']}.toml").resolve()
    write_whole(path, to_toml({**head, **keys}))
    return path
