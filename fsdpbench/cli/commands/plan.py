"""`fsdpbench plan`: what a sweep would run, what of it cannot fit, and what it would cost."""

from __future__ import annotations

import re
import sys
import time
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from fsdpbench.cli.commands.sweep import announced, request_from
from fsdpbench.cli.output import make_console, make_table, show_json, tell
from fsdpbench.cli.requests.options import asks_to_compile, setting_options, space_options, target_options
from fsdpbench.cli.terminal.by_count import Budget, Row, budget_options, is_wanted, print_rows, rows_by_count
from fsdpbench.cli.terminal.units import compiled_words, interval_lines, is_shared, plus_minus
from fsdpbench.cli.values import MOST_JOBS, whole
from fsdpbench.launch import fork_server

if TYPE_CHECKING:
    from rich.text import Text

    from fsdpbench.base.configuration.config import Config
    from fsdpbench.sweep.prediction import Forecast, Prediction

_GIB = 2**30


@click.command("plan")
@click.argument("space", required=False, metavar="[SPACE.toml]")
@target_options
@space_options
@click.option("--jobs", type=whole(most=MOST_JOBS), help="Number of configurations to simulate in parallel.")
@budget_options
@click.option("--no-predict", is_flag=True, help="Only list the configurations; predict nothing.")
@setting_options(many=True)
def command(
    space: str | None, assignments: tuple[str, ...], as_json: bool, no_predict: bool, **options: Any
) -> None:
    """Say what a sweep would run, what of it fits and how fast, and the time and disk that it would take.

    \b
    fsdpbench plan --model llama3-8b --gpus 64 --hardware h100-80gb --batch 1,2,4 --wrap block,every-2

    Each point is run once on simulated GPUs, without a trace; real devices are not touched.
    """
    if not no_predict:
        fork_server.start("sim", asks_to_compile(options, assignments, space))
    from fsdpbench.sweep.prediction import best_first, forecast
    from fsdpbench.sweep.trials import jobs_for

    budget = Budget.of(options)
    request = request_from(space, assignments, options)
    budget.check(request.target.workload())
    plan = announced(request)
    foreseen = None
    if not no_predict:
        jobs = options.get("jobs") or jobs_for("sim")
        foreseen = forecast(plan.points, jobs, _counter(len(plan.points), jobs))
        foreseen = best_first(foreseen)
        plan.points = [prediction.config for prediction in foreseen.predictions]
    by_count = _by_count(foreseen, budget)
    if as_json:
        content = _as_json(plan.points, plan.notes, foreseen)
        show_json(content | {"by_gpus": [row.to_dict() for row in by_count]})
        return
    _print(plan.points, plan.notes, foreseen)
    if is_wanted(by_count, budget):
        print_rows(by_count, budget)


def _by_count(foreseen: Forecast | None, budget: Budget) -> list[Row]:
    """Return the best configuration of each number of GPUs, among those that fit."""
    predictions = () if foreseen is None else foreseen.predictions
    running = [(p.config, p.throughput) for p in predictions if p.fits and p.throughput]
    if not running:
        return []
    from fsdpbench.sweep.planning import workload_named

    first = running[0][0]
    unit = "samples" if workload_named(first).tokens(1, first.settings.seq) is None else "tokens"
    return rows_by_count(((config.gpus, config.name, rate) for config, rate in running), unit, budget)


_LINES_OF_PROGRESS = 10
"""Maximum number of progress lines in a file."""


def _counter(total: int, jobs: int) -> Callable[[int], None]:
    """Return a function to call with the number of points done, which prints the time left.

    Its first call has the number of points that need no simulation.
    """
    live = sys.stderr.isatty()
    began, spared, reported_at = time.monotonic(), 0, 0

    def count(done: int) -> None:
        nonlocal spared, reported_at
        if not reported_at:
            reported_at, spared = 1, done
            left = total - done
            text = f"{left} points to simulate, {min(jobs, left)} side by side"
            tell(
                text
                + (f" ({done} need none: the same as others, or too large by arithmetic)" if done else "")
            )
            return
        if live or done == total or done - reported_at >= total / _LINES_OF_PROGRESS or done == spared + 1:
            reported_at = done
            rest = (time.monotonic() - began) / max(done - spared, 1) * (total - done)
            line = f"simulated {done} of {total}" + (
                f", about {_duration(rest)} to go" if done < total else ""
            )
            tell(f"{line:<48}" if live else line, end="\n" if done == total or not live else "", over=live)

    return count


def _as_json(points: list[Config], notes: list[str], foreseen: Forecast | None) -> dict[str, Any]:
    rows: list[dict[str, Any]] = []
    for index, config in enumerate(points):
        row: dict[str, Any] = {"name": config.name, "config": config.to_dict()}
        if foreseen is not None:
            prediction = foreseen.predictions[index]
            row["prediction"] = {
                "simulated": True,
                "fits": prediction.fits if prediction.status is not None else None,
                "reason": prediction.reason,
                "step_time_s": prediction.step_time_s,
                "peak_reserved_bytes": prediction.peak_reserved_bytes,
                "alloc_retries_per_step": prediction.alloc_retries_per_step,
                "risky": prediction.risky,
                "rank": foreseen.ranks[index],
                "interval": prediction.interval,
            }
        rows.append(row)
    estimate = None
    if foreseen is not None:
        estimate = {"wall_s": round(foreseen.wall_s, 1), "disk_bytes": foreseen.disk_bytes}
    return {"schema": 1, "points": rows, "notes": notes, "estimate": estimate}


def _print(points: list[Config], notes: list[str], foreseen: Forecast | None) -> None:
    from rich.text import Text

    console = make_console()
    if foreseen is None:
        console.print(make_table({"configuration": False}, ([config.name] for config in points)))
    else:
        columns = {"configuration": False, "#": True, "predicted peak": True, "predicted step": True}
        shared = Counter(foreseen.ranks)
        rows = (
            [config.name, *_cells(found, rank, shared[rank] > 1)]
            for config, found, rank in zip(points, foreseen.predictions, foreseen.ranks, strict=True)
        )
        console.print(make_table(columns | {"retries": True, "fits": False}, rows))
    console.print()
    how = compiled_words(config.settings.compile for config in points)
    for note in notes:
        console.print(Text(note))
    console.print(Text(f"{len(points)} configurations, {how}", style="bold"), end="")
    if foreseen is None:
        console.print()
        return
    console.print(
        Text(
            f", {len(foreseen.unfit)} cannot fit; about {_duration(foreseen.wall_s)} and "
            f"{_size(foreseen.disk_bytes)} of disk (memory and time predicted on simulated GPUs)",
            style="bold",
        )
    )
    if foreseen.fastest is not None and len(points) > 1:
        console.print(Text(f"Predicted fastest: {foreseen.fastest.config.name}"))
    risky = any(each.risky for each in foreseen.predictions)
    intervals = (each.interval for each in foreseen.predictions)
    for line in interval_lines(intervals, shared=is_shared(foreseen.ranks), risky=risky):
        console.print(Text(line))
    for reason, names in _by_reason(foreseen.unfit).items():
        console.print(Text(f"  {names[0]}{_and_others(len(names) - 1)}: {reason}"))


def _cells(found: Prediction, rank: int | None, shared: bool) -> list[str | Text]:
    """Return what is predicted of one configuration: rank, peak, step, retries, whether it fits."""
    from rich.text import Text

    peak, step, retries = found.peak_reserved_bytes, found.step_time_s, found.alloc_retries_per_step
    fits = _fits(found)
    return [
        "-" if rank is None else f"{rank}{'=' if shared else ''}",
        "-" if peak is None else f"{peak / _GIB:.1f} GiB",
        "-" if step is None else f"{step * 1e3:,.1f} ms{plus_minus(found.interval)}",
        Text("-" if retries is None else f"{retries:.4g}", style="yellow" if retries else ""),
        Text(fits, style="yellow" if fits != "yes" else ""),
    ]


def _fits(found: Prediction) -> str:
    if found.status is None:
        return "unknown"
    return ("risky" if found.risky else "yes") if found.fits else "no"


def _by_reason(unfit: list[Prediction]) -> dict[str, list[str]]:
    """Return names of points that cannot fit by reason (its first two sentences). Reasons that differ only in
    figures are one, with the figures of the first point."""
    kinds: dict[str, tuple[str, list[str]]] = {}
    for prediction in unfit:
        reason = ". ".join((prediction.reason or "").split(". ")[:2])
        _, names = kinds.setdefault(re.sub(r"[\d.]+", "#", reason), (reason, []))
        names.append(prediction.config.name)
    return dict(kinds.values())


def _and_others(count: int) -> str:
    return f" and {count} {'others' if count > 1 else 'other'}" if count else ""


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def _size(count: int) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{max(1, count >> 20)} MiB"
