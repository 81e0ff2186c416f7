"""Other sizes of units, and other distances of their prefetch, for a configuration chosen by unit."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Container, Iterator, Sequence

from fsdpbench.base.configuration.config import Config
from fsdpbench.base.settings.values import Value, is_mixed, joined, spread, unit_sizes
from fsdpbench.sweep.planning import workload_named

_FARTHEST = 2


Variants = Callable[[Config], Iterator[list[Config]]]
"""Yields variants in groups, in which those that follow need less memory; none where units are not blocks."""


def of_sizes(config: Config) -> Iterator[list[Config]]:
    """Yield `config` with units of two blocks where two have the same settings: everywhere, behind the first,
    before the last, in the first half, in the last one."""
    stacks, settings = workload_named(config).stacks(), config.settings
    if workload_named(config).units(settings.wrap) is None:
        return
    now, count, half = _sizes(settings.wrap, stacks), sum(stacks), sum(stacks) // 2
    names = ("activation_offload", "reshard_after_forward")
    mixed = {name: value for name in names if is_mixed(value := getattr(settings, name))}
    each = {
        name: [word for word, size in zip(spread(value), now, strict=True) for _ in range(size)]
        for name, value in mixed.items()
    }
    ends = {sum(stacks[: place + 1]) - 1 for place in range(len(stacks))}
    alike = {
        place
        for place in range(count)
        if place not in ends and all(words[place] == words[place + 1] for words in each.values())
    }
    for places in (range(count), range(1, count), range(count - 2), range(half), range(half, count)):
        sizes = _paired(count, alike & {*places})
        if sizes != now:
            starts = [sum(sizes[:unit]) for unit in range(len(sizes))]
            values = {name: _written([words[start] for start in starts]) for name, words in each.items()}
            wrap = joined([f"every-{size}" for size in sizes])
            values["wrap"] = wrap if "+" in wrap else wrap.partition(":")[0]
            if "+" not in wrap and not mixed and not is_mixed(settings.activation_checkpointing):
                continue  # that is uniform
            yield [dataclasses.replace(config, settings=settings.changed(**values))]


def _sizes(wrap: str, stacks: Sequence[int]) -> list[int]:
    """Return the blocks of each unit."""
    if sizes := unit_sizes(wrap):
        return sizes
    each = 1 if wrap == "block" else int(wrap.removeprefix("every-"))
    return [min(each, stack - start) for stack in stacks for start in range(0, stack, each)]


def _paired(count: int, pairs: Container[int]) -> list[int]:
    sizes: list[int] = []
    while (place := sum(sizes)) < count:
        sizes.append(2 if place in pairs else 1)
    return sizes


def _written(words: Sequence[str]) -> Value:
    return joined(words) if len(set(words)) > 1 else words[0] == "true"


def ahead(name: str, config: Config) -> Iterator[list[Config]]:
    """Yield `config` in which all units, or those of a half, gather one or two others ahead explicitly."""
    units, forward = workload_named(config).units(config.settings.wrap) or 0, name == "forward_prefetch"
    least = 0 if forward else 1
    # The last in order has none ahead. It keeps the least, and so there are two values.
    has_more = range(units - 1) if forward else range(1, units)
    for distance in range(least + 1, _FARTHEST + 1):
        places = has_more, has_more[: units // 2], has_more[units // 2 :]
        values = [joined([distance if unit in some else least for unit in range(units)]) for some in places]
        yield [
            dataclasses.replace(config, settings=config.settings.changed(**{name: value}))
            for value in values
            if "+" in value
        ]
