"""Run a script on real CPU ranks: unchanged, on a single rank, and without sharding as its reference."""

import itertools
import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from fsdpbench.base.configuration.config import Config
from fsdpbench.base.errors import CannotJudgeError, error_text
from fsdpbench.engine.results.records import Status
from fsdpbench.script.real_ranks.pieces import keep, weights_of, whole
from fsdpbench.script.real_ranks.rank import Ended, Task, Way
from fsdpbench.script.real_ranks.shrinking import SHORTENED
from fsdpbench.script.real_ranks.unsharded import updated_path
from fsdpbench.script.real_ranks.watching import MOST_STEPS, StepRecord, record_path
from fsdpbench.sweep.trials import run_at

MOST_RANKS = 16
_STEPS = 3
_LONG = 1000  # steps with short epochs
_EVEN, _EXACT = 0.25, 0.01  # tolerance of element counts, as a power of two: in general, with two ranks
_IMPOSSIBLE = re.compile(
    r"NotCompared|NotImplemented|ModuleNotFound|ImportError|gloo|backend|not (?:implemented|supported)|cuda"
    r"|nccl|offline|timed out|'(?:Stream|Event)' object|torch\.cpu",
    re.IGNORECASE,
)
"""Errors of a script on CPU ranks that need not occur on GPUs."""


@dataclass(frozen=True)
class RealRun:
    """A run on real ranks, in `folder`. `cause` and `place`: the error that ended it and the script's line,
    both empty if it finished; `whole`: as in `Task`."""

    folder: Path
    ranks: int
    cause: str
    place: str
    notes: tuple[str, ...]
    whole: bool

    @property
    def failure(self) -> str:
        """Return the line and the error as one text; empty without an error."""
        return f"{self.place}: {self.cause}" if self.place else self.cause

    @property
    def is_to_blame(self) -> bool:
        """Return whether it ended with an error that would also occur on GPUs."""
        return bool(self.place) and not _IMPOSSIBLE.search(self.cause)

    @property
    def steps(self) -> int:
        """Return the number of steps for which every rank wrote a record, without the extra final record."""
        written = len([*itertools.takewhile(self._complete, range(MOST_STEPS + 1))])
        return written - (written > _STEPS)

    def records(self, step: int) -> list[StepRecord]:
        """Return the records of all ranks for a step; an empty list if one is missing."""
        return [torch.load(path, weights_only=False) for path in self._complete(step)]

    def _complete(self, step: int) -> list[Path]:
        paths = [record_path(self.folder, rank, step) for rank in range(self.ranks)]
        return paths if all(path.exists() for path in paths) else []

    def updated(self, step: int) -> Mapping[str, torch.Tensor]:
        """Return the weights after a step of the reference's optimizer; empty if it ended before that."""
        path = updated_path(self.folder, 0, step)
        return torch.load(path) if path.exists() else {}


@dataclass(frozen=True)
class Pair:
    """The unchanged script and its reference without sharding. `power`: exponent of the number of ranks in
    the loss: -1 if it is a part of a sum, whose gradients must be added, 1 if it is multiplied by the ranks;
    `moved`: the reference with perturbed weights; `dropped`: the line that gathers without gradients."""

    sharded: RealRun
    reference: RealRun
    power: int
    task: Task
    moved: RealRun | None = None
    dropped: str = ""


def run_pair(
    config: Config,
    folder: Path,
    ranks: int,
    timeout_s: float,
    power: int | None = None,
    plain: bool = False,
) -> Pair:
    """Run a script on real ranks, with and without sharding, in `folder`. `power`: as in `Pair`, if known;
    `plain`: as in `Task`.

    Raises `CannotJudgeError` if a run fails; if the unchanged script fails, with its own error.
    """
    sharded = run_ranks(config, folder / "sharded", ranks, timeout_s, Task(Way.SHARDED, _STEPS, plain=plain))
    weights = folder / "weights"
    weights.mkdir()
    if not sharded.steps and not sharded.is_to_blame:
        raise CannotJudgeError(sharded.failure or "the script took no optimizer step")
    _require_same_names(sharded.records(0))
    for step in range(sharded.steps):
        _write_weights(sharded.records(step), sharded.records(step + 1), weights / f"step{step}.pt")
    if power is None:
        power = _power(config, folder, sharded, weights, timeout_s)
    first = sharded.records(0)
    dropped = next((each.dropped for each in first if each.dropped), "")
    steps = max(1, sharded.steps + sharded.is_to_blame)
    seeds = tuple(each.seed for each in first)
    silent = frozenset[str]().union(*(each.silent for each in first))
    task = Task(Way.UNSHARDED, steps, weights, scale=ranks ** -(power + 1.0), seeds=seeds, silent=silent)
    ways = (*[(True, False)] * bool(dropped), (False, False), (False, True))
    for (follows, casts), prefixed in itertools.product(ways, (False, True)):
        task = replace(task, follows=follows, casts_buffers=casts, prefixed=prefixed)
        aside = folder / f"reference{'_follows' * follows}{'_casts' * casts}{'_prefixed' * prefixed}"
        reference = run_ranks(config, aside, ranks, timeout_s, task)
        own = reference.records(0)
        every = itertools.chain.from_iterable(map(reference.records, range(reference.steps)))
        if follows and own and not any(each.follows for each in every):
            dropped = ""  # nothing reads what is sent but logs
            continue
        # A script that selects parameters by wrapped names would select others without wrappers.
        if own and (prefixed or not first or merged(first[0], own[0]) is not None):
            return Pair(sharded, reference, power, task, dropped=dropped)
    raise CannotJudgeError(sharded.failure or reference.failure or "no optimizer step without sharding")


def _require_same_names(ranks: list[StepRecord]) -> None:
    """Raise `CannotJudgeError` if a rank lacks a parameter that another rank trains."""
    trained = {name: rank for rank, each in enumerate(ranks) for name in each.optimized}
    for rank, each in enumerate(ranks):
        for name in sorted(trained.keys() - each.held.keys()):
            raise CannotJudgeError(f"rank {trained[name]} trains {name}, which rank {rank} does not have")


def merged(sharded: StepRecord, plain: StepRecord) -> list[str] | None:
    """Return the parameters that share settings with others only in the sharded run; None if the sharded run
    separates parameters that share settings without wrappers."""
    found: dict[object, dict[object, list[str]]] = {}
    for name in sorted(sharded.settings.keys() & plain.settings.keys()):
        found.setdefault(sharded.settings[name], {}).setdefault(plain.settings[name], []).append(name)
    if max(Counter(itertools.chain.from_iterable(found.values())).values(), default=1) > 1:
        return None
    smaller = [names for each in found.values() for names in sorted(each.values(), key=len)[:-1]]
    return sorted(itertools.chain.from_iterable(smaller))


def fails_otherwise(config: Config, run: RealRun, folder: Path, timeout_s: float) -> int:
    """Return a number of ranks on which a script that failed in `run` does not fail in the same way (it may
    need more ranks), or 0. Tries the number that it is configured for, or twice as many ranks."""
    if run.ranks == config.gpus:
        return 0
    more = config.gpus if run.ranks < config.gpus <= MOST_RANKS else min(2 * run.ranks, MOST_RANKS)
    again = run_ranks(config, folder / "more", more, timeout_s, Task(Way.SHARDED, _STEPS))
    alike = again.is_to_blame and again.place == run.place
    return 0 if alike and (more == config.gpus or again.cause == run.cause) else more


def with_rounding(config: Config, pair: Pair, folder: Path, timeout_s: float, epsilon: float) -> Pair:
    """Run the reference again with weights perturbed by up to `epsilon` / 2. Raises `CannotJudgeError`."""
    task = replace(pair.task, moves=epsilon)
    moved = run_ranks(config, folder / "moved", pair.reference.ranks, timeout_s, task)
    if moved.steps < pair.reference.steps:
        raise CannotJudgeError(f"rounding could not be measured: {moved.failure}")
    return replace(pair, moved=moved)


def kept_apart(config: Config, pair: Pair, folder: Path, timeout_s: float) -> list[str]:
    """Return what the script of a `pair` keeps between steps, equal on all ranks at first and not later, if
    gradients follow it: the reference's change where ranks take it from rank 0."""
    steps = [pair.sharded.records(step) for step in range(pair.reference.steps)]
    every = [[each.kept for each in ranks] for ranks in steps]
    first = [name for name, digest in every[0][0].items() if not digest.startswith("=")]
    names = set(first).intersection(*itertools.chain(*every))
    counts = {name: [len({each[name] for each in ranks}) for ranks in every] for name in names}
    apart = sorted(name for name, (first, *later) in counts.items() if first == 1 < max(later, default=1))
    if not apart or len({each.inputs for each in steps[0]}) == 1:
        return []

    def matter(chosen: list[str]) -> bool:
        task = replace(pair.task, shared=frozenset(chosen))
        aside = folder / f"shared_{'_'.join(str(apart.index(each)) for each in chosen)}"
        other = run_ranks(config, aside, pair.reference.ranks, timeout_s, task)
        for step in range(min(pair.reference.steps, other.steps)):
            for one, two in zip(pair.reference.records(step), other.records(step), strict=True):
                for before, after in zip(one.local, two.local, strict=False):
                    both = ((before[name], after[name]) for name in before.keys() & after.keys())
                    if any(float((a - b).norm()) > 1e-3 * float(a.norm()) for a, b in both):
                        return True
        return False

    return ([name for name in apart if matter([name])] or apart) if matter(apart) else []


def run_ranks(config: Config, folder: Path, ranks: int, timeout_s: float, task: Task) -> RealRun:
    """Run a script on real ranks that perform `task` and write their files to `folder`, or below it if lists
    of blocks had to stay whole."""
    folder.mkdir(parents=True, exist_ok=True)
    task.write(folder)
    real = replace(
        config,
        device="cpu",
        gpus=ranks,
        gpus_per_node=ranks,
        gpus_used_per_node=None,
        measurement=replace(config.measurement, timeout_s=timeout_s),
    )
    (trial,) = run_at([(real, folder)], jobs=1)
    found = [each for rank in range(ranks) if (each := Ended.read(folder, rank)) is not None]
    own = next((each for each in found if each.cause and each.place), Ended([]))
    failed = trial.status is not Status.OK and (len(found) < ranks or any(each.cause for each in found))
    cause = own.cause or ((trial.cause or trial.status.value) if failed else "")
    notes = sorted({note for each in found for note in each.notes})
    ran = RealRun(folder, ranks, cause, own.place, tuple(notes), task.whole)
    may_be_whole = not task.whole and task.way is not Way.RESUMES and any(SHORTENED in note for note in notes)
    if own.place and may_be_whole and not ran.records(0):
        return run_ranks(config, folder / "whole", ranks, timeout_s, replace(task, whole=True))
    return ran


def _write_weights(records: list[StepRecord], after: list[StepRecord], path: Path) -> None:
    """Write the unsharded weights of a step and the gradients that its optimizer read, for the reference; and
    whether the optimizer reduced them, from the records `after` it."""
    weights = {name: each.values for name, each in weights_of(rank.held for rank in records).items()}
    read = {name: whole((rank.clipped or {}).get(name) for rank in records) for name in records[0].held}
    clipped = {name: each.values for name, each in read.items() if each is not None}
    reduces, added = any(each.reduces for each in after), [rank.added for rank in records]
    keep({"weights": weights, "clipped": clipped, "reduces": reduces, "added": added}, path)


def _power(config: Config, folder: Path, sharded: RealRun, weights: Path, timeout_s: float) -> int:
    """Return the exponent of the number of ranks in a rank's loss. -1: the loss is a part of a sum, because
    on a single rank it is `ranks` times as large, and not equal for the same data. 1: it is multiplied by the
    ranks, because all its elements together weigh `ranks` times as much as on a single rank."""
    others = sharded.records(0)
    task = Task(Way.UNSHARDED, 1, weights, seeds=tuple(each.seed for each in others))
    records = run_ranks(config, folder / "alone", 1, timeout_s, task).records(0)
    first, own = ([abs(sum(each.losses)) for each in every] for every in (records, others))
    if not first or not own or not min(first + own):
        return 0
    terms = [[term for each in rank.divided for term in each.terms.values()] for rank in (*records, *others)]
    alone, *totals = (sum(term.total for term in each) for each in terms)
    times = sum(totals) / len(totals) / (alone or 1.0) / sharded.ranks
    if times and abs(math.log2(times * sharded.ranks)) < _EXACT:
        return 0  # as much as alone: each is a mean, whatever its value
    if times and abs(math.log2(times)) < (_EVEN if sharded.ranks > 2 else _EXACT):
        return 1
    if records[0].inputs == others[0].inputs and math.isclose(first[0], own[0], rel_tol=0.01):
        return 0
    return -int(abs(math.log2(first[0] / (sum(own) / len(own)) / sharded.ranks)) < 0.5)


def repeated(config: Config, folder: Path, sharded: RealRun, timeout_s: float) -> list[str]:
    """Return a finding if a shuffling sampler reads two epochs in the same order. The script of `sharded`
    runs again on one rank with short epochs; no finding if it does not reach a second epoch."""
    first = sharded.records(0)[0]
    if first.order is None:
        return []
    said = folder / "epochs" / "alike.pt"
    run_ranks(config, said.parent, 1, timeout_s, Task(Way.UNSHARDED, _LONG, epochs=said))
    alike = said.exists() and torch.load(said)
    return [error_text("gradients.epoch", first.loader or first.place)] if alike else []
