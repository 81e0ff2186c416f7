"""`fsdpbench completion`, and the values that shell completion proposes for options."""

import os
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import click
from click.shell_completion import CompletionItem, get_completion_class

import fsdpbench
from fsdpbench.base.errors import UsageError
from fsdpbench.base.settings import SETTINGS
from fsdpbench.cli.output import show

COMPLETE_VARIABLE = "_FSDPBENCH_COMPLETE"
"""The environment variable with which the shell requests completions."""
PROGRAM = "fsdpbench"
SHELLS = ("bash", "zsh", "fish")
Proposals = Callable[[click.Context, click.Parameter, str], list[CompletionItem]]


def answer(group: click.Group) -> int:
    """Print the completions that `COMPLETE_VARIABLE` requests, and return the exit code."""
    shell, _, instruction = os.environ.get(COMPLETE_VARIABLE, "").partition("_")
    kind = get_completion_class(shell)
    if kind is None or instruction != "complete":
        return 1
    show(kind(group, {}, PROGRAM, COMPLETE_VARIABLE).complete())
    return 0


def proposals(names: Callable[[], Iterable[str]]) -> Proposals:
    """Return a completer for comma-separated names; it completes the last one."""

    def propose(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
        before, comma, last = incomplete.rpartition(",")
        return [CompletionItem(before + comma + name) for name in names() if name.startswith(last)]

    return propose


def assignments(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Return completions of `--set KEY=VALUE`: setting names, and after `=` comma-separated values."""
    setting, equals, value = incomplete.partition("=")
    if not equals:
        return [CompletionItem(f"{name}=") for name in SETTINGS if name.startswith(setting)]
    if setting not in SETTINGS:
        return []
    proposed = proposals(values_of(setting))(context, parameter, value)
    return [CompletionItem(f"{setting}={item.value}") for item in proposed]


def _listed(what: str) -> list[str]:
    """Return the names of models or systems, including those of plugins."""
    from fsdpbench.sweep import catalogue

    return [str(row["name"]) for row in getattr(catalogue, what)()]


model_names = partial(_listed, "models")
system_names = partial(_listed, "systems")


def profile_names(folder: str) -> list[str]:
    """Return the names of the packaged profiles in a folder of `sim`, without torch."""
    return sorted(path.stem for path in Path(fsdpbench.__file__).parent.glob(f"sim/{folder}/*.toml"))


hardware_names = partial(profile_names, "profiles")
software_names = partial(profile_names, "profiles/software")


def values_of(setting: str) -> Callable[[], list[str]]:
    """Return a function that lists the words that `setting` accepts."""

    return lambda: SETTINGS[setting].words


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
    kind = get_completion_class(shell)
    assert kind is not None
    try:
        show(kind(group, {}, PROGRAM, COMPLETE_VARIABLE).source())
    except RuntimeError as error:  # this bash is too old
        raise UsageError(f"completion for {shell}: {error}") from None
