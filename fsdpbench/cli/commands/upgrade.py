"""`fsdpbench upgrade`: one script under two versions of its packages; exit code as the gate's."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fsdpbench.base.errors import UsageError, written
from fsdpbench.cli.output import show, show_json, tell
from fsdpbench.cli.values import (
    MOST_SECONDS,
    PlaceForFile,
    Positive,
    PossiblePath,
    SectionedCommand,
    grouped,
    help_all_option,
)

if TYPE_CHECKING:
    from fsdpbench.answers.upgrade.environments import Cache
    from fsdpbench.answers.upgrade.report import Upgrade
    from fsdpbench.answers.upgrade.runs import Program


def _sides(side: str, age: str) -> Any:
    """Return the options of one side."""
    return grouped(
        click.option(
            f"--{side}", f"{side}_packages", metavar="PACKAGE", multiple=True,
            help=f"Package of the {age} side as for pip, such as torch==2.13.0; may be repeated.",
        ),
        click.option(
            f"--{side}-constraints", type=PossiblePath(dir_okay=False), metavar="FILE",
            help=f"Constraints file of pip for the {age} side.",
        ),
        click.option(
            f"--python-{side}", type=PossiblePath(dir_okay=False), metavar="PATH",
            help=f"Interpreter of an environment that is there, for the {age} side.",
        ),
    )  # fmt: skip


@click.command("upgrade", cls=SectionedCommand)
@help_all_option
@click.argument("script", required=False, type=PossiblePath(dir_okay=False))
@click.argument("script_arguments", nargs=-1, type=click.UNPROCESSED)
@click.option("--module", metavar="NAME", help="Run a Python module instead, like `torchrun -m`.")
@_sides("from", "older")
@_sides("to", "newer")
@click.option(
    "--with",
    "packages",
    metavar="PACKAGE",
    multiple=True,
    help="Package that the script needs on both sides.",
)
@click.option("--gpus", metavar="N", help="Number of simulated GPUs (default 8).")
@click.option("--hardware", help="Hardware profile (default: that of `run`).")
@click.option("--bisect", is_flag=True, help="If worse, find which package is the cause.")
@click.option("--thresholds", type=PossiblePath(), help="TOML file with the changes that are allowed.")
@click.option("--timeout", type=Positive(MOST_SECONDS), default=600.0, help="Seconds for each run (600).")
@click.option(
    "--cache", type=PossiblePath(), help="Folder of environments (~/.cache/fsdpbench/environments)."
)
@click.option("--keep", type=PossiblePath(), help="Folder to keep the runs in, which must be new or empty.")
@click.option("-o", "--output", type=PlaceForFile(), help="Write a page with both sides.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(as_json: bool, output: Path | None, keep: Path | None, **options: Any) -> None:
    """Say whether a script may be upgraded: it runs under both versions, on the same simulated GPUs.

    \b
    fsdpbench upgrade train.py --from torch==2.11.0 --to torch==2.13.0 -- --batch 8
    fsdpbench upgrade train.py --python-from old/bin/python --python-to new/bin/python

    Exit code 0 nothing is worse, 1 worse, 3 cannot be compared.
    """
    if options["script"] is None and options["module"] is None:
        raise UsageError("which script? fsdpbench upgrade train.py --from torch==2.11.0 --to torch==2.13.0")
    from fsdpbench.answers.upgrade.environments import Cache, default_folder
    from fsdpbench.answers.upgrade.runs import Program
    from fsdpbench.cli.commands.check import end
    from fsdpbench.sweep.trials import thrown_away

    cache = Cache(options["cache"] or default_folder(), tell)
    if keep is not None and keep.exists() and (not keep.is_dir() or any(keep.iterdir())):
        raise UsageError(f"--keep {keep}: is there already; name a new folder")
    with thrown_away("upgrade") as temporary:
        program = Program(*_words(options), options["timeout"], temporary)
        runs = keep or temporary / "runs"
        found = _compared(cache, program, runs, options)
        if output is not None:
            from fsdpbench.reports.pages.runs_page import write_runs_page

            with written(output):
                write_runs_page((runs / "from", runs / "to"), output)
            tell(f"wrote {output}")
    if as_json:
        show_json(found.to_dict(), indent=1)
    else:
        show(found.as_text())
    end(found.comparison)


def _words(options: dict[str, Any]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the words of `fsdpbench run` and those of the script. Raises `UsageError` for what `run` refuses
    everywhere: before anything is installed."""
    from fsdpbench.cli.requests.script_request import script_config

    script, arguments = options["script"], options["script_arguments"]
    if options["module"] is not None and script is not None:  # what follows `--` is all the module's
        arguments, script = (str(script), *arguments), None
    # A module is looked for in the environments.
    checked = script_config({**options, "script": script or Path(__file__), "module": None}, ())
    assert checked is not None
    source = ("--module", options["module"]) if script is None else ("--script", str(script))
    return (*source, "--gpus", str(checked.gpus), "--hardware", str(checked.hardware)), arguments


def _compared(cache: Cache, program: Program, runs: Path, options: dict[str, Any]) -> Upgrade:
    """Run the script on both sides and compare. Raises `BenchError`."""
    from fsdpbench.answers.check.thresholds import read_thresholds
    from fsdpbench.answers.upgrade.bisection import Bisection
    from fsdpbench.answers.upgrade.differences import compared, differences
    from fsdpbench.answers.upgrade.environments import Wanted, check_requirement, differing, normalized
    from fsdpbench.answers.upgrade.report import Upgrade

    thresholds = read_thresholds(options["thresholds"])
    wanted = []
    for side in ("from", "to"):
        given = {"--" + side: options[f"{side}_packages"], "--with": options["packages"]}
        asked = tuple(check_requirement(each, name) for name, texts in given.items() for each in texts)
        files = options[f"{side}_constraints"], options[f"python_{side}"]
        if files[1] is None and not (options[f"{side}_packages"] or files[0]):
            raise UsageError(f"--{side} is missing: a package such as torch==2.13.0, or --python-{side} PATH")
        if files[1] is not None and (asked or files[0]):
            raise UsageError(
                f"--python-{side} is used as it is: leave out its --{side}, --with and constraints"
            )
        wanted.append(Wanted(side, asked, *files))
    before, after = (cache.environment(each) for each in wanted)
    first, second = (
        program.run(each, runs / side, side, tell) for each, side in ((before, "from"), (after, "to"))
    )
    comparison, bisection = compared(first, second, thresholds), None
    if options["bisect"] and comparison.regressions:
        judge = partial(compared, first, thresholds=thresholds)
        named = {normalized(each) for side in wanted for each in side.requirements}
        bisection = Bisection(cache, program, before, after, judge, runs).search(sorted(named))
    return Upgrade(
        str(options["script"] or options["module"]), int(program.words[3]), program.words[5], before, after,
        differing(before, after), comparison, differences(first, second), bisection,
    )  # fmt: skip
