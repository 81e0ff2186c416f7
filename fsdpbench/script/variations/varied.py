"""Installation of the variations that a configuration names; variations of batches and of kept tensors."""

import argparse
import contextlib
import gc
import weakref
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any, Protocol

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import DataLoader

from fsdpbench.base.configuration.script_source import Variation
from fsdpbench.script.interposing import after_parsing, around_init
from fsdpbench.script.observed.waits import Waits
from fsdpbench.script.variations import programs
from fsdpbench.script.variations.sharding import Argument, Blocks, Pairs, Root
from fsdpbench.sim import Simulation


class _Part(Protocol):
    """An installed variation."""

    @property
    def count(self) -> int:
        """Return how often it changed something."""


_SIMPLE: Mapping[Variation, Callable[[], _Part]] = {
    Variation.CHECKPOINT: programs.Checkpointed, Variation.NO_CHECKPOINT: programs.NotCheckpointed,
    Variation.HALF_BATCH: lambda: Batches(0.5, parser=False),
    Variation.DOUBLE_BATCH: lambda: Batches(2.0, parser=True), Variation.WRAP_BLOCKS: Blocks,
    Variation.WRAP_ROOT: Root, Variation.WRAP_PAIRS: Pairs, Variation.FUSED: programs.Fused,
    Variation.NONE_GRADS: programs.NoneGrads, Variation.COMPILE: programs.Compiled,
    Variation.NO_SAVE_ON_CPU: programs.NotSaved,
    Variation.DETACH_KEPT: lambda: NotKept(host=False), Variation.HOST_KEPT: lambda: NotKept(host=True),
}  # fmt: skip


class Varied:
    """The variations of one run, installed before the script starts.

    `text`: a variation, or several joined with `+`, as in a configuration.
    """

    def __init__(self, text: str, waits: Waits, simulation: Simulation) -> None:
        parsed = [each.partition("=") for each in text.split("+")]
        self.variation = Variation(parsed[0][0])
        self._parts = [part for name, _, value in parsed for part in _made(name, value, waits, simulation)]

    @property
    def count(self) -> int:
        return sum(part.count for part in self._parts)


def _made(name: str, value: str, waits: Waits, simulation: Simulation) -> list[_Part]:
    variation = Variation(name)
    if variation in _SIMPLE:
        return [_SIMPLE[variation]()]
    if variation is Variation.NO_WAITS:
        return [programs.NoWaits(waits)]
    if variation is Variation.BY_UNIT:
        return [programs.ByUnit(value)]
    if variation is Variation.LOADER_TIME:
        return [programs.LoaderTime(value, simulation)]
    parts: list[_Part] = [Argument(variation)]
    if variation is Variation.PREFETCH:
        parts.append(programs.ForwardPrefetch())
    elif variation is Variation.NO_FORWARD_PREFETCH:
        parts.append(programs.NoForwardPrefetch())
    return parts


class Batches:
    """A variation that multiplies the batch size by `factor`; with `parser`, in the script's argument parser,
    if that reads it."""

    def __init__(self, factor: float, *, parser: bool) -> None:
        self.count = 0
        self._factor = factor
        self._by_parser = False
        around_init(DataLoader, self._loader)
        if parser:
            after_parsing(self._parsed)

    def _scaled(self, size: Any) -> int | None:
        """Return the changed size; None if there is none, or if the parser has changed it already."""
        if type(size) is int and int(size * self._factor) >= 1 and not self._by_parser:
            return int(size * self._factor)
        return None

    def _loader(self, dataset: Any, kwargs: MutableMapping[str, Any]) -> None:
        scaled = self._scaled(kwargs.get("batch_size"))
        if scaled is not None:
            kwargs["batch_size"] = scaled
            self.count += 1

    def _parsed(self, parser: argparse.ArgumentParser, found: argparse.Namespace, name: str) -> None:
        scaled = self._scaled(getattr(found, name))
        if scaled is not None:
            setattr(found, name, scaled)
            self.count += 1
            self._by_parser = True


_FIRST = 2
"""The step at whose end shards and constants are alive; later ends show what the loop adds."""


class NotKept:
    """A variation that detaches tensors alive at the end of a step from their graphs; with `host`, tensors
    that are also alive at the end of the next step are moved to the host."""

    def __init__(self, *, host: bool) -> None:
        self.count = 0
        self._host = host
        self._steps = 0
        self._seen: dict[int, weakref.ref[torch.Tensor]] = {}
        """Tensors by `id` at the end of the last step; `_always`: at the end of the second step."""
        self._always: dict[int, weakref.ref[torch.Tensor]] = {}
        register_optimizer_step_post_hook(lambda optimizer, args, kwargs: self._step_ended())

    def _step_ended(self) -> None:
        self._steps += 1
        seen = {}
        for each in _kept():
            if each.grad_fn is not None:
                with contextlib.suppress(RuntimeError):  # a view cannot be detached in place
                    each.detach_()
                    self.count += 1
            if self._host and _holds(self._seen, each) and not _holds(self._always, each):
                # Takes no memory of this machine, and no time for a copy.
                each.data = torch.empty((), dtype=each.dtype).expand(each.shape)
                self.count += 1
            else:
                seen[id(each)] = weakref.ref(each)
        self._seen = seen
        if self._steps <= _FIRST:
            self._always = seen


def _holds(known: dict[int, weakref.ref[torch.Tensor]], tensor: torch.Tensor) -> bool:
    found = known.get(id(tensor))
    return found is not None and found() is tensor


def _kept() -> Iterator[torch.Tensor]:
    """Yield the tensors of the device that are neither parameters nor gradients."""
    found = [each for each in gc.get_objects() if type(each) is torch.Tensor]
    for each in found:
        if not each.is_cpu and not (each.is_leaf and each.requires_grad):
            yield each
