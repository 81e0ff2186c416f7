"""Other sizes of units, and other distances of their prefetch, for a configuration chosen by unit."""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Iterator, Sequence

from fsdpbench.base.configuration.config import Config
from fsdpbench.base.settings.values import Value, is_mixed, joined, spread, unit_sizes
from fsdpbench.sweep.planning import workload_named


def of_sizes(config: Config) -> Iterator[list[Config]]:
    """Yield `config` with units of two blocks where two have the same settings: everywhere, behind the first,
    before the last, in the first half, in the last one."""
    stacks, settings = workload_named(config).stacks(), config.settings
    now, count, half = unit_sizes(settings.wrap, stacks), sum(stacks), sum(stacks) // 2
    if not now:
        return
    names = ("activation_offload", "reshard_after_forward")
    mixed = {name: value for name in names if is_mixed(value := getattr(settings, name))}
    each = {
        name: [word == "true" for word, size in zip(spread(value), now, strict=True) for _ in range(size)]
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
            values = {name: written([words[start] for start in starts]) for name, words in each.items()}
            values["wrap"] = written([f"every-{size}" for size in sizes])
            uniform = not mixed and not is_mixed(settings.activation_checkpointing)
            if uniform and not is_mixed(values["wrap"]):
                continue
            yield [dataclasses.replace(config, settings=settings.changed(**values))]


def written(each: Sequence[Value]) -> Value:
    """Write what each unit has; of all alike one value."""
    return each[0] if len(set(each)) == 1 else joined(each)


def _paired(count: int, pairs: Container[int]) -> list[int]:
    sizes: list[int] = []
    while (place := sum(sizes)) < count:
        sizes.append(2 if place in pairs else 1)
    return sizes


def ahead(name: str, config: Config) -> Iterator[list[Config]]:
    """Yield `config` in which all units, or those of a half, gather one or two others ahead explicitly."""
    units, forward = workload_named(config).units(config.settings.wrap) or 0, name == "forward_prefetch"
    least = 0 if forward else 1
    # The last in order has none ahead. It keeps the least, and so there are two values.
    has_more = range(units - 1) if forward else range(1, units)
    for distance in range(least + 1, 3):
        places = has_more, has_more[: units // 2], has_more[units // 2 :]
        values = [joined([distance if unit in some else least for unit in range(units)]) for some in places]
        changed = (config.settings.changed(**{name: value}) for value in values if "+" in value)
        yield [dataclasses.replace(config, settings=settings) for settings in changed]
