"""`fsdpbench tune`: search a space for its best configurations."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.text import Text

from fsdpbench.base.errors import UsageError, error_text
from fsdpbench.base.files.documents import read_json_object
from fsdpbench.base.numbers import with_unit
from fsdpbench.cli import values as kinds
from fsdpbench.cli.commands.sweep import announced, default_name, device_named, request_from
from fsdpbench.cli.output import make_console, show_json, tell
from fsdpbench.cli.requests import options as common
from fsdpbench.cli.terminal import units
from fsdpbench.cli.terminal.table import Column, print_table, shared_words
from fsdpbench.launch import fork_server

if TYPE_CHECKING:
    from fsdpbench.answers.tune.front import Goal
    from fsdpbench.answers.tune.run import Answer, Effort
    from fsdpbench.sweep.planning import Target

_UNITS = {"": 1, "gb": 10**9, "gib": 2**30, "mb": 10**6, "mib": 2**20}


@click.command("tune", cls=kinds.SectionedCommand)
@kinds.help_all_option
@click.argument("space", required=False, metavar="[SPACE.toml]")
@common.target_options
@common.space_options
@click.option("--for", "goal")
@click.option("--memory")
@click.option("--trials", type=kinds.whole(most=1_000_000), default=160)
@click.option("--seed-search", type=kinds.whole(0, 2**32 - 1), default=0)
@click.option("--finalists", type=kinds.whole(most=kinds.MOST_RUNS), default=8)
@click.option("--real-runs", type=kinds.whole(most=kinds.MOST_RUNS))
@click.option("--real-time", type=kinds.Positive(kinds.MOST_SECONDS // 60))
@click.option("--repeat", type=kinds.whole(most=kinds.MOST_RUNS), default=1)
@click.option("--per-unit", is_flag=True)
@click.option("-o", "--output", type=kinds.PossiblePath())
@common.setting_options(many=True)
def command(space: str | None, assignments: tuple[str, ...], as_json: bool, **options: Any) -> None:
    """Search settings for the fastest configurations at each memory size.

    \b
    fsdpbench tune --model gpt-2.8b --gpus 8 --preset wide

    The search runs on simulated GPUs. If real devices were asked for, the best configurations are then
    measured; with --real-runs or --real-time the search continues there, guided by the simulated ranking. The
    output folder holds the best trade-offs of throughput and memory, the best configuration as TOML, and code
    for each FSDP API.
    """
    fork_server.start(
        device_named(options["device"], space), common.asks_to_compile(options, assignments, space)
    )
    from fsdpbench.answers.tune.front import Goal, figure_of
    from fsdpbench.answers.tune.run import Effort, tune
    from fsdpbench.cli.terminal.progress import make_progress
    from fsdpbench.engine.results.store import REPORT_FILE, Store, disk_errors
    from fsdpbench.reports.pages import write_report
    from fsdpbench.sweep.snippets import without_code

    named, memory = options.pop("goal"), parse_memory(options.pop("memory"))
    varied = any(len(values) > 1 for values in common.given_settings(options, assignments).values())
    if space is None and not options.get("preset") and not varied:
        options["preset"] = "wide"
    effort = Effort(
        trials=options["trials"],
        finalists=options["finalists"],
        real_runs=options["real_runs"],
        real_seconds=None if options["real_time"] is None else 60 * options["real_time"],
        repeat=options["repeat"],
        per_unit=options["per_unit"],
    )
    request = request_from(space, assignments, options)
    goal = Goal(_goal(named, request.target), memory)
    figure_of(goal.name)
    _check_device(request.target.device, goal, effort)
    plan = announced(request)
    folder = options.get("output") or Path("runs") / f"tune-{default_name(request)}"
    store = Store.open_or_create(folder)
    with store.locked():
        answer = tune(
            store,
            request.to_space(),
            plan.points,
            goal,
            effort,
            seed=options["seed_search"],
            progress=make_progress(),
            tell=_tell,
        )
        with disk_errors(folder):
            write_report(folder, folder / REPORT_FILE)
    if as_json:
        record = read_json_object(folder / "tune.json")
        beside = {"points": len(plan.points), "folder": str(folder), "no_code": without_code(answer.best)}
        show_json({**record, **beside})
    else:
        _print(answer, goal, folder, len(plan.points))


def parse_memory(text: str | None) -> int | None:
    """Return the bytes in `80GB`, `40 GiB`, `8e10`. Raises `UsageError`."""
    if text is None:
        return None
    try:
        size = with_unit(text, _UNITS)
    except ValueError:
        raise UsageError(f"--memory {text!r}: write a size, as in 80GB or 40GiB") from None
    if size < 1 << 20:
        raise UsageError(f"--memory {text!r}: {size:,} bytes; write a size with its unit, such as 80GB")
    return size


def _goal(named: str | None, target: "Target") -> str:
    """Return the goal: as named, else tokens, or samples if the model has no tokens. Raises `UsageError`."""
    if target.workload().tokens(1) is not None:
        return named or "tokens_per_s"
    if named == "tokens_per_s":
        raise UsageError(f"--for {named}: {target.model} does not work on tokens; --for samples_per_s")
    return named or "samples_per_s"


def _check_device(device: str, goal: "Goal", effort: "Effort") -> None:
    """Raise `UsageError` for a goal or a limit that does not apply to `device`."""
    if device == "cpu" and goal.name == "mfu":
        raise UsageError("--for mfu: a CPU's peak is not known; --for tokens_per_s or samples_per_s")
    if device != "sim" and effort.per_unit:
        raise UsageError(error_text("tune.per_unit_device", device))
    if device != "sim":
        return
    given = (effort.real_runs, effort.real_seconds, None if effort.repeat == 1 else effort.repeat)
    for flag, value in zip(("--real-runs", "--real-time", "--repeat"), given, strict=True):
        if value is not None:
            raise UsageError(f"{flag} belongs to real devices (--device cuda or cpu), not to simulated GPUs")


def _tell(line: str) -> None:
    live = sys.stderr.isatty()
    tell(line, end=" " if live else "\n", over=live)


def _print(answer: "Answer", goal: "Goal", folder: Path, points: int) -> None:
    from fsdpbench.answers.tune.front import figure_of, ranks
    from fsdpbench.reports.pages.display import number
    from fsdpbench.sweep.snippets import without_code

    console = make_console()
    if console.is_terminal:
        tell("")
    device = answer.front[0].config.device
    places = ranks(answer.front)
    rows = [units.settings_of(candidate.config) for candidate in answer.front]
    figure = figure_of(goal.name)
    errors = [units.plus_minus(each.interval, each.speed, figure) for each in answer.front]
    speeds = [number(each.speed, 4) + error for each, error in zip(answer.front, errors, strict=True)]
    figures = [Column(units.goal_unit(goal.name, device).replace("/", " /", 1), speeds)]
    if any(candidate.memory is not None for candidate in answer.front):
        memory = [f"{(each.memory or 0) / 2**30:.1f}{' risky' * each.risky}" for each in answer.front]
        figures.append(Column("peak, GiB", memory))
    print_table(console, shared_words(places), rows, figures)
    risky = any(each.risky for each in answer.front)
    for line in units.interval_lines(
        (each.interval for each in answer.front), shared=units.is_shared(places), risky=risky
    ):
        console.print(Text(line))
    console.print()
    best = answer.best
    simulated = f"Simulated on {best.hardware}: " if device == "sim" else ""
    how = units.compiled_words([best.settings.compile])
    console.print(Text(f"{simulated}best is {units.words_of(best)}, {how}", style="bold"))
    if answer.per_unit is not None:
        console.print(Text(answer.per_unit.words()))
    console.print(_tried(answer, points), highlight=False)
    # Each path on its own line, never folded, so that it can be copied.
    files = {"best": "best.toml", "as code": "best_*.py", "by unit": "per_unit.svg", "report": "report.html"}
    for what, where in files.items():
        if any(folder.glob(where)):  # code is written only for systems with an API
            console.print(f"  {what:<8} {folder / where}", highlight=False, soft_wrap=True)
    if why := without_code(best):
        console.print(f"  no code  {why}", highlight=False, soft_wrap=True)


def _tried(answer: "Answer", points: int) -> str:
    """Return a sentence with the numbers of simulated and measured configurations."""
    text = f"{answer.tried} of {points} configurations were simulated, {answer.feasible} of them fit"
    if not answer.measured:
        return f"{text}."
    text += f"; {answer.measured} were measured"
    if answer.agreement is not None:
        text += f" (rank correlation of simulated and measured speed: {answer.agreement:.2f})"
    return f"{text}."
