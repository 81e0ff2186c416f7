"""`fsdpbench prove`: whether a training script may have its GPUs, with an exit code for CI."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import click
import msgspec

from fsdpbench.answers.prove.verdict import Part
from fsdpbench.base.errors import UsageError, unknown
from fsdpbench.base.numbers import whole_number
from fsdpbench.base.writing import write_whole
from fsdpbench.cli.output import show, show_json, tell
from fsdpbench.cli.values import MOST_SECONDS, PlaceForFile, Positive, PossiblePath
from fsdpbench.launch import fork_server

_MOST_RANKS = 16


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
@click.option("--resume-with", default="", metavar="ARGUMENTS")
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
    if module is not None and script is not None:  # what follows `--` is all the module's
        arguments, script = (str(script), *arguments), None
    asked = {"script": script, "module": module, "script_arguments": arguments}
    config = script_config(options | asked, ())
    assert config is not None
    try:
        resume_with = tuple(shlex.split(options["resume_with"]))
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
    """Return the parts in `--only`, all without it. Raises `UsageError` for an unknown one."""
    known = [part.value for part in Part]
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in known:
            raise unknown("part", name, known, "fsdpbench prove --help")
    return frozenset(map(Part, names or known))


def _ranks(text: str) -> tuple[int, ...]:
    """Return the numbers of real ranks. Raises `UsageError` for a bad one."""
    try:
        return tuple(whole_number(each, 2, _MOST_RANKS) for each in text.split(","))
    except ValueError as error:
        raise UsageError(f"--ranks {text}: {error}; numbers of CPU ranks, such as 4,2") from None
