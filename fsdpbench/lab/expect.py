"""Judge a measured speed: is it what this configuration should reach, and if not, what would explain it?

    configuration ──simulate──> step time with its 90 % interval <── measured
    if outside:
        a part of the machine    scaled (network, latency, compute, memory, host) until the step is as long
        a setting                changed (recomputation, compile, dtypes, ...): it must give the measured time
                                 to within `APART`, the error between configurations on one machine

Every explanation was simulated. They are ranked by their distance from the assumptions, in units of how much
real machines differ (`spread`): a network at a third of its data sheet ranks before a GPU at a third of its
clock. Explanations are alternatives: combinations of two causes are not tried.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path

import msgspec

from fsdpbench.base.configuration.config import Config
from fsdpbench.base.errors import UsageError, error_text
from fsdpbench.base.files.documents import rendered_beside, table_beside
from fsdpbench.base.numbers import finite_number
from fsdpbench.base.settings import show_value
from fsdpbench.engine.results.residuals.widths import APART
from fsdpbench.lab.calibrate.from_results.fit import BETWEEN_NODES, Factor, ScaledProfile
from fsdpbench.sweep.planning import not_applicable
from fsdpbench.sweep.trials import Trial, run_in, thrown_away


class SpeedUnit(StrEnum):
    """The unit of a measured speed."""

    SECONDS = "s"
    TOKENS = "tokens/s/GPU"
    SAMPLES = "samples/s/GPU"
    TFLOPS = "TFLOPS/GPU"
    MFU = "% MFU"


@dataclass(frozen=True)
class Measured:
    """A measured speed in its original unit; above 0 and finite."""

    value: float
    unit: SpeedUnit

    def step_s(self, trial: Trial) -> float:
        """Return the corresponding step time in s for the simulated configuration of `trial`.

        Raises:
            UsageError: the simulation has no figure of this unit.
        """
        if self.unit is SpeedUnit.SECONDS:
            return self.value
        result, step = trial.result, trial.step_time_s or 0.0
        rate = {
            SpeedUnit.TOKENS: result.tokens_per_s_per_gpu,
            SpeedUnit.SAMPLES: result.samples_per_s_per_gpu,
            SpeedUnit.TFLOPS: result.tflops_per_gpu,
            SpeedUnit.MFU: None if result.mfu is None else 100 * result.mfu,
        }[self.unit]
        if not rate:
            raise UsageError(error_text("expect.no_figure", self.unit))
        return step * rate / self.value


def parse_measured(text: str) -> Measured:
    """Parse `21.3s`, `850ms`, `3212 tokens/s/gpu`, `350TFLOPS`, `41%MFU` or `0.41MFU`.

    Raises:
        UsageError: the text has none of these forms, or is not above 0.
    """
    words = text.replace(" ", "").replace("_", "").lower()
    number = words.rstrip("abcdefghijklmnopqrstuvwxyz/%")
    unit = _UNITS.get(words[len(number) :])
    try:
        value = finite_number(number.replace(",", ""))
    except ValueError:
        unit, value = None, 0.0
    if unit is None or value <= 0:
        raise UsageError(error_text("expect.measured", text))
    return Measured(value * unit[1], unit[0])


@dataclass(frozen=True)
class Cause:
    """A simulated explanation. `scale`: speed of a machine's part, 1 if as assumed; None for a setting.

    `step_time_s` is the step with this cause, `distance` measures how unlikely it is (0: not at all).
    """

    name: str
    words: str
    look_at: str
    scale: float | None
    step_time_s: float
    distance: float


@dataclass(frozen=True)
class Expectation:
    """A measured step next to the simulated one. `low` and `high` bound the 90 % interval, in s."""

    config: Config
    trial: Trial
    measured_s: float
    expected_s: float
    low: float
    high: float
    because: tuple[str, ...]
    causes: tuple[Cause, ...] = ()

    @property
    def normal(self) -> bool:
        return self.low <= self.measured_s <= self.high

    @property
    def slower(self) -> float:
        """Return the relative slowdown against the expected step; below 0: faster."""
        return self.measured_s / self.expected_s - 1.0

    @property
    def above_peak(self) -> str:
        """Return the figures if the measured speed exceeds the chip's peak. Empty for a normal speed, whose
        FLOPs may have been counted without the causal mask."""
        result, faster = self.trial.result, self.expected_s / self.measured_s
        if self.normal or not result.tflops_per_gpu or not result.mfu or result.mfu * faster <= 1:
            return ""
        dtype, peak = self.config.settings.param_dtype, result.tflops_per_gpu / result.mfu
        return error_text("expect.above_peak", result.tflops_per_gpu * faster, peak, dtype)

    @property
    def slower_between(self) -> tuple[float, float]:
        """Return the slowdown relative to both ends of the interval."""
        return self.measured_s / self.high - 1.0, self.measured_s / self.low - 1.0


_SLOWER, _FASTER = (0.6, 0.3, 0.1), (1.2, 1.6)
_MOST_CAUSES = 3
_FARTHEST = 4.0
_SETTING_DISTANCE = 1.0
_Run = Callable[[str, Sequence[Config]], list[Trial]]


@dataclass(frozen=True)
class Part:
    """A part of a machine: its name, how much real ones differ from their profiles, where to look at it.

    `spread`: the difference (logarithm) that about one case in three exceeds.
    """

    words: str
    spread: float
    look_at: str


_TABLE = table_beside(__file__, "expect.toml")
_UNITS = {word: (SpeedUnit(unit), factor) for word, (unit, factor) in _TABLE["units"].items()}
_PARTS = {factor: msgspec.convert(_TABLE["parts"][factor.value], Part) for factor in Factor}
_VARIED = [(name, value) for name, values in _TABLE["varied"].items() for value in values]


def expect(
    config: Config, measured: Measured, jobs: int, report: Callable[[str], None] = lambda line: None
) -> Expectation:
    """Simulate `config` (on simulated GPUs, untraced), compare, and explain a speed outside of the interval.

    Raises:
        UsageError: the configuration has no simulated step time, for example because memory runs out.
    """
    with thrown_away("expect") as folder:
        (trial,) = run_in(folder, [config], 1)
        if not trial.step_time_s or trial.interval is None:
            cause = f"{trial.status}: {trial.cause}".partition(". ")[0]
            way = "name the batch and settings that you ran (--batch, --activation-checkpointing)"
            raise UsageError(f"{config.name} has no simulated step time ({cause}); {way}")
        (low, high), because = trial.interval.step_time_s, tuple(trial.interval.because)
        found = Expectation(config, trial, measured.step_s(trial), trial.step_time_s, low, high, because)
        if found.normal or found.above_peak:
            return found
        report(f"outside of the interval; simulating what could explain {_seconds(found.measured_s)} a step")

        def run(what: str, configs: Sequence[Config]) -> list[Trial]:
            total = len(configs)
            return run_in(folder, configs, jobs, lambda done: report(f"simulated {done} of {total} {what}"))

        causes = [*_of_machine(found, folder, run), *_of_settings(found, run)]
    kept = sorted((cause for cause in causes if cause.distance <= _FARTHEST), key=lambda each: each.distance)
    return replace(found, causes=tuple(kept[:_MOST_CAUSES]))


def _of_machine(found: Expectation, folder: Path, run: _Run) -> list[Cause]:
    """Return each part of the machine that alone, if slower or faster, gives the measured step."""
    config = found.config
    one_node = config.gpus <= config.ranks_per_node
    parts = [factor for factor in Factor if not (one_node and factor in BETWEEN_NODES)]
    scales = _SLOWER if found.slower > 0 else _FASTER
    tried = [(factor, scale) for factor in parts for scale in scales]
    trials = run("changes of the machine", [_scaled(config, *each, folder) for each in tried])
    guesses: list[tuple[Factor, float]] = []
    for factor in parts:
        steps = [(1.0, found.expected_s)]
        for (of, scale), trial in zip(tried, trials, strict=True):
            if of is factor and trial.step_time_s:
                steps.append((scale, trial.step_time_s))
        crossing = _crossing(steps, found.measured_s)
        if crossing is not None:
            guesses.append((factor, crossing))
    checked = run("explanations", [_scaled(config, *each, folder) for each in guesses])
    causes = []
    for (factor, scale), trial in zip(guesses, checked, strict=True):
        if trial.step_time_s and _alike(trial.step_time_s, found.measured_s):
            part = _PARTS[factor]
            words = f"{part.words} at {scale:.0%} of the assumed speed"
            distance = abs(math.log(scale)) / part.spread
            causes.append(Cause(factor.value, words, part.look_at, scale, trial.step_time_s, distance))
    return causes


def _crossing(steps: Sequence[tuple[float, float]], wanted: float) -> float | None:
    """Return the scale at which the step is `wanted`, by log-linear interpolation; None outside the range."""
    for (near, before), (far, after) in itertools.pairwise(steps):
        if min(before, after) <= wanted <= max(before, after) and before != after:
            share = math.log(wanted / before) / math.log(after / before)
            return math.exp(math.log(near) + share * math.log(far / near))
    return None


def _scaled(config: Config, factor: Factor, scale: float, folder: Path) -> Config:
    path = folder / f"{factor}-{scale:.6g}.toml"
    ScaledProfile(config.hardware or "", {factor: scale}).write(path, {}, "tried by expect")
    return replace(config, hardware=str(path))


def _of_settings(found: Expectation, run: _Run) -> list[Cause]:
    """Return the settings that alone give the measured step, unless that equals the expected one."""
    config = found.config
    tried = []
    for name, value in _VARIED:
        settings = replace(config.settings, **{name: value})
        changed = replace(config, settings=settings)
        if getattr(config.settings, name) != value and not not_applicable(changed, {name: value}):
            tried.append((name, value, changed))
    trials = run("other settings", [changed for *_, changed in tried])
    causes = []
    for (name, value, _), trial in zip(tried, trials, strict=True):
        step = trial.step_time_s
        if step and _alike(step, found.measured_s) and not _alike(step, found.expected_s):
            shown, assumed = show_value(value), show_value(getattr(config.settings, name))
            words = f"{name}={shown} where {assumed} was assumed"
            look_at = f"the program's own settings: does it run with {name}={shown}?"
            distance = _SETTING_DISTANCE + abs(math.log(step / found.measured_s)) / APART
            causes.append(Cause(name, words, look_at, None, step, distance))
    return causes


def _alike(one: float, other: float) -> bool:
    return abs(math.log(one / other)) <= APART


def lines(found: Expectation) -> list[str]:
    """Return the answer as text: verdict, expected step, and causes with what to look at."""
    bounds = (found.expected_s, found.low, found.high)
    times = [found.measured_s / each if found.slower > 0 else each / found.measured_s for each in bounds]
    text = rendered_beside(
        __file__,
        "expect.jinja",
        found=found,
        direction="slower" if found.slower > 0 else "faster",
        ends=sorted(map(abs, found.slower_between)),
        times=[times[0], *sorted(times[1:])],
        expected=error_text("expect.line", *map(_seconds, bounds)),
        seconds=_seconds,
    )
    return text.rstrip("\n").split("\n")


def record(found: Expectation) -> dict[str, object]:
    """Return the answer as JSON; times in s."""
    return {
        "schema": 1,
        "name": found.config.name,
        "config": found.config.to_dict(),
        "normal": found.normal,
        "measured_s": found.measured_s,
        "expected_s": found.expected_s,
        "interval": {"step_time_s": [found.low, found.high], "because": list(found.because)},
        "above_peak": found.above_peak or None,
        "slower": found.slower,
        "slower_interval": list(found.slower_between),
        "causes": [
            {name: value for name, value in vars(cause).items() if name != "distance"}
            for cause in found.causes
        ],
    }


def _seconds(value: float) -> str:
    return f"{value:,.4g} s" if value >= 1 else f"{1e3 * value:.3g} ms"
