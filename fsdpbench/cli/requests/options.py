"""Options that several commands share: where to run, and one flag per setting."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click

from fsdpbench.base.errors import UsageError
from fsdpbench.base.reading import read_toml
from fsdpbench.base.settings import SETTINGS, TRUE_WORDS, Value, read_list, setting_named
from fsdpbench.cli.requests import completion
from fsdpbench.cli.requests.completion import assignments
from fsdpbench.cli.values import MOST_SECONDS, F, Positive, grouped, whole
from fsdpbench.sweep.spaces.space_file import read_space

sanitize_option = click.option("--sanitize", is_flag=True, default=None)

target_options = grouped(
    click.option("--model", shell_complete=completion.proposals(completion.model_names)),
    click.option("--hf-config", metavar="PATH"),
    click.option("--shape"),
    click.option("--system", shell_complete=completion.proposals(completion.system_names)),
    click.option("--device", default=None),
    click.option("--hardware", shell_complete=completion.proposals(completion.hardware_names)),
    click.option("--nic-gb-s", type=Positive(1e6), default=None, metavar="GB/S"),
    click.option("--software", shell_complete=completion.proposals(completion.software_names)),
    click.option("--gpus", default=None),
    click.option("--gpus-per-node", type=whole()),
    click.option("--gpus-used-per-node", type=whole()),
    click.option("--data"),
    click.option("--timeout", type=Positive(MOST_SECONDS), default=None),
    click.option("--json", "as_json", is_flag=True),
)
"""`--model`, `--gpus`, `--device`, ...: the model, and the ranks that run it."""


space_options = grouped(
    click.option("--preset"),
    click.option("--when", multiple=True, metavar="'A=V => B=V,V'"),
    click.option("--exclude", multiple=True, metavar="'A=V B=V'"),
    click.option("--reference"),
    click.option("--max-points", type=whole()),
    click.option("--sample-seed", type=whole(0)),
)
"""`--preset`, `--when`, `--exclude`, `--max-points`, `--sample-seed`: the combinations to run."""


def setting_options(many: bool) -> Callable[[F], F]:
    """Return a decorator that adds a flag for every setting (a list if `many`), and `--set key=value`."""

    def decorate(function: F) -> F:
        for setting in reversed(SETTINGS.values()):
            function = click.option(
                setting.flag,
                setting.name,
                default=None,
                metavar="V,V" if many else "V",
                shell_complete=completion.proposals(completion.values_of(setting.name)),
                help=setting.help(many),
            )(function)
        return click.option(
            "--set", "assignments", multiple=True, metavar="KEY=VALUE", shell_complete=assignments
        )(function)

    return decorate


def given_settings(flags: Mapping[str, str | None], assignments: tuple[str, ...]) -> dict[str, list[Value]]:
    """Return the values of each setting in `flags` or `assignments` (key=value). Raises `UsageError`."""
    texts = {name: flags[name] for name in SETTINGS if flags.get(name) is not None}
    for assignment in assignments:
        name, equals, value = assignment.partition("=")
        if not equals:
            raise UsageError(f"--set {assignment!r}: write it as key=value, as in seq=4096")
        texts[setting_named(name.strip()).name] = value
    return {name: read_list(name, text) for name, text in texts.items()}


def asks_to_compile(
    flags: Mapping[str, str | None], assignments: tuple[str, ...], space: str | None = None
) -> bool:
    """Return whether flags, assignments or the TOML file `space` set `compile=true`, for the fork server.
    Errors in them are reported later."""
    texts = [flags.get("compile") or "", *(each for each in assignments if each.startswith("compile"))]
    if space is not None:
        texts += map(str, read_space_file(space)[1].get("compile", ()))
    words = {word.strip() for text in texts for word in text.lower().replace("=", ",").split(",")}
    return not words.isdisjoint(TRUE_WORDS)


def single_settings(given: Mapping[str, list[Value]]) -> dict[str, Value]:
    """Return the one value of each setting, for `run`. Raises `UsageError` for a list."""
    for name, values in given.items():
        if len(values) != 1:
            raise UsageError(f"{name}: `run` takes one value, not {len(values)}; `sweep` takes lists")
    return {name: values[0] for name, values in given.items()}


def read_space_file(path: str) -> tuple[dict[str, Any], dict[str, list[Value]]]:
    """Return the target keys and the setting lists of a sweep's TOML file. Raises `UsageError`."""
    return read_space(read_toml(Path(path)), path)
