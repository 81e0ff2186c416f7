"""`fsdpbench upgrade`: one script under two versions of its packages; exit code as the gate's."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fsdpbench.base.errors import UsageError
from fsdpbench.cli.output import show_as, tell
from fsdpbench.cli.values import MOST_SECONDS, Positive, PossiblePath, grouped

if TYPE_CHECKING:
    from fsdpbench.answers.upgrade.environments import Wanted
    from fsdpbench.answers.upgrade.runs import Upgrade

_packages = partial(click.option, metavar="PACKAGE", multiple=True)


def _side(name: str, age: str) -> Any:
    """Return the options of one side."""
    of, path = f"of the {age} side", PossiblePath(dir_okay=False)
    there = f"Interpreter {of}, instead of an environment made by pip."
    return grouped(
        _packages(f"--{name}", name, help=f"Package {of}, such as torch==2.13.0."),
        click.option(f"--{name}-constraints", type=path, metavar="FILE", help=f"Constraints file {of}."),
        click.option(f"--python-{name}", type=path, metavar="PATH", help=there),
    )


@click.command("upgrade")
@click.argument("script", required=False, type=PossiblePath(dir_okay=False))
@click.argument("script_arguments", nargs=-1, type=click.UNPROCESSED)
@click.option("--module", metavar="NAME", help="Run a Python module instead, like `torchrun -m`.")
@_side("from", "older")
@_side("to", "newer")
@_packages("--with", "both", help="Package that the script needs, on both sides.")
@click.option("--gpus", metavar="N", help="Number of simulated GPUs (default 8).")
@click.option("--hardware", help="Hardware profile (default: that of `run`).")
@click.option("--bisect", is_flag=True, help="If worse, find the packages that cause it.")
@click.option("--thresholds", type=PossiblePath(), help="TOML file with the changes that are allowed.")
@click.option("--timeout", type=Positive(MOST_SECONDS), default=600.0, help="Seconds for each run (600).")
@click.option("--cache", type=PossiblePath(), help="Folder of environments (in ~/.cache/fsdpbench).")
@click.option("--keep", type=PossiblePath(), help="Keep the run folders, as `from` and `to` in this folder.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(as_json: bool, keep: Path | None, **options: Any) -> None:
    """Say whether a script may be upgraded: it runs under both versions, on the same simulated GPUs.

    \b
    fsdpbench upgrade train.py --from torch==2.11.0 --to torch==2.13.0 -- 8b.toml
    fsdpbench upgrade train.py --python-from old/bin/python --python-to new/bin/python

    Packages are written as for pip and may be repeated. pip installs each side once, in --cache. Exit code 0:
    nothing is worse, 1: worse, 3: cannot be compared.
    """
    from fsdpbench.cli.commands.check import finish
    from fsdpbench.sweep.trials import thrown_away

    with thrown_away("upgrade") as temporary:
        found = _compared(temporary, keep or temporary / "runs", options)
    show_as(found.to_dict(), found.as_text(), as_json=as_json, indent=1)
    finish(found.comparison, {}, "")


def _compared(sources: Path, runs: Path, options: dict[str, Any]) -> Upgrade:
    """Run the script on both sides and compare. Raises `BenchError`."""
    from fsdpbench.answers.check.thresholds import read_thresholds
    from fsdpbench.answers.upgrade.environments import Cache, normalized
    from fsdpbench.answers.upgrade.runs import Program, Upgrade, bisect, compared
    from fsdpbench.cli.requests.script_request import script_config

    script, module, arguments = options["script"], options["module"], options["script_arguments"]
    if script is None and module is None:
        raise UsageError("which script? fsdpbench upgrade train.py --from torch==2.11.0 --to torch==2.13.0")
    # What `run` would refuse is refused before anything is installed; a module is looked for there.
    config = script_config({**options, "script": Path(__file__) if module else script, "module": None}, ())
    assert config is not None
    words = ("--module", module) if module else ("--script", str(script))
    words = (*words, "--gpus", str(config.gpus), "--hardware", str(config.hardware))
    given = (str(script), *arguments) if module and script else arguments  # all that follows `--`
    program = Program(words, given, options["timeout"], sources, tell)
    thresholds, wanted = read_thresholds(options["thresholds"]), list(_wanted(options))
    cache = Cache(options["cache"] or Path("~/.cache/fsdpbench/environments").expanduser(), tell)
    before, after = (cache.environment(each) for each in wanted)
    first, second = program.run(before, runs / "from", "from"), program.run(after, runs / "to", "to")
    comparison, tried = compared(first, second, thresholds), None
    if options["bisect"] and comparison.regressions:
        judge = partial(compared, first, thresholds=thresholds)
        named = {normalized(each) for side in wanted for each in side.requirements}
        tried = list(bisect(cache, program, (before, after), judge, runs, named))
    pythons = " and ".join(dict.fromkeys((before.version, after.version)))
    said = f"{words[1]} on {config.gpus} simulated {config.hardware}, Python {pythons}"
    return Upgrade(said, (before, after), (first, second), comparison, tried)


def _wanted(options: dict[str, Any]) -> Iterator[Wanted]:
    """Yield the environment of each side. Raises `UsageError` for one that is missing, or asked for twice."""
    from fsdpbench.answers.upgrade.environments import Wanted

    for side in ("from", "to"):
        asked, file, python = (options[name] for name in (side, f"{side}_constraints", f"python_{side}"))
        if bool(python) == bool(asked or file):
            raise UsageError(f"--{side} torch==2.13.0 or --python-{side} PATH: give one of them")
        yield Wanted(side, () if python else (*asked, *options["both"]), file, python)
