"""`fsdpbench mcp`: the commands as tools for agents, over standard input and output; and the skills."""

import os
from pathlib import Path

import click

from fsdpbench.base.errors import UsageError, written
from fsdpbench.base.files.documents import table_beside
from fsdpbench.base.reading import read_text
from fsdpbench.base.writing import write_whole
from fsdpbench.cli import agents
from fsdpbench.cli.output import tell
from fsdpbench.cli.values import MOST_SECONDS, Positive, PossiblePath

_SKILLS = {path.stem: path for path in sorted(Path(agents.__file__).with_name("skills").glob("*.md"))}
"""Of a link to docs/skills; an installed package has a folder of that name."""

_INSTRUCTIONS = str(table_beside(__file__, "mcp.toml")["instructions"])


@click.command("mcp")
@click.option(
    "--most-seconds",
    type=Positive(MOST_SECONDS),
    default=3600.0,
    help="Time limit of a call (3600); what waits longer is ended.",
)
@click.option("--skills", type=PossiblePath(), metavar="FOLDER", help="Only write the skills into FOLDER.")
def command(most_seconds: float, skills: Path | None) -> None:
    """Serve plan, run, explain, analyze, prove, compare and expect to an agent (Model Context Protocol).

    \b
    fsdpbench mcp

    The agent's program starts it in the folder that it may use. It needs the extra `mcp`.
    """
    if skills is not None:
        for name, path in _SKILLS.items():
            place = skills / name / "SKILL.md"
            with written(place):
                place.parent.mkdir(parents=True, exist_ok=True)
                write_whole(place, read_text(path))
            tell(f"wrote {place}")
        return
    try:
        from fsdpbench.cli.agents.server import serve
    except ModuleNotFoundError as error:
        raise UsageError(f"fsdpbench mcp needs {error.name}: pip install 'fsdpbench[mcp]'") from None
    found = {}
    for name, path in _SKILLS.items():
        _, head, text = read_text(path).split("---\n", 2)
        found[name] = head.partition("description: ")[2].strip(), text
    serve(os.path.realpath(os.curdir), most_seconds, found, _INSTRUCTIONS)
