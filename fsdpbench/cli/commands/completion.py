"""`fsdpbench completion`: what a shell reads to complete commands, models, hardware and settings."""

from __future__ import annotations

import os
from pathlib import Path

import click

from fsdpbench.base.errors import UsageError
from fsdpbench.cli.output import show
from fsdpbench.cli.requests.completion import SHELLS, script_for


@click.command("completion")
@click.argument("shell", required=False, type=click.Choice(SHELLS))
@click.pass_context
def command(context: click.Context, shell: str | None) -> None:
    """Print a shell script that completes commands, models, hardware, systems and settings.

    \b
    eval "$(fsdpbench completion)"                                   now, in bash or zsh
    fsdpbench completion fish > ~/.config/fish/completions/fsdpbench.fish
    """
    shell = shell or Path(os.environ.get("SHELL", "")).name
    if shell not in SHELLS:
        raise UsageError(f"for which shell? SHELL says {shell or 'nothing'}; name one of {', '.join(SHELLS)}")
    group = context.parent.command if context.parent is not None else context.command
    assert isinstance(group, click.Group)
    try:
        show(script_for(shell, group))
    except RuntimeError as error:  # a bash that is too old
        raise UsageError(f"completion for {shell}: {error}") from None
