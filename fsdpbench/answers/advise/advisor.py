"""Simulate the candidate changes of a script and rank those that are worth it."""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from fsdpbench.answers.advise.by_unit import by_unit
from fsdpbench.answers.advise.candidates import Candidate, Kind, candidates
from fsdpbench.answers.advise.edits import Edit, NoDiffError, diff_of
from fsdpbench.base.configuration.config import Config, WhatIf
from fsdpbench.reports.pages.ranking import Paired, cost_of, pair
from fsdpbench.reports.result import Measured, Result
from fsdpbench.sweep.trials import Trial, expected, simulate

_WORTH_SAYING = 0.03
_WORTH_CHOOSING = 0.10
"""The minimum gain to recommend a change of the batch."""
_SAME = 0.001
_STARVING = 0.02
"""The loader is reported if its time makes a step longer by at least this share."""
_MOST_WORKERS = 16
_MUCH_MEMORY = 0.1
"""A change that saves this share of reserved memory and is as fast is worth it."""
_ALWAYS = (Kind.WRONG, Kind.FAULT)
_ORDER = {Kind.WRONG: 0, Kind.FAULT: 1, Kind.MISTAKE: 1, Kind.FREE: 2, Kind.CHOICE: 3, Kind.NO_EFFECT: 4}
GROUPS = ("advice", "possible", "no_effect", "nothing")
_LEFT_OUT = "left out"
_REORDERING = frozenset({"prefetch", "wrap-pairs"})
"""Variations that can only reduce time in which the GPU does not compute."""
_LONGEST_FIRST = "compile"
"""The variation that takes longest to simulate; it starts first, so that no core waits for it at the end."""


@dataclass(frozen=True)
class Tried:
    """One simulated candidate. paired: its throughput relative to the script's; None if it cannot run."""

    candidate: Candidate
    trial: Trial
    paired: Paired | None
    saves: float = 0.0
    """Share of the reserved memory that it saves; negative if it needs more."""
    more: int = 0
    """Number of parameters that it trains and the script does not; if not 0, it is not compared."""
    diff: str = ""
    no_diff: str = ""
    """Why there is no diff."""

    @property
    def name(self) -> str:
        """Return the name of its variation without the value."""
        return self.candidate.variation.partition("=")[0]

    @property
    def gain(self) -> float | None:
        """Return the relative increase of throughput (0.05: 5 % faster)."""
        return None if self.paired is None else self.paired.change


@dataclass(frozen=True)
class Advice:
    """The ranked candidates. advice: faults and worthwhile changes, largest gain first. possible: other
    gains, at a price. no_effect: settings that change nothing. nothing: not worth it or not possible."""

    advice: tuple[Tried, ...]
    possible: tuple[Tried, ...]
    no_effect: tuple[Tried, ...]
    nothing: tuple[Tried, ...]


def advise_script(
    config: Config,
    result: Result,
    jobs: int,
    tell: Callable[[str], None],
    kinds: Sequence[Kind] = tuple(Kind),
) -> Advice:
    """Return advice of some `kinds` on a script that ran as `config`. Raises `BenchError`."""
    base = Trial(config, result)
    bound = _bound(result)
    found = [_bounded(each, bound) for each in candidates(result) if each.kind in kinds]
    asked_for = [each for each in found if each.variation and each.most is None]
    distinct = sorted({each.variation: None for each in asked_for}, key=lambda name: name != _LONGEST_FIRST)
    loader = _loader(result, base)
    asked = distinct + list(loader)

    tell(f"simulating {len(asked)} variants of {config.name}{expected(base, len(asked), jobs)}")
    steady = _is_steady(result)
    configs = [_varied(config, variation, steady=steady) for variation in asked]
    said = "simulated {} of {} variants"
    ran = simulate(configs, jobs, lambda done: tell(said.format(done, len(asked)))) if asked else []
    trials = dict(zip(asked, ran, strict=True))
    tried = [_tried(candidate, base, trials.get(candidate.variation)) for candidate in found]
    if Kind.MISTAKE in kinds:
        alike = _varied(config, "", steady=steady)
        mixes = by_unit(alike, result, base, trials, _simulating(jobs, tell))
        tried += [_tried(candidate, base, trial) for candidate, trial in mixes]
    starving = _starving(result, base, [trials[variation] for variation in loader], list(loader))
    folder = "" if config.script is None else str(config.script.own_folder)
    return _sorted([_with_diff(each, folder) for each in (*starving, *tried)], base)


def fitting_mix(
    config: Config, as_it_is: Trial, roomy: Trial, jobs: int, tell: Callable[[str], None]
) -> Tried | None:
    """Return the fastest mix of blocks with which an out-of-memory script fits; None if none does. Its gain
    is relative to `roomy`, the script with more memory. Raises `BenchError`."""
    result = roomy.result
    if config.script is None or as_it_is.fits or result.observed is None:
        return None
    alike = _varied(config, "", steady=_is_steady(result))
    found = next(by_unit(alike, result, as_it_is, {}, _simulating(jobs, tell)), None)
    return found and _with_diff(_tried(found[0], roomy, found[1]), str(config.script.own_folder))


def _simulating(jobs: int, tell: Callable[[str], None]) -> Callable[[Sequence[Config]], list[Trial]]:
    """Return a function that simulates mixes of blocks and reports how many it has simulated."""
    numbers = itertools.count(1)
    return lambda mixes: simulate(mixes, jobs, lambda _: tell(f"{next(numbers)} simulated by unit"))


def _with_diff(each: Tried, folder: str) -> Tried:
    edits = each.candidate.edits
    try:
        if isinstance(edits, str):
            raise NoDiffError(edits)
        return replace(each, diff=diff_of(edits, folder))
    except NoDiffError as error:
        return replace(each, no_diff=str(error))


def _varied(config: Config, variation: str, *, steady: bool) -> Config:
    """Return the configuration of a variation. `steady`: the script's steps are equal from the second on, so
    one step of a variation is enough unless it has retries."""
    measurement = replace(config.measurement, traced_steps=0)
    if steady and not variation.startswith("loader-time"):
        warmup = measurement.warmup_steps if variation == _LONGEST_FIRST else 1
        measurement = replace(
            measurement, warmup_steps=warmup, timed_steps=1, most_timed_steps=measurement.timed_steps
        )
    script = config.script
    if script is not None:
        script = replace(script, check_ranks=(), to_the_end=False)
    return replace(
        config, what_if=WhatIf(variation=variation), measurement=measurement, sanitize=False, script=script
    )


def _is_steady(result: Result) -> bool:
    measured = result.measured or Measured()
    times = [*measured.warmup_times_s, *measured.step_times_s]
    alike = len(measured.step_times_s) > 1 and max(times) <= (1 + _SAME) * min(times)
    return alike and not result.alloc_retries_per_step


def _bound(result: Result) -> float | None:
    """Return the gain if the device always computed, as an upper bound; None without a trace."""
    parts, step = result.time_s, result.traced_step_time_s
    if not parts or not step:
        return None
    waiting = (parts.exposed_communication + parts.idle) / step
    return waiting / (1 - waiting) if waiting < 1 else None


def _bounded(candidate: Candidate, bound: float | None) -> Candidate:
    """Return a candidate with the upper bound of its gain, if that is too small to simulate it."""
    if bound is None or bound >= candidate.worth or candidate.variation not in _REORDERING:
        return candidate
    return replace(candidate, most=bound)


def _tried(candidate: Candidate, base: Trial, trial: Trial | None) -> Tried:
    if trial is None or candidate.most is not None:
        return Tried(candidate, base, None)
    if trial.untrained != base.untrained:
        return Tried(candidate, trial, None, more=base.untrained - trial.untrained)
    saves = 1 - trial.reserved / base.reserved if trial.reserved and base.reserved else 0.0
    return Tried(candidate, trial, _gain(candidate, base, trial), saves)


def _gain(candidate: Candidate, base: Trial, trial: Trial) -> Paired | None:
    if not trial.fits:
        return None
    work = 1.0
    if candidate.changes_work:
        if not trial.flops or not base.flops or trial.flops < 1.5 * base.flops:
            return None  # the doubled value is not a batch
        work = trial.flops / base.flops
    return _compared(trial, base, work)


def _compared(one: Trial, other: Trial, work: float = 1.0) -> Paired | None:
    """Return the throughput of `one`, whose step does `work` times as much, relative to `other`."""
    if not one.step_time_s or not other.step_time_s:
        return None
    costs = cost_of(work / one.step_time_s, one.interval), cost_of(1 / other.step_time_s, other.interval)
    return pair(*costs)


def _sorted(tried: Sequence[Tried], base: Trial) -> Advice:
    groups: dict[str, list[Tried]] = {name: [] for name in (*GROUPS, _LEFT_OUT)}
    for each in tried:
        groups[_group(each, base)].append(each)
    del groups[_LEFT_OUT]
    for group in groups.values():  # faults before gains, and gains before changes of the training
        group.sort(
            key=lambda each: (_ORDER[each.candidate.kind], -(-1.0 if each.gain is None else each.gain))
        )
    return Advice(**{name: tuple(group) for name, group in groups.items()})


def _group(each: Tried, base: Trial) -> str:
    """Return the field of `Advice` to which a candidate belongs."""
    kind, gain = each.candidate.kind, each.gain
    tight = each.trial.risky and not base.risky
    if kind is Kind.NO_EFFECT:
        memory, before = each.trial.reserved or 0, base.reserved or 0
        is_same = abs(gain or 0.0) < _SAME and abs(memory - before) <= _SAME * before
        return "no_effect" if gain is not None and is_same else _LEFT_OUT
    if gain is None:
        return "advice" if kind in _ALWAYS else "nothing"
    worth = kind is Kind.MISTAKE and gain > -_SAME and each.saves >= _MUCH_MEMORY
    worth |= kind in (Kind.FREE, Kind.MISTAKE) and gain >= each.candidate.worth
    worth |= each.candidate.changes_work and gain >= _WORTH_CHOOSING
    if kind in _ALWAYS or (worth and not tight):
        return "advice"
    return "possible" if gain >= _WORTH_SAYING else "nothing"


def _loader(result: Result, base: Trial) -> tuple[str, ...]:
    """Return the variations of the loader: unchanged, and with as many workers as it needs."""
    seen, batches = result.observed, result.bench and result.bench.loader
    if not batches or seen is None or not seen.loaders or not base.step_time_s:
        return ()
    workers = seen.loaders[0].num_workers
    a_step = batches["seconds"] * batches["batches"] / max(workers, 1)
    if a_step < _STARVING * base.step_time_s:
        return ()
    needed = math.ceil(1.25 * batches["seconds"] * batches["batches"] / base.step_time_s) + 1
    needed = min(max(needed, workers + 1), _MOST_WORKERS)
    return f"loader-time={batches['seconds']:.6f}/{workers}", f"loader-time={batches['seconds']:.6f}/{needed}"


def _starving(result: Result, base: Trial, trials: Sequence[Trial], variations: Sequence[str]) -> list[Tried]:
    """Return the loader as a fault if its real time makes a step longer."""
    seen, batches = result.observed, result.bench and result.bench.loader
    if len(trials) < 2 or not all(trial.step_time_s for trial in trials) or not batches or seen is None:
        return []
    loader = seen.loaders[0]
    slow, better = (trial.step_time_s or 0.0 for trial in trials)
    if slow < (1 + _STARVING) * better:
        return []
    workers = variations[1].rpartition("/")[2]
    candidate = Candidate(
        variations[1],
        Kind.FAULT,
        loader.short,
        f"the loader starves the GPU: a batch takes it {1e3 * batches['seconds']:,.1f} ms here, and a step "
        f"takes {1e3 * slow:,.1f} ms instead of {1e3 * better:,.1f} ms",
        f"DataLoader(..., num_workers={workers}{'' if loader.pin_memory else ', pin_memory=True'})",
        tuple(Edit(loader, "keyword", each) for each in (("num_workers", workers), ("pin_memory", "True"))),
    )
    return [Tried(candidate, trials[1], _compared(trials[1], trials[0]))]
