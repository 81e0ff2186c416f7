"""`fsdpbench plan`: which configurations a sweep would run, which cannot fit, and what it would cost."""

import functools
import itertools
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import click
import msgspec
from rich.text import Text

from fsdpbench.base.errors import ExitCode, UsageError
from fsdpbench.cli.commands.sweep import announced, request_from
from fsdpbench.cli.output import make_console, show, show_json, tell
from fsdpbench.cli.requests.options import asks_to_compile, setting_options, space_options, target_options
from fsdpbench.cli.terminal import by_count as counted
from fsdpbench.cli.terminal import units
from fsdpbench.cli.terminal.table import Column, print_table, shared_words
from fsdpbench.cli.values import MOST_JOBS, SectionedCommand, help_all_option, whole
from fsdpbench.launch import fork_server

if TYPE_CHECKING:
    from rich.console import Console

    from fsdpbench.answers.explain import Advice
    from fsdpbench.answers.tune.unit_gain import UnitGain
    from fsdpbench.base.configuration.config import Config
    from fsdpbench.sweep.prediction import Forecast, Prediction

_GIB = 2**30


@click.command("plan", cls=SectionedCommand)
@help_all_option
@click.argument("space", required=False, metavar="[SPACE.toml]")
@target_options
@space_options
@click.option("--jobs", type=whole(most=MOST_JOBS))
@counted.budget_options
@click.option("--no-predict", is_flag=True)
@click.option("--per-unit", is_flag=True)
@setting_options(many=True)
def command(
    space: str | None, assignments: tuple[str, ...], as_json: bool, no_predict: bool, **options: Any
) -> None:
    """Show what a sweep would run, which of it fits, how fast, and the time and disk that it would take.

    \b
    fsdpbench plan --model llama3-8b --gpus 64 --hardware h100-80gb --batch 1,2,4 --wrap block,every-2

    Each point of the space is run once on simulated GPUs, without a trace; real devices are not touched.
    """
    if not no_predict:
        fork_server.start("sim", asks_to_compile(options, assignments, space))
    from fsdpbench.answers.explain.text import as_dict, describe_changes
    from fsdpbench.cli.requests.request import with_fitting_batches
    from fsdpbench.sweep.prediction import best_first, forecast
    from fsdpbench.sweep.trials import jobs_for

    budget = counted.Budget.of(options.pop("tokens"), options.pop("price"), options.pop("gpu_mtbf"))
    request = request_from(space, assignments, options)
    request = request if no_predict else with_fitting_batches(request, options["jobs"], tell)
    budget.check(request.target)
    if options["per_unit"] and (no_predict or request.target.device != "sim"):
        raise UsageError("--per-unit chooses on simulated GPUs: --device sim, without --no-predict")
    plan = announced(request)
    foreseen = advice = None
    if not no_predict:
        jobs = options.get("jobs") or jobs_for("sim")
        foreseen = best_first(forecast(plan.points, jobs, _counter(len(plan.points), jobs)))
        plan.points = [prediction.config for prediction in foreseen.predictions]
        advice = _advice(foreseen, jobs)
    by_count = _by_count(foreseen, budget)
    chooses = foreseen if options["per_unit"] else None
    if as_json:
        content = _as_json(plan.points, plan.notes, foreseen)
        if chooses:
            content["per_unit"] = (found := _by_unit(chooses, jobs)) and found.to_dict()
        remedies = None if advice is None else as_dict(advice)["changes"]
        show_json(content | {"by_gpus": [row.to_dict() for row in by_count], "remedies": remedies})
    else:
        _print(plan.points, plan.notes, foreseen, budget)
        if advice is not None:
            nearest = units.words_of(advice.as_it_is.config)
            show(f"Nothing fits. Of {nearest}:\n{describe_changes(advice)}")
        if len(by_count) > 1:
            counted.print_rows(by_count, budget)
        counted.print_endured(by_count)
        if chooses and (found := _by_unit(chooses, jobs)):
            _print_by_unit(found)
    if foreseen and any(each.status is not None for each in foreseen.that_fit(None)):
        raise click.exceptions.Exit(ExitCode.SOME_FAILED)


def _print_by_unit(found: "UnitGain") -> None:
    """Print the settings chosen per unit, their speed, and the command for the recommended configuration."""
    from fsdpbench.engine.results.provenance import run_command

    best = found.chosen.by_unit
    words = found.words(f", {best.speed:,.0f} {_unit(best.config)}/s/GPU")
    make_console().print(Text(words, style="bold"), soft_wrap=True)
    show(run_command(found.recommended))


def _by_unit(foreseen: "Forecast", jobs: int) -> "UnitGain | None":
    """Choose settings per unit, starting from the predicted points. None, with a message, if nothing fits."""
    from fsdpbench.answers.tune.front import Candidate, Goal, judge
    from fsdpbench.answers.tune.per_unit import NothingFitsError, choose
    from fsdpbench.answers.tune.unit_gain import UnitGain
    from fsdpbench.sweep.prediction import as_simulated
    from fsdpbench.sweep.trials import simulate

    def run(configs: "Sequence[Config]") -> list[Candidate]:
        found = simulate(configs, jobs, lambda _: tell(f"{next(numbers)} simulated by unit"))
        return [judge(each.config, each.result, goal) for each in found]

    numbers = itertools.count(1)
    goal = Goal(f"{_unit(foreseen.predictions[0].config)}_per_s")
    tried = []
    for each in foreseen.predictions:
        config, speed, memory = as_simulated(each.config), each.throughput or 0.0, each.peak_reserved_bytes
        if config is not None and each.status is not None:
            tried.append(Candidate(config, each.status, speed, memory, speed > 0, each.interval, each.risky))
    try:
        fit = [each for each in zip(foreseen.predictions, foreseen.ranks, strict=True) if each[0].fits]
        return UnitGain.of(choose(tried, run, None), _recommended(fit).config if fit else None)
    except NothingFitsError as error:
        tell(str(error))
        return None


def _advice(foreseen: "Forecast", jobs: int) -> "Advice | None":
    """Return changes that make the smallest batch on the most GPUs fit, if no point fits."""
    from fsdpbench.answers.explain import advise
    from fsdpbench.sweep.prediction import as_simulated

    if any(each.fits is not False or each.config.device == "cpu" for each in foreseen.predictions):
        return None
    points = (each.config for each in foreseen.predictions)
    nearest = min(points, key=lambda each: (each.settings.batch, -each.gpus), default=None)
    config = nearest and as_simulated(nearest)
    return None if config is None else advise(config, jobs, tell)


def _by_count(foreseen: "Forecast | None", budget: counted.Budget) -> list[counted.Row]:
    """Return the best configuration for each number of GPUs, among those that fit."""
    predictions = () if foreseen is None else foreseen.predictions
    running = [(p.config, p.throughput) for p in predictions if p.fits and p.throughput]
    return counted.rows_by_count(running, _unit(running[0][0]), budget) if running else []


def _counter(total: int, jobs: int) -> Callable[[int], None]:
    """Return a function that is called with the number of points done, and prints the time left."""
    live, began = sys.stderr.isatty(), time.monotonic()
    shown = {total, *(total * tenth // 10 for tenth in range(1, 10))}
    spared = 0

    def count(done: int) -> None:
        nonlocal spared
        if not spared:
            spared = done or -1
            none = f" ({done} need none: the same as others, or too large by arithmetic)" if done else ""
            tell(f"{total - done} points to simulate, {min(jobs, total - done)} side by side{none}")
        elif live or done in shown:
            rest = (time.monotonic() - began) / max(done - max(spared, 0), 1) * (total - done)
            line = f"simulated {done} of {total}" + f", about {counted.span(rest)} to go" * (done < total)
            tell(f"{line:<48}" if live else line, end="\n" if done == total or not live else "", over=live)

    return count


def _as_json(points: "list[Config]", notes: list[str], foreseen: "Forecast | None") -> dict[str, object]:
    rows: list[dict[str, object]] = []
    for index, config in enumerate(points):
        row: dict[str, object] = {"name": config.name, "config": config.to_dict()}
        if foreseen is not None:
            prediction = foreseen.predictions[index]
            names = ("step_time_s", "peak_reserved_bytes", "alloc_retries_per_step", "risky")
            row["prediction"] = {
                "simulated": True,
                "fits": prediction.fits,
                "reason": prediction.reason,
                **{name: getattr(prediction, name) for name in names},
                "rank": foreseen.ranks[index],
                "interval": msgspec.to_builtins(prediction.interval),
            }
        rows.append(row)
    estimate = foreseen and {"wall_s": round(foreseen.wall_s, 1), "disk_bytes": foreseen.disk_bytes}
    ranks = foreseen.ranks if foreseen is not None else []
    best = [config.name for config, rank in zip(points, ranks, strict=False) if rank == 1]
    measure = best[:3] if len(best) > 1 else []
    return {"schema": 1, "points": rows, "notes": notes, "estimate": estimate, "measure": measure}


def _print(
    points: "list[Config]", notes: list[str], foreseen: "Forecast | None", budget: counted.Budget
) -> None:
    console = make_console()
    if foreseen is None:
        numbers = [str(number) for number in range(1, len(points) + 1)]
        print_table(console, numbers, [units.settings_of(config) for config in points], [])
    else:
        _print_predicted(console, foreseen, budget)
    console.print()
    for note in notes:
        console.print(Text(note))
    how = units.compiled_words(config.settings.compile for config in points)
    console.print(Text(f"{len(points)} configurations, {how}", style="bold"), end="")
    if foreseen is None:
        console.print()
        return
    space = foreseen.disk_bytes
    unknown = f", of {count} it is not known" if (count := len(foreseen.that_fit(None))) else ""
    disk = f"{space / _GIB:.1f} GiB" if space >= _GIB else f"{max(1, space >> 20)} MiB"
    effort = f"a sweep takes about {counted.span(foreseen.wall_s)} and {disk} of disk (simulated)"
    console.print(Text(f", {len(foreseen.that_fit(False))} cannot fit{unknown}; {effort}", style="bold"))
    risky = any(each.risky for each in foreseen.predictions)
    intervals = (each.interval for each in foreseen.predictions)
    for line in units.interval_lines(intervals, shared=units.is_shared(foreseen.ranks), risky=risky):
        console.print(Text(line))


def _print_predicted(console: "Console", foreseen: "Forecast", budget: counted.Budget) -> None:
    ranks = zip(foreseen.predictions, shared_words(foreseen.ranks), strict=True)
    shown = [(found, rank) for found, rank in ranks if found.fits]
    if shown:
        best, worlds = _recommended(shown), [each.config.gpus for each in foreseen.predictions]
        line = f"{units.words_of(best.config, worlds)}; {len(shown)} of {len(foreseen.predictions)} fit"
        console.print(Text(f"Fastest that fits{' (risky)' * best.risky}: {line}", style="bold"))
        figures = _figures([found for found, _ in shown], budget)
        rows = [units.settings_of(found.config) for found, _ in shown]
        print_table(console, [rank for _, rank in shown], rows, figures)
    for line in _unfit_lines(foreseen):
        console.print(Text(line))


def _recommended(shown: "Sequence[tuple[Prediction, object]]") -> "Prediction":
    """Return the fastest configuration without memory risk, if any. Of those that cannot be distinguished,
    prefer torch's, then by `of_equals`. `shown`: configurations that fit, with their ranks, fastest first."""
    from fsdpbench.reports.pages.ranking import of_equals

    best, rank = next((each for each in shown if not each[0].risky), shown[0])
    equal = [found for found, its in shown if its == rank and found.risky == best.risky]
    kept = [found for found in equal if found.config.system.startswith("torch-")] or equal
    fastest = kept[0].throughput
    return min(kept, key=lambda each: of_equals(units.settings_of(each.config), each.throughput, fastest))


def _figures(found: "list[Prediction]", budget: counted.Budget) -> list[Column]:
    """Return columns: throughput, days and cost if requested, step, peak memory, and retries if any."""
    rows = [
        counted.row_of(each.config, each.throughput, budget) if each.throughput else None for each in found
    ]
    unit = f"{_unit(found[0].config)} /s/{units.each(found[0].config.device)}"
    peaks = [f"{(each.peak_reserved_bytes or 0) / _GIB:.1f}{' risky' * each.risky}" for each in found]
    steps = [
        f"{1e3 * (each.step_time_s or 0):,.1f}{units.plus_minus(each.interval, each.step_time_s)}"
        for each in found
    ]
    columns = [Column(unit, [f"{each.throughput:,.0f}" if each.throughput else "-" for each in found])]
    if budget.tokens is not None:
        columns.append(Column("days", [counted.amount(row.days) if row else "-" for row in rows], weight=9))
    if budget.price is not None:
        name = "cost" if budget.tokens is not None else "cost a day"
        columns.append(Column(name, [counted.amount(row.cost) if row else "-" for row in rows], weight=10))
    retries = [f"{each.alloc_retries_per_step or 0:.4g}" for each in found]
    columns += [Column("step, ms", steps, weight=3), Column("peak, GiB", peaks, weight=8)]
    return columns + ([Column("retries", retries, weight=7)] if set(retries) - {"0"} else [])


def _unit(config: "Config") -> str:
    from fsdpbench.sweep.planning import workload_named

    return "samples" if workload_named(config).tokens(1, config.settings.seq) is None else "tokens"


def _unfit_lines(foreseen: "Forecast") -> Iterator[str]:
    """Yield a line per reason why points do not fit or are unknown, and the nearest point that fits."""
    fitting_ones = [each.config for each in foreseen.predictions if each.fits and each.throughput]
    worlds = [each.config.gpus for each in foreseen.predictions]
    kinds: dict[tuple[bool | None, str], list[Prediction]] = {}
    for prediction in (*foreseen.that_fit(False), *foreseen.that_fit(None)):
        reason = ". ".join((prediction.reason or "").split(". ")[:2])
        kinds.setdefault((prediction.fits, re.sub(r"[\d.]+", "#", reason)), []).append(prediction)
    for same in kinds.values():
        first, others = same[0], f" and {len(same) - 1} more" if same[1:] else ""
        reason = ". ".join((first.reason or "").split(". ")[:2])
        word = "cannot fit" if first.fits is False else "not known whether it fits"
        yield f"{word}: {units.words_of(first.config, worlds)}{others}: {reason}"
        if fitting_ones and first.fits is False:
            nearest = min(fitting_ones, key=functools.partial(_distance, first.config))
            yield f"  the nearest that fits: {units.words_of(nearest, worlds)}"


def _distance(one: "Config", other: "Config") -> tuple[int, float]:
    """Return the number of settings that differ, and the ratio of the batches."""
    first, second = units.settings_of(one), units.settings_of(other)
    batches = [one.settings.batch, other.settings.batch]
    return sum(first[name] != second[name] for name in first), max(batches) / min(batches)
