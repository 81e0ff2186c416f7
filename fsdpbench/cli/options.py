"""Options that several commands share: where to run, and one flag a setting."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import click

from fsdpbench.cli.completion import (
    hardware_names,
    model_names,
    proposals,
    software_names,
    system_names,
    values_of,
)
from fsdpbench.cli.values import MOST_SECONDS, Positive, whole
from fsdpbench.configuration.setting_values import TRUE_WORDS
from fsdpbench.configuration.settings import SETTINGS, Value, read_list, setting_named, show_value
from fsdpbench.errors import UsageError
from fsdpbench.files.reading import read_toml
from fsdpbench.sweep.space_file import read_space

F = TypeVar("F", bound=Callable[..., Any])


def sanitize_option(function: F) -> F:
    """`--sanitize`."""
    return click.option(
        "--sanitize",
        is_flag=True,
        default=None,
        help="Simulated GPUs: find data races, uses of memory that nothing orders. A finding gives status "
        "race and exit code 4 (docs/races.md).",
    )(function)


def target_options(function: F) -> F:
    """`--model`, `--gpus`, `--device`, ... : what is run, and on what."""
    options = (
        click.option(
            "--model",
            shell_complete=proposals(model_names),
            help="Named size (gpt-2.8b), a family (gpt) with --shape, or hf:OWNER/NAME of the local cache.",
        ),
        click.option(
            "--hf-config",
            metavar="PATH",
            help="In place of --model: a Hugging Face config.json, or its folder (docs/models.md).",
        ),
        click.option("--shape", help="Fields of the shape: layers=32,d_model=4096,..."),
        click.option(
            "--system", shell_complete=proposals(system_names), help="System(s) under test, comma-separated."
        ),
        click.option("--device", default=None, help="auto (default), cuda, cpu or sim."),
        click.option(
            "--hardware",
            shell_complete=proposals(hardware_names),
            help="Profile to simulate (a100-80gb, FILE.toml, ...).",
        ),
        click.option(
            "--nic-gb-s",
            type=Positive(1e6),
            default=None,
            metavar="GB/S",
            help="Network of a node each way, in place of the profile's: 50 for 400 Gb/s.",
        ),
        click.option(
            "--emulate",
            is_flag=True,
            default=None,
            help="One real device as rank 0 of --gpus, on the network of --hardware.",
        ),
        click.option(
            "--software",
            shell_complete=proposals(software_names),
            help="Simulated GPUs: profile of the software of a time (fsdp1-2022, FILE.toml, ...).",
        ),
        click.option("--gpus", default=None, help="Ranks in all (default 8); `sweep` takes a list."),
        click.option("--gpus-per-node", type=whole(), default=None, help="Ranks on one node."),
        click.option(
            "--data",
            help="What to train on: a text file (bytes are tokens), a folder of images, a click log; "
            "default: seeded synthetic data.",
        ),
        click.option(
            "--timeout", type=Positive(MOST_SECONDS), default=None, help="Seconds a configuration may take."
        ),
        click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout."),
    )
    for option in reversed(options):
        function = option(function)
    return function


def space_options(function: F) -> F:
    """`--preset`, `--when`, `--exclude`, `--max-points`, `--sample-seed`: which combinations run."""
    options = (
        click.option("--preset", help="A ready space: default, memory, accumulation, scaling, hybrid, wide."),
        click.option(
            "--when",
            multiple=True,
            metavar="'A=V => B=V,V'",
            help="Sweep B only where A has that value (any setting, system or gpus).",
        ),
        click.option(
            "--exclude", multiple=True, metavar="'A=V B=V'", help="Leave out points that match all of it."
        ),
        click.option("--reference", help="Systems that run once beside the others, comma-separated."),
        click.option("--max-points", type=whole(), help="Draw at most so many configurations."),
        click.option("--sample-seed", type=whole(0), help="Which are drawn (default 0)."),
    )
    for option in reversed(options):
        function = option(function)
    return function


def setting_options(many: bool) -> Callable[[F], F]:
    """A flag for every setting (a comma-separated list where `many`), and `--set key=value`."""

    def decorate(function: F) -> F:
        for setting in reversed(SETTINGS.values()):
            lists = " Comma-separated list." if many else ""
            function = click.option(
                f"--{setting.name.replace('_', '-')}",
                setting.name,
                default=None,
                metavar="V,V" if many else "V",
                shell_complete=proposals(values_of(setting.name)),
                help=f"{setting.meaning} Takes {setting.values}.{lists} "
                f"Default {show_value(setting.read(setting.default))}.",
            )(function)
        return click.option("--set", "assignments", multiple=True, metavar="KEY=VALUE", help="Any setting.")(
            function
        )

    return decorate


def given_settings(flags: Mapping[str, str | None], assignments: tuple[str, ...]) -> dict[str, list[Value]]:
    """Settings that the user named, each with its values in order. Raises `UsageError`."""
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
    """Whether `compile=true` is among what these words, or the TOML file `space`, ask for. A quick look, for
    the fork server; what is wrong in them is told later."""
    texts = [flags.get("compile") or "", *(each for each in assignments if each.startswith("compile"))]
    if space is not None:
        texts += map(str, read_space_file(space)[1].get("compile", ()))
    words = {word.strip() for text in texts for word in text.lower().replace("=", ",").split(",")}
    return not words.isdisjoint(TRUE_WORDS)


def single_settings(given: Mapping[str, list[Value]]) -> dict[str, Value]:
    """For `run`: exactly one value a setting. Raises `UsageError` on a list."""
    for name, values in given.items():
        if len(values) != 1:
            raise UsageError(f"{name}: `run` takes one value, not {len(values)}; `sweep` takes lists")
    return {name: values[0] for name, values in given.items()}


def read_space_file(path: str) -> tuple[dict[str, Any], dict[str, list[Value]]]:
    """A sweep's TOML file as (target keys, lists of settings). Raises `UsageError` naming file and key."""
    return read_space(read_toml(Path(path)), path)
