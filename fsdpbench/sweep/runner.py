"""Runs the points of a plan that the store does not hold yet, and stores their results.

With repeats, the run is the replicate, and its steps are samples within it: steps of one run share the run's
conditions (placement of processes, clocks, page cache), so the spread between runs is the relevant one. Runs
of all configurations are interleaved, every second round backwards, so that a drift of the machine affects
all configurations equally:

    round 1   A B C      round 2   C B A      round 3   A B C
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from fsdpbench.base import interruption
from fsdpbench.base.configuration.config import Config, Measurement
from fsdpbench.engine.results.provenance import content_key
from fsdpbench.engine.results.records import Status
from fsdpbench.engine.results.result import not_applicable_result
from fsdpbench.engine.results.store import Store, disk_errors, refresh_index
from fsdpbench.launch.pool import PointPool
from fsdpbench.reports.figures import FIGURES
from fsdpbench.reports.result import Repeats, Result
from fsdpbench.reports.result_figures import spread
from fsdpbench.sweep.planning import not_applicable
from fsdpbench.sweep.trials import Pool, Progress, Trial, jobs_for, run

# Step time and memory come from untraced steps.
UNTRACED = Measurement(2, 1, 0, timeout_s=600.0, most_warmup_steps=12, most_timed_steps=8)


@dataclass(frozen=True)
class Run:
    """A run of a configuration; `number` counts from 1."""

    config: Config
    number: int = 1


def interleaved(points: Sequence[Config], repeat: int) -> list[Run]:
    """Return every run of every point in execution order."""
    runs: list[Run] = []
    for number in range(1, repeat + 1):
        order = points if number % 2 else tuple(reversed(points))
        runs += [Run(config, number) for config in order]
    return runs


def merged(first: Result, others: Sequence[Result]) -> Result:
    """Return a configuration's result over all its runs, based on that of the first run.

    `step_time_s` becomes the median over runs, and rates follow from it; everything else is the first run's.
    `repeats` has each run's step time and samples. May be applied to its own output again.
    """
    earlier, step = first.repeats, _step(first)
    own_step = earlier.step_time_s[0] if earlier else step
    own_samples = earlier.samples_s[0] if earlier else first.step_times_s
    succeeded = [result for result in others if result.status is Status.OK]
    steps = [own_step, *(_step(result) for result in succeeded)]
    together = median(steps)
    repeats = Repeats(
        runs=len(others) + 1,
        failed=len(others) - len(succeeded),
        step_time_s=steps,
        spread=spread(steps),
        samples_s=[own_samples, *(result.step_times_s for result in succeeded)],
    )
    return first.replaced(**_rates(first, step / together), step_time_s=together, repeats=repeats)


def first_run(result: Result) -> Result:
    """Undo `merged` for step time and rates: return the result of the first run alone."""
    if not result.repeats:
        return result
    own = result.repeats.step_time_s[0]
    return result.replaced(**_rates(result, _step(result) / own), step_time_s=own, repeats=None)


def _rates(result: Result, scale: float) -> dict[str, float]:
    """Return all known rates, multiplied by `scale`."""
    known = ((figure.path, figure.of(result)) for figure in FIGURES if figure.is_rate)
    return {path: value * scale for path, value in known if value is not None}


def _step(result: Result) -> float:
    assert result.step_time_s is not None  # only called for runs that succeeded
    return result.step_time_s


@dataclass
class SweepSummary:
    """The number of runs that were already done, and the trials that ran now."""

    already_done: int
    ran: list[Trial] = field(default_factory=list)


def run_sweep(
    store: Store,
    points: Sequence[Config],
    progress: Progress,
    *,
    jobs: int,
    retry_failed: bool = False,
    fail_fast: bool = False,
    repeat: int = 1,
    pool: Pool | None = None,
    index: bool = True,
    again: bool = False,
) -> SweepSummary:
    """Run what is missing of `repeat` runs of each of `points`, in `pool` (default: here, `jobs` at a time).

    With `again` all run and replace earlier results. Without `index` the store's index is not updated. An
    interruption loses only runs in flight; a second call continues. Raises `BenchError` if the store can no
    longer be written.
    """
    statuses = store.statuses(points, repeat)
    runs = interleaved(points, repeat)
    todo = [
        run
        for run in runs
        if again
        or (status := statuses.get((content_key(run.config), run.number))) is None
        or (retry_failed and not status.is_answer)
    ]
    summary = SweepSummary(already_done=len(runs) - len(todo))
    progress.begin(len(runs), summary.already_done)
    numbers: dict[Path | None, int] = {}
    try:
        with pool or PointPool(jobs) as workers:
            for trial in run(_tasks(store, todo, statuses, numbers), workers, progress):
                _keep(store, trial, numbers.pop(trial.folder), statuses)
                progress.finished(trial.config, trial.result)
                summary.ran.append(trial)
                if fail_fast and not trial.status.is_answer:
                    break
    finally:
        progress.end()
        with disk_errors(store.folder):
            if repeat > 1:
                _merge_repeats(store, points)
        if index and interruption.arrived():
            store.drop_index()  # it is stale, and there is no time to build a new one
        elif index:
            refresh_index(store)
    return summary


def _tasks(
    store: Store,
    todo: Sequence[Run],
    statuses: dict[tuple[str, int], Status],
    numbers: dict[Path | None, int],
) -> Iterator[tuple[Config, Path]]:
    """Yield the configurations to run with their work folders; note each run's number in `numbers`."""
    for each in todo:
        if each.number > 1 and statuses.get((content_key(each.config), 1)) is not Status.OK:
            continue  # a configuration whose first run failed is not repeated
        with disk_errors(store.folder):
            work = store.work_folder(each.config, each.number)
        numbers[work] = each.number
        yield each.config, work


def _keep(store: Store, trial: Trial, number: int, statuses: dict[tuple[str, int], Status]) -> None:
    assert trial.folder is not None
    with disk_errors(store.folder):
        store.commit(trial.config, trial.folder, number)
    statuses[content_key(trial.config), number] = trial.status


def _merge_repeats(store: Store, points: Sequence[Config]) -> None:
    """Write each configuration's result over all its stored runs."""
    for config in points:
        results = store.runs(config)
        if len(results) > 1 and results[0].status is Status.OK:
            store.replace_result(config, merged(results[0], results[1:]))


def simulate(
    configs: Sequence[Config], folder: Path, progress: Progress, jobs: int | None = None
) -> dict[str, Result]:
    """Run those of the bench's own `configs` that `folder` lacks or holds as failed. Return results by
    content key, including `not_applicable` ones."""
    refused = {content_key(c): not_applicable_result(c, why) for c in configs if (why := not_applicable(c))}
    unique = list({key: c for c in configs if (key := content_key(c)) not in refused}.values())
    store = Store.open_or_create(folder)
    with store.locked():
        systems = sorted({config.system for config in unique})
        store.write_space({"schema": 1, "system": systems}, unique)
        run_sweep(store, unique, progress, jobs=jobs or jobs_for("sim"), retry_failed=True)
    return refused | {key: stored.result for key, stored in store.finished().items()}
