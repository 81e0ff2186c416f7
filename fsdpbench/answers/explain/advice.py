"""Explain why a configuration runs out of memory, and what to change; all results are simulated.

unchanged ────────> does it run out of memory? what held the memory?
more memory ──────> memory it needs and its speed ── the reference for the price of a change
each change ──────> fits? how fast? ── none fits ──> pairs of those that save most, then all of them
"""

import functools
import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from fsdpbench.base.configuration.config import Config, WhatIf
from fsdpbench.base.configuration.script_source import ScriptSource, Variation
from fsdpbench.base.errors import UsageError
from fsdpbench.base.result_sections import MemoryAccount, ObservedScript
from fsdpbench.base.settings import Effect, Settings, all_trades, show_value
from fsdpbench.engine.results.records import Status
from fsdpbench.sweep.planning import not_applicable, shards, simulated_nodes, without_absent
from fsdpbench.sweep.trials import Trial, expected, simulate, with_account, with_room

_STRONGEST = 5
"""Number of changes that are combined in pairs."""
_MOST_PAIRS = 8
_ENOUGH = 3
"""Stop after this many combinations fit. The ones that save most memory come first."""
_DEAR = 0.3
"""If every single change costs more than this, combinations are tried too."""
_SAME_PRICE = 0.005
_LESS = 0.99
"""A change has more room if it reserves less than this share of the memory that the original reserves."""
EXPANDABLE = "expandable_segments:True"


@dataclass(frozen=True)
class Change:
    """A change of `settings` and `fields` of a configuration.

    write: what to type. last_resort: it needs other machines. work: samples per step relative to the
    unchanged script (1 for models of fsdpbench, which count their samples).
    """

    write: str
    meaning: str
    settings: tuple[tuple[str, Any], ...] = ()
    fields: tuple[tuple[str, Any], ...] = ()
    last_resort: bool = False
    work: float = 1.0
    unpriced: bool = False
    """Whether its time is not simulated."""

    def applied_to(self, config: Config) -> Config:
        """Return the changed configuration. Raises `UsageError` if it is invalid."""
        changed = config.settings.changed(**dict(self.settings)) if self.settings else config.settings
        made = replace(config, settings=changed, **dict(self.fields))
        if made.what_if is not None and config.what_if is not None and made.what_if != config.what_if:
            made = replace(made, what_if=made.what_if.after(config.what_if))
        return made if made.script is not None or made.system == config.system else without_absent(made)

    def with_(self, other: "Change") -> "Change":
        """Return both changes combined; if both set the same field, the value of `other` is used."""
        return Change(
            f"{self.write} {other.write}",
            f"{self.meaning}; {other.meaning}",
            tuple({**dict(self.settings), **dict(other.settings)}.items()),
            tuple({**dict(self.fields), **dict(other.fields)}.items()),
            self.last_resort or other.last_resort,
            self.work * other.work,
            self.unpriced or other.unpriced,
        )

    def holds(self, other: "Change") -> bool:
        """Return whether it changes all fields that `other` changes, and more."""
        mine, others = ({*change.settings, *change.fields} for change in (self, other))
        return mine > others

    def clashes_with(self, other: "Change") -> bool:
        """Return whether both change the same field."""
        names = {name for name, _ in (*self.settings, *self.fields)}
        return bool(names & {name for name, _ in (*other.settings, *other.fields)})


def _assuming(write: str, meaning: str, assumed: WhatIf, **more: Any) -> Change:
    """Return a change that is simulated by a what-if assumption."""
    return Change(write, meaning, fields=(("what_if", assumed),), **more)


_ALLOCATOR = _assuming(
    f"PYTORCH_CUDA_ALLOC_CONF={EXPANDABLE}", "less fragmentation", WhatIf(allocator=EXPANDABLE)
)
_SHARDED = Change(
    "--system torch-fsdp2", "shards parameters, gradients and optimizer", fields=(("system", "torch-fsdp2"),)
)


def changes_for(config: Config, seen: ObservedScript | None = None) -> list[Change]:
    """Return the single changes that `config` and its system allow. `seen`: the observed script."""
    if config.script is not None:
        candidates = [*_of_script(config.script, seen), *_of_machines(config)]
    else:
        of_settings = [*_of_settings(config.settings), *_of_batch(config.settings)]
        is_whole = config.gpus > 1 and not shards(config)
        candidates = [*[_SHARDED] * is_whole, _ALLOCATOR, *of_settings, *_of_machines(config)]
    return [change for change in candidates if is_possible(change, config)]


def is_possible(change: Change, config: Config) -> bool:
    """Return whether the changed configuration is valid and differs from `config`."""
    try:
        changed = change.applied_to(config)
    except UsageError:
        return False
    if changed.to_dict() == config.to_dict():
        return False
    names = (name for name, _ in change.settings)
    return config.script is not None or not not_applicable(changed, names, before=config)


def _of_settings(settings: Settings) -> Iterator[Change]:
    """Yield a change for each row of the trade table that needs less memory than the current `settings`."""
    values = settings.to_dict()
    for setting, trade in all_trades():
        if trade.memory is Effect.LESS and trade.leaves(values[setting.name]):
            changed = ((setting.name, trade.value), *trade.also)
            yield Change(f"{setting.flag} {show_value(trade.value)}", trade.words, changed)


def _of_batch(settings: Settings) -> Iterator[Change]:
    """Yield changes to more microbatches with the same samples per step."""
    for parts in (2, 4, 8):
        if settings.batch % parts == 0:
            batch, microbatches = settings.batch // parts, settings.grad_accum * parts
            yield Change(
                f"--batch {batch} --grad-accum {microbatches}",
                f"the same samples a step in {microbatches} microbatches",
                (("batch", batch), ("grad_accum", microbatches)),
            )


def _of_machines(config: Config) -> Iterator[Change]:
    for factor in (2, 4):
        gpus = config.gpus * factor
        per_node = config.gpus_per_node
        if per_node == config.gpus:  # it may use only a part of a node, which is filled first
            _, whole, _ = simulated_nodes(config.hardware or "", gpus, None, None, None)
            per_node = max(min(whole, gpus), config.gpus_per_node)
        yield Change(
            f"--gpus {gpus}",
            f"{factor} times as many GPUs, the same work each",
            fields=(("gpus", gpus), ("gpus_per_node", per_node)),
            last_resort=True,
        )


def _of_script(script: ScriptSource, seen: ObservedScript | None) -> Iterator[Change]:
    """Yield changes of one line of a script, of its environment or of an argument."""
    yield _ALLOCATOR
    if seen is None or seen.sharding:
        what = "after the blocks are: shards what is in none of them"
        yield _assuming("fully_shard(model, ...)", what, WhatIf(variation="wrap-root"))
    for _, trade in all_trades():
        is_of = seen is None or not trade.needs or getattr(seen, trade.needs)
        if trade.variation and trade.memory is Effect.LESS and is_of:
            work = 0.5 if trade.variation == "half-batch" else 1.0
            yield _assuming(trade.script or "", trade.words, WhatIf(variation=trade.variation), work=work)
    arguments, batch = script.arguments, seen and seen.batch
    if batch and not any(_BATCH.fullmatch(each.partition("=")[0]) for each in arguments):
        arguments = (*arguments, batch.option, str(batch.value))
    for place, argument in enumerate(arguments):
        name, equals, value = argument.partition("=")
        place += 0 if equals else 1
        value = value if equals else arguments[place] if place < len(arguments) else ""
        if not _BATCH.fullmatch(name) or not re.fullmatch("[0-9]{1,18}", value) or int(value) < 2:
            continue
        for parts in (2, 4):
            if int(value) % parts:
                continue
            divided = f"{name}{equals}{int(value) // parts}" if equals else str(int(value) // parts)
            changed = (*arguments[:place], divided, *arguments[place + 1 :])
            yield Change(
                f"-- {name} {int(value) // parts}",
                "a smaller batch; accumulate gradients to keep the samples a step",
                fields=(("script", replace(script, arguments=changed)),),
                work=1.0 / parts,
            )


_BATCH = re.compile(r"--?(?:.*[-_])?(?:batch|batch[-_]size|bs|b)")


@dataclass(frozen=True)
class Proposal:
    """A simulated change. price: share of the speed that it costs (negative if it is faster); None if the
    speed without it is not known."""

    change: Change
    trial: Trial
    price: float | None


@dataclass(frozen=True)
class Advice:
    """The explanation of a configuration. as_it_is: unchanged, with the memory account. roomy: on GPUs with
    more memory. fits: proposals that fit, cheapest first, those with retries after those without, last
    resorts after the others. misses: changes that do not fit."""

    as_it_is: Trial
    roomy: Trial
    fits: tuple[Proposal, ...] = ()
    misses: tuple[Change, ...] = ()
    simulated: int = field(default=0)
    unstopped: bool = False
    """Whether memory grows and no change that was tried stops it."""


def advise(
    config: Config, jobs: int, tell: Callable[[str], None], *, search: bool = True, ran_out: bool = False
) -> Advice:
    """Explain `config`, which runs on simulated GPUs. `tell` gets status lines. `ran_out`: it ran out of
    memory on real GPUs, even if its simulation does not. Raises `BenchError`."""
    tell(f"simulating {config.model} on {config.gpus} GPUs, as it is and with more room")
    roomy_config = with_room(config)
    if config.script is not None:  # growth is visible only if memory suffices for some steps
        roomy_config = with_account(roomy_config)
    as_it_is, roomy = simulate([with_account(config), roomy_config], jobs, lambda done: None)
    growing = grows(as_it_is) or grows(roomy)
    asked = as_it_is.status is Status.OOM or growing or as_it_is.retries or as_it_is.risky
    asked = asked or (ran_out and as_it_is.fits)
    if not asked or not search:
        return Advice(as_it_is, roomy, simulated=2)
    if growing:
        return _without_growth(config, as_it_is, roomy, jobs, tell)
    return _searched(config, as_it_is, roomy, jobs, tell)


def _without_growth(
    config: Config, as_it_is: Trial, roomy: Trial, jobs: int, tell: Callable[[str], None]
) -> Advice:
    """Return the change that stops the growth; if that is not enough, combine it with other changes."""
    changes = stops()
    tell("memory grows from step to step; trying what may stop it")
    configs = [with_account(change.applied_to(config)) for change in changes]
    trials = simulate([*configs, *map(with_account, map(with_room, configs))], jobs, lambda done: None)
    ended = [not grows(trial) and trial.fits for trial in trials[len(changes) :]]
    proposals = [
        Proposal(change, trial, None if change.unpriced else _price(change, trial, roomy))
        for change, trial in zip(changes, trials, strict=False)
        if trial.fits and not grows(trial)
    ]
    simulated = 2 + len(trials)
    if proposals or not any(ended):
        return Advice(as_it_is, roomy, tuple(proposals[:1]), simulated=simulated, unstopped=not proposals)
    stop = changes[ended.index(True)]
    base = trials[ended.index(True)]
    found = _searched(stop.applied_to(config), base, roomy, jobs, tell)
    fits = tuple(replace(each, change=stop.with_(each.change)) for each in found.fits)
    return replace(found, as_it_is=as_it_is, fits=fits, simulated=simulated + found.simulated)


def _searched(
    config: Config, as_it_is: Trial, roomy: Trial, jobs: int, tell: Callable[[str], None]
) -> Advice:
    changes = changes_for(config, roomy.result.observed)
    tell(f"trying {len(changes)} changes{expected(roomy, len(changes), jobs)}")
    trials = _tried(config, changes, jobs, tell)
    simulated = 2 + len(changes)
    if not any(_is_good(change, trial, roomy) for change, trial in zip(changes, trials, strict=True)):
        singles = [change for change in changes if not change.last_resort]
        tell(f"none is enough; trying pairs{expected(roomy, len(singles) + _MOST_PAIRS, jobs)} at most")
        more = combinations(config, singles, roomy, jobs, tell)
        found = _until_some_fit(config, more, jobs, tell)
        simulated += len(singles) + len(found)
        changes, trials = [*changes, *more[: len(found)]], [*trials, *found]
    pairs = list(zip(changes, trials, strict=True))
    proposals = [
        Proposal(change, trial, _price(change, trial, roomy))
        for change, trial in pairs
        if trial.fits and _has_more_room(trial, as_it_is)
    ]
    misses = tuple(
        change for change, trial in pairs if trial.status is Status.OOM or not _has_more_room(trial, as_it_is)
    )
    return Advice(as_it_is, roomy, tuple(sorted(_without_needless(proposals), key=_order)), misses, simulated)


def _has_more_room(trial: Trial, as_it_is: Trial) -> bool:
    """Return whether `trial` leaves more memory free than an unchanged configuration that barely fits."""
    if not as_it_is.fits or not trial.fits:
        return True
    return not trial.retries and not trial.risky and (trial.reserved or 0) < _LESS * (as_it_is.reserved or 0)


def _until_some_fit(
    config: Config, changes: Sequence[Change], jobs: int, tell: Callable[[str], None]
) -> list[Trial]:
    """Try changes in order until enough of them fit without retries, and return the trials."""
    trials: list[Trial] = []
    while len(trials) < len(changes) and sum(each.fits and not each.retries for each in trials) < _ENOUGH:
        trials += _tried(config, changes[len(trials) : len(trials) + max(jobs, _ENOUGH)], jobs, tell)
    return trials


def combinations(
    config: Config, singles: Sequence[Change], roomy: Trial, jobs: int, tell: Callable[[str], None]
) -> list[Change]:
    """Return combinations of the `singles` that save most memory: pairs, the strongest with less
    fragmentation, and all strong ones together. Savings are relative to `roomy`."""
    needs = _tried(config, singles, jobs, tell, room=True)
    base = roomy.allocated or 0
    taken = {
        change: base - trial.allocated
        for change, trial in zip(singles, needs, strict=True)
        if trial.allocated is not None and trial.allocated < base
    }
    strongest = sorted(taken, key=lambda change: -taken[change])
    distinct: list[Change] = []
    for change in strongest:
        if not any(change.clashes_with(other) for other in distinct):
            distinct.append(change)
    pairs = [
        first.with_(second)
        for first, second in itertools.combinations(strongest[: 2 * _STRONGEST], 2)
        if not first.clashes_with(second)
    ]
    pairs = [pair for pair in pairs if is_possible(pair, config)][:_MOST_PAIRS]
    allocator = [change for change in singles if change.write == f"PYTORCH_CUDA_ALLOC_CONF={EXPANDABLE}"]
    whole = [
        change.with_(each) for each in allocator for change in distinct[:2] if not change.clashes_with(each)
    ]
    pairs += [pair for pair in whole if is_possible(pair, config)]
    for count in range(3, min(len(distinct), _STRONGEST) + 1):
        joined = functools.reduce(Change.with_, distinct[:count])
        if is_possible(joined, config):
            pairs.append(joined)
    return pairs


def _tried(
    config: Config, changes: Sequence[Change], jobs: int, tell: Callable[[str], None], *, room: bool = False
) -> list[Trial]:
    configs = [change.applied_to(config) for change in changes]
    configs = [with_room(changed) for changed in configs] if room else configs
    what = "changes, with more room" if room else "changes"
    return simulate(configs, jobs, lambda done: tell(f"simulated {done} of {len(configs)} {what}"))


def _is_good(change: Change, trial: Trial, roomy: Trial) -> bool:
    """Return whether a single change suffices: it fits without retries and is not expensive."""
    price = _price(change, trial, roomy)
    return trial.fits and not change.last_resort and not trial.retries and (price or 0.0) < _DEAR


def _without_needless(proposals: list[Proposal]) -> list[Proposal]:
    """Remove the proposals that change more than another one that is as fast."""
    return [
        each
        for each in proposals
        if not any(
            each.change.holds(other.change) and (other.price or 0.0) <= (each.price or 0.0) + _SAME_PRICE
            for other in proposals
        )
    ]


def _price(change: Change, trial: Trial, roomy: Trial) -> float | None:
    if not trial.speed or not roomy.speed:
        return None
    return 1.0 - change.work * trial.speed / roomy.speed


def _order(proposal: Proposal) -> tuple[bool, bool, bool, float, int]:
    price = proposal.price
    words = len(proposal.change.settings) + len(proposal.change.fields)
    retries = bool(proposal.trial.retries)
    return proposal.change.last_resort, retries, price is None, price or 0.0, words


_SOON = 100_000
"""In steps: growth that takes longer to fill the memory is ignored."""


def steps_until_full(account: MemoryAccount) -> int | None:
    """Return the step in which memory will be full at the observed growth; None if it does not grow."""
    each = account.growth.per_step_bytes
    if not each:
        return None
    left = account.free_bytes + account.unused_bytes
    return len(account.growth.at_step_ends_bytes) + max(0, left) // each


def grows(trial: Trial) -> bool:
    """Return whether memory will be full soon, even if it suffices now."""
    steps = steps_until_full(trial.account)
    return steps is not None and steps < _SOON


def stops() -> list[Change]:
    """Return the changes that may stop a script's memory growth, the smallest first."""
    kept = "what the loop keeps (a list, a sum)"
    plain = "what is kept no longer holds the graph of its step"
    on_host = "what is kept is on the host; the time of the copy is not simulated"
    return [
        _assuming(f".detach() {kept}", plain, WhatIf(variation=Variation.DETACH_KEPT)),
        _assuming(f".detach().cpu() {kept}", on_host, WhatIf(variation=Variation.HOST_KEPT), unpriced=True),
    ]
