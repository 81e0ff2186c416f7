"""Changes that take memory, each of one setting: what to write, and what it is in words."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from fsdpbench.base.configuration.config import Config, WhatIf
from fsdpbench.base.configuration.script_source import ScriptSource
from fsdpbench.base.errors import UsageError
from fsdpbench.base.settings import Effect, Settings, all_trades, show_value
from fsdpbench.sweep.planning import not_applicable, shards, simulated_nodes, without_absent

EXPANDABLE = "expandable_segments:True"


@dataclass(frozen=True)
class Change:
    """`settings` and `fields` of the configuration that differ.

    write: what to type. last_resort: other machines. work: samples a step, of those without the change
    (scripts; the bench counts its own).
    """

    write: str
    meaning: str
    settings: tuple[tuple[str, Any], ...] = ()
    fields: tuple[tuple[str, Any], ...] = ()
    last_resort: bool = False
    work: float = 1.0
    unpriced: bool = False
    """Whether its time is not simulated."""

    def applied_to(self, config: Config) -> Config:
        """Return the changed configuration. Raises `UsageError` where there is none such."""
        changed = config.settings.changed(**dict(self.settings)) if self.settings else config.settings
        made = replace(config, settings=changed, **dict(self.fields))
        if made.what_if is not None and config.what_if is not None and made.what_if != config.what_if:
            made = replace(made, what_if=made.what_if.after(config.what_if))
        return made if made.script is not None or made.system == config.system else without_absent(made)

    def with_(self, other: Change) -> Change:
        """Return both changes as one; where both set the same, the other one's value counts."""
        return Change(
            f"{self.write} {other.write}",
            f"{self.meaning}; {other.meaning}",
            tuple({**dict(self.settings), **dict(other.settings)}.items()),
            tuple({**dict(self.fields), **dict(other.fields)}.items()),
            self.last_resort or other.last_resort,
            self.work * other.work,
            self.unpriced or other.unpriced,
        )

    @property
    def is_of_allocator(self) -> bool:
        """Return whether it changes what the allocator reserves, and nothing of what is allocated."""
        return self.write == f"PYTORCH_CUDA_ALLOC_CONF={EXPANDABLE}"

    def holds(self, other: Change) -> bool:
        """Return whether it does all that the other one does, and more."""
        mine, others = ({*change.settings, *change.fields} for change in (self, other))
        return mine > others

    def clashes_with(self, other: Change) -> bool:
        """Return whether both change the same."""
        names = {name for name, _ in (*self.settings, *self.fields)}
        return bool(names & {name for name, _ in (*other.settings, *other.fields)})


_ALLOCATOR = Change(
    f"PYTORCH_CUDA_ALLOC_CONF={EXPANDABLE}",
    "less fragmentation",
    fields=(("what_if", WhatIf(allocator=EXPANDABLE)),),
)
_SHARDED = Change(
    "--system torch-fsdp2", "shards parameters, gradients and optimizer", fields=(("system", "torch-fsdp2"),)
)


def changes_for(config: Config) -> list[Change]:
    """Return the changes of one setting that `config` and its system allow."""
    if config.script is not None:
        candidates = [*_of_script(config, config.script), *_of_machines(config)]
    else:
        of_settings = [*_of_settings(config.settings), *_of_batch(config.settings)]
        is_whole = config.gpus > 1 and not shards(config)
        candidates = [*[_SHARDED] * is_whole, _ALLOCATOR, *of_settings, *_of_machines(config)]
    return [change for change in candidates if is_possible(change, config)]


def is_possible(change: Change, config: Config) -> bool:
    """Return whether the changed configuration can be, and is another one."""
    try:
        changed = change.applied_to(config)
    except UsageError:
        return False
    if changed.to_dict() == config.to_dict():
        return False
    names = (name for name, _ in change.settings)
    return config.script is not None or not not_applicable(changed, names, before=config)


def _of_settings(settings: Settings) -> Iterator[Change]:
    """Yield a change for each trade of the table that takes less memory than the values of `settings`."""
    values = settings.to_dict()
    for setting, trade in all_trades():
        if trade.memory is Effect.LESS and trade.leaves(values[setting.name]):
            changed = ((setting.name, trade.value), *trade.also)
            yield Change(f"{setting.flag} {show_value(trade.value)}", trade.words, changed)


def _of_batch(settings: Settings) -> Iterator[Change]:
    """Yield changes to more microbatches of the same samples a step."""
    for parts in (2, 4, 8):
        if settings.batch % parts == 0:
            batch, microbatches = settings.batch // parts, settings.grad_accum * parts
            yield Change(
                f"--batch {batch} --grad-accum {microbatches}",
                f"the same samples a step in {microbatches} microbatches",
                (("batch", batch), ("grad_accum", microbatches)),
            )


def _of_machines(config: Config) -> Iterator[Change]:
    for factor in (2, 4):
        gpus = config.gpus * factor
        per_node = config.gpus_per_node
        if per_node == config.gpus:  # part of a node, maybe: it is filled first
            _, whole, _ = simulated_nodes(config.hardware or "", gpus, None, None, None)
            per_node = max(min(whole, gpus), config.gpus_per_node)
        yield Change(
            f"--gpus {gpus}",
            f"{factor} times as many GPUs, the same work each",
            fields=(("gpus", gpus), ("gpus_per_node", per_node)),
            last_resort=True,
        )


def _of_script(config: Config, script: ScriptSource) -> Iterator[Change]:
    """Yield the changes of one line of a script, its environment or an argument."""
    yield _ALLOCATOR
    yield Change(
        "fully_shard(model, ...)",
        "after the blocks are: shards what is in none of them",
        fields=(("what_if", WhatIf(variation="wrap-root")),),
    )
    for _, trade in all_trades():
        if trade.variation and trade.memory is Effect.LESS:
            work = 0.5 if trade.variation == "half-batch" else 1.0
            varied = (("what_if", WhatIf(variation=trade.variation)),)
            yield Change(trade.script or "", trade.words, fields=varied, work=work)
    for place, argument in enumerate(script.arguments):
        name, equals, value = argument.partition("=")
        place += 0 if equals else 1
        value = value if equals else script.arguments[place] if place < len(script.arguments) else ""
        if not _BATCH.fullmatch(name) or not re.fullmatch("[0-9]{1,18}", value) or int(value) < 2:
            continue
        for parts in (2, 4):
            if int(value) % parts:
                continue
            divided = f"{name}{equals}{int(value) // parts}" if equals else str(int(value) // parts)
            changed = (*script.arguments[:place], divided, *script.arguments[place + 1 :])
            yield Change(
                f"-- {name} {int(value) // parts}",
                "a smaller batch; accumulate gradients to keep the samples a step",
                fields=(("script", replace(script, arguments=changed)),),
                work=1.0 / parts,
            )


_BATCH = re.compile(r"--?(?:.*[-_])?(?:batch|batch[-_]size|bs|b)")
