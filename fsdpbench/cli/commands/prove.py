"""`fsdpbench prove`: check a training script before it gets GPUs, with an exit code for CI. `upgrade`:
compare a script under two versions of its packages, with the gate's exit codes."""

import shlex
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from fsdpbench.answers.prove.verdict import Part
from fsdpbench.base.errors import UsageError, unknown
from fsdpbench.base.numbers import whole_number
from fsdpbench.base.writing import write_whole
from fsdpbench.cli.output import show, show_as, show_json, tell
from fsdpbench.cli.values import MOST_SECONDS, PlaceForFile, Positive, PossiblePath, grouped
from fsdpbench.launch import fork_server

if TYPE_CHECKING:
    from fsdpbench.answers.upgrade.environments import Wanted
    from fsdpbench.answers.upgrade.runs import Upgrade

_packages = partial(click.option, metavar="PACKAGE", multiple=True)


@click.command("prove")
@click.argument("script", required=False, type=PossiblePath(dir_okay=False))
@click.argument("script_arguments", nargs=-1, type=click.UNPROCESSED)
@click.option("--module", metavar="NAME")
@click.option("--gpus", metavar="N")
@click.option("--hardware")
@click.option("--only", metavar="PARTS")
@click.option("--ranks", default="4,2", metavar="N,M")
@click.option("--baseline", type=PossiblePath())
@click.option("--thresholds", type=PossiblePath())
@click.option("--resume-with", metavar="ARGUMENTS")
@click.option("--timeout", type=Positive(MOST_SECONDS), default=120.0)
@click.option("--to-the-end", is_flag=True)
@click.option("--junit", type=PlaceForFile())
@click.option("-o", "--output", type=PlaceForFile(), metavar="FILE.html")
@click.option("--format", "form", type=click.Choice(["text", "md", "json"]), default="text")
@click.option("--json", "form", flag_value="json")
def command(script: Path | None, module: str | None, form: str, junit: Path | None, **options: Any) -> None:
    """Prove that a training script is right before it gets GPUs: exit 0 proved, 1 a finding, 3 unknown.

    \b
    fsdpbench prove train.py --gpus 64 --hardware h100-80gb -- 8b.toml
    fsdpbench prove train.py --only gradients
    """
    if script is None and module is None:
        raise UsageError("which script? fsdpbench prove train.py -- ARGUMENTS")
    parts, ranks = _parts(options["only"] or ""), _ranks(options["ranks"])
    fork_server.start("auto")
    from fsdpbench.answers.check.thresholds import read_thresholds
    from fsdpbench.answers.prove.parts import Request, prove
    from fsdpbench.answers.prove.verdict import write_page
    from fsdpbench.cli.requests.script_request import script_config

    arguments = options["script_arguments"]
    if module is not None and script is not None:  # all words after `--` are the module's
        arguments, script = (str(script), *arguments), None
    asked = {"script": script, "module": module, "script_arguments": arguments}
    config = script_config(options | asked, ())
    assert config is not None
    try:
        resume_with = tuple(shlex.split(options["resume_with"] or ""))
    except ValueError as error:
        raise UsageError(f"--resume-with {options['resume_with']!r}: {error}") from None
    thresholds, baseline = read_thresholds(options["thresholds"]), options["baseline"]
    proof = prove(Request(config, parts, ranks, resume_with, baseline, thresholds, options["timeout"], tell))
    if junit is not None:
        write_whole(junit, proof.as_junit())
    if options["output"] is not None:
        write_page(options["output"], proof)
    if form == "json":
        show_json(msgspec.to_builtins(proof), indent=1)
    else:
        show(proof.as_markdown() if form == "md" else proof.as_text())
    raise click.exceptions.Exit(int(proof.exit_code))


def _parts(text: str) -> frozenset[Part]:
    """Return the parts in `--only`, by default all. Raises `UsageError` for an unknown part."""
    known = [part.value for part in Part]
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in known:
            raise unknown("part", name, known, "fsdpbench prove --help")
    return frozenset(map(Part, names or known))


def _ranks(text: str) -> tuple[int, ...]:
    """Return the numbers of real ranks. Raises `UsageError` for an invalid one."""
    from fsdpbench.answers.prove.real_runs import MOST_RANKS

    try:
        return tuple(whole_number(each, 2, MOST_RANKS) for each in text.split(","))
    except ValueError as error:
        raise UsageError(f"--ranks {text}: {error}; numbers of CPU ranks, such as 4,2") from None


def _side(name: str, age: str) -> Any:
    """Return the options of the older or newer side."""
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
def upgrade_command(as_json: bool, keep: Path | None, **options: Any) -> None:
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


def _compared(sources: Path, runs: Path, options: dict[str, Any]) -> "Upgrade":
    """Run the script on both sides and compare the results. Raises `BenchError`."""
    from fsdpbench.answers.check.thresholds import read_thresholds
    from fsdpbench.answers.upgrade.environments import Cache, normalized
    from fsdpbench.answers.upgrade.runs import Program, Upgrade, bisect, compared
    from fsdpbench.cli.requests.script_request import script_config

    script, module, arguments = options["script"], options["module"], options["script_arguments"]
    if script is None and module is None:
        raise UsageError("which script? fsdpbench upgrade train.py --from torch==2.11.0 --to torch==2.13.0")
    # Check everything that `run` would refuse before pip installs anything; `run` itself looks for a module.
    config = script_config({**options, "script": Path(__file__) if module else script, "module": None}, ())
    assert config is not None
    words = ("--module", module) if module else ("--script", str(script))
    words = (*words, "--gpus", str(config.gpus), "--hardware", str(config.hardware))
    given = (str(script), *arguments) if module and script else arguments  # all words after `--`
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


def _wanted(options: dict[str, Any]) -> "Iterator[Wanted]":
    """Yield the environment of each side. Raises `UsageError` if one is missing or given twice."""
    from fsdpbench.answers.upgrade.environments import Wanted

    for side in ("from", "to"):
        asked, file, python = (options[name] for name in (side, f"{side}_constraints", f"python_{side}"))
        if bool(python) == bool(asked or file):
            raise UsageError(f"--{side} torch==2.13.0 or --python-{side} PATH: give one of them")
        yield Wanted(side, () if python else (*asked, *options["both"]), file, python)
