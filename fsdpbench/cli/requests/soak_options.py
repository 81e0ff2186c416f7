"""`--soak`, `--seq-lengths`, `--eval-every`: many steps of different lengths on end (docs/lengths.md)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import click

from fsdpbench.base.errors import UsageError
from fsdpbench.cli.values import whole

if TYPE_CHECKING:
    from fsdpbench.base.configuration.config import Config
    from fsdpbench.reports.result import Result

F = TypeVar("F", bound=Callable[..., Any])

_TIMEOUT_S = 3600.0
"""Of a soak, where none is named."""
_WITH_SOAK = ("seq_lengths", "eval_every", "eval_steps", "no_replay")


def soak_options(function: F) -> F:
    """The flags of a soak."""
    options = (
        click.option(
            "--soak",
            type=whole(),
            metavar="STEPS",
            help="Instead of timed and traced steps: run this many consecutive steps and show memory over "
            "them.",
        ),
        click.option(
            "--seq-lengths",
            metavar="LENGTHS",
            help="With --soak: lengths of samples, lognormal:MEAN,SIGMA or a file, and how they are laid out "
            "(,layout=padded|packed,buckets=16,multiple=64,least=1,seed=0). --seq is the longest.",
        ),
        click.option(
            "--eval-every", type=whole(), metavar="STEPS", help="With --soak: evaluate after so many steps."
        ),
        click.option(
            "--eval-steps", type=whole(), metavar="BATCHES", help="Batches of an evaluation (default 8)."
        ),
        click.option(
            "--no-replay",
            is_flag=True,
            default=None,
            help="With --soak on simulated GPUs: execute every step, also those known already.",
        ),
    )
    for option in reversed(options):
        function = option(function)
    return function


def with_soak(config: Config, options: Mapping[str, Any]) -> Config:
    """`config` with the soak that was asked for, untraced. Raises `UsageError`."""
    from fsdpbench.base.configuration.lengths import LengthSettings
    from fsdpbench.base.configuration.soak import SoakSettings

    if options.get("soak") is None:
        for name in _WITH_SOAK:
            if options.get(name) is not None:
                raise UsageError(
                    f"--{name.replace('_', '-')} is for many steps: say how many, as in --soak 200"
                )
        return config
    if options.get("eval_steps") is not None and options.get("eval_every") is None:
        raise UsageError("--eval-steps says how many batches; --eval-every says when, as in --eval-every 50")
    lengths = options.get("seq_lengths")
    asked = {name: options[name] for name in ("eval_every", "eval_steps") if options.get(name) is not None}
    soak = SoakSettings(
        steps=options["soak"],
        lengths=None if lengths is None else LengthSettings.parse(lengths),
        replay=not options.get("no_replay"),
        **asked,
    )
    measurement = replace(config.measurement, warmup_steps=0, traced_steps=0)
    if options.get("timeout") is None:
        measurement = replace(measurement, timeout_s=_TIMEOUT_S)
    return replace(config, soak=soak, measurement=measurement)


def soak_notes(result: Result) -> Iterator[str]:
    """What a soak found, in a few lines."""
    soak = result.soak
    if soak is None:
        return
    done, over = soak.steps_done, soak.over_steps
    yield (
        f"soak: {done} of {soak.steps} steps, {soak.distinct_shapes} different shapes; "
        f"{soak.executed} steps executed, {soak.replayed} replayed"
    )
    for why, count in soak.executed_because.items():
        yield f"soak: {count} not replayed: {why}"
    if soak.out_of_memory_step is not None:
        yield f"soak: out of memory in step {soak.out_of_memory_step}"
    if soak.retries:
        yield f"soak: {soak.retries} allocator retries, the first in step {soak.first_retry_step}"
    reserved = [value for value in over.reserved if value is not None]
    if reserved:
        fragments = max(value or 0 for value in over.inactive_split)
        yield (
            f"soak: the last cudaMalloc in step {soak.last_device_alloc_step}; reserved at most "
            f"{max(reserved) / 2**30:.1f} GiB; up to {fragments / 2**30:.1f} GiB was free in fragments"
        )
