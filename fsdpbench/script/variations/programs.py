"""Variations of the program: optimizers, compiled units, prefetching, recomputation, waits and loaders."""

import functools
import inspect
import itertools
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any

import torch
import torch.distributed.fsdp as fsdp
import torch.utils.checkpoint as torch_checkpoint
from torch import nn

from fsdpbench.base.configuration.script_source import Variation
from fsdpbench.base.settings.values import spread
from fsdpbench.base.torch_internals import BaseDataLoaderIter
from fsdpbench.base.torch_internals import checkpoint_wrappers as wrappers
from fsdpbench.script.interposing import around, around_fully_shard, around_init, replace_checkpoint
from fsdpbench.script.model_blocks import blocks_of, has_units, roots, stacked
from fsdpbench.script.observed.waits import Waits
from fsdpbench.script.variations.sharding import NoEffectError
from fsdpbench.sim import Simulation
from fsdpbench.sim.torch_device.device_module import Event


class Fused:
    """A variation in which optimizers that have a fused kernel use it."""

    def __init__(self) -> None:
        self.count = 0
        for kind in (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad):
            if "fused" in inspect.signature(kind.__init__).parameters:
                around_init(kind, self._before)

    def _before(self, parameters: Any, kwargs: MutableMapping[str, Any]) -> None:
        if not kwargs.get("fused"):
            kwargs.update(fused=True, foreach=None)
            self.count += 1


class NoneGrads:
    """A variation that drops gradients where the script fills them with zeros."""

    def __init__(self) -> None:
        self.count = 0
        for kind in (torch.optim.Optimizer, nn.Module):
            around(kind, "zero_grad", self._dropping)

    def _dropping(self, original: Callable[..., Any], owner: Any, set_to_none: bool = True) -> None:
        self.count += not set_to_none
        original(owner, set_to_none=True)


class _OfUnits:
    """A variation of every unit that contains no other unit (`fully_shard`, FSDP1's wrapper)."""

    def __init__(self) -> None:
        self.count = 0
        around_fully_shard(self._before)
        around_init(fsdp.FullyShardedDataParallel, self._before_fsdp1)

    def _before_fsdp1(self, module: Any, kwargs: Mapping[str, Any]) -> None:
        if kwargs.get("auto_wrap_policy") is None:
            self._before(module, kwargs)

    def _before(self, module: Any, kwargs: Mapping[str, Any]) -> None:
        modules: Sequence[nn.Module] = module if isinstance(module, list | tuple) else [module]
        for each in modules:
            if not has_units(each):
                self.unit(each)

    def unit(self, module: nn.Module) -> None:
        """Change a unit before it is wrapped."""


class Compiled(_OfUnits):
    """A variation that compiles every unit that contains no other."""

    def unit(self, module: nn.Module) -> None:
        module.compile()
        self.count += 1


class ForwardPrefetch(_OfUnits):
    """A variation in which each unit prefetches the next one in forward (`fully_shard`)."""

    def __init__(self) -> None:
        super().__init__()
        self._units: list[nn.Module] = []
        around_init(torch.optim.Optimizer, lambda parameters, kwargs: self._connect())

    def unit(self, module: nn.Module) -> None:
        self._units.append(module)

    def _connect(self) -> None:
        units = [each for each in self._units if isinstance(each, fsdp.FSDPModule)]
        self._units = []
        for first, second in itertools.pairwise(units):
            first.set_modules_to_forward_prefetch([second])
            self.count += 1


class NoForwardPrefetch:
    """A variation without the forward prefetching that the script requests for `fully_shard`'s units."""

    def __init__(self) -> None:
        self.count = 0

        def ignored(original: Any, module: Any, modules: Any) -> None:
            self.count += 1

        around(fsdp.FSDPModule, "set_modules_to_forward_prefetch", ignored)


_checkpoint = torch_checkpoint.checkpoint


class Checkpointed(_OfUnits):
    """A variation that recomputes the forward of every unit that contains no other; without units, of every
    block of the models that exist when an optimizer is created."""

    def __init__(self) -> None:
        super().__init__()
        around_init(torch.optim.Optimizer, lambda parameters, kwargs: self._blocks())

    def _blocks(self) -> None:
        for blocks in filter(None, map(blocks_of, () if self.count else roots())):
            for module in blocks.modules:
                self.unit(module)

    def unit(self, module: nn.Module) -> None:
        if not hasattr(module, "_checkpoint_wrapped_module"):
            module.forward = functools.partial(_checkpoint, module.forward, use_reentrant=False)
            self.count += 1


class NotCheckpointed:
    """A variation that recomputes nothing of what `checkpoint`, its wrappers or
    `apply_activation_checkpointing` would recompute."""

    def __init__(self) -> None:
        self.count = 0
        for module, name, function in (
            (torch_checkpoint, "checkpoint_sequential", self._sequence),
            (wrappers, "checkpoint_wrapper", self._wrapped),
            (wrappers, "apply_activation_checkpointing", self._applied),
        ):
            setattr(module, name, function)
        replace_checkpoint(self._function)

    def _function(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        self.count += 1
        return function(*args, **{name: value for name, value in kwargs.items() if name not in OF_CHECKPOINT})

    def _sequence(self, functions: Any, segments: int, input: Any, **kwargs: Any) -> Any:
        for function in functions:
            input = self._function(function, input, **kwargs)
        return input

    def _wrapped(self, module: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        self.count += 1
        return module

    def _applied(self, model: nn.Module, *args: Any, **kwargs: Any) -> None:
        self.count += 1


class NotSaved:
    """A variation that keeps on the device what `save_on_cpu` would save on the host."""

    def __init__(self) -> None:
        self.count = 0
        for name in ("__enter__", "__exit__"):
            around(torch.autograd.graph.save_on_cpu, name, self._left_out)

    def _left_out(self, *args: Any) -> None:
        self.count += 1


class ByUnit(NotCheckpointed):
    """A variation in which blocks of the model recompute and offload, and units are resharded, as `value`
    says for each block (`joined`, with commas; resharding may be left out; after `@` the paths of the lists
    that hold the blocks), and nothing else recomputes or saves on the host."""

    def __init__(self, value: str) -> None:
        super().__init__()
        NotSaved()
        mix, *self._paths = value.split("@")
        self._recomputed, self._moved, *self._resharded = [
            spread(part.replace(",", "+")) for part in mix.split("/")
        ]
        self._blocks: tuple[nn.Module, ...] = ()
        around_fully_shard(self._before)
        around_init(fsdp.FullyShardedDataParallel, self._before)
        around_init(torch.optim.Optimizer, lambda parameters, kwargs: self._reshard())

    def _before(self, module: Any, kwargs: Mapping[str, Any]) -> None:
        """Change the blocks of the model that contains the first module about to be wrapped."""
        one = module[0] if isinstance(module, list | tuple) else module
        around_it = [] if self._blocks else [each for each in roots() if one in set(each.modules())]
        found = stacked(around_it[0], self._paths) if around_it else ()
        if len(found) != len(self._recomputed):
            return
        self._blocks = found
        self.count += 1
        for block, how in zip(self._blocks, self._recomputed, strict=True):
            if how == "full":
                block.forward = functools.partial(_checkpoint, block.forward, use_reentrant=False)
        moved = [block for block, word in zip(self._blocks, self._moved, strict=True) if word == "true"]
        if moved:  # as the script's diff does
            from fsdpbench.impl import offload_activations

            offload_activations(moved)

    def _reshard(self) -> None:
        if not self._blocks:
            raise NoEffectError(Variation.BY_UNIT)
        for each in self._resharded:
            for block, word in zip(self._blocks, each, strict=True):
                if isinstance(block, fsdp.FSDPModule):
                    block.set_reshard_after_forward(word == "true")


OF_CHECKPOINT = (
    "use_reentrant", "context_fn", "determinism_check", "debug", "early_stop", "preserve_rng_state",
)  # fmt: skip


class NoWaits:
    """A variation in which the CPU does not wait for the device at the script's own lines."""

    def __init__(self, waits: Waits) -> None:
        self._waits = waits
        waits.skipped = True
        around(Event, "elapsed_time", self._elapsed)

    def _elapsed(self, original: Callable[..., Any], event: Any, end_event: Any) -> float:
        try:
            return float(original(event, end_event))
        except RuntimeError:  # it was not waited for
            return 0.0

    @property
    def count(self) -> int:
        return self._waits.count


class LoaderTime:
    """A variation in which a batch of a `DataLoader` costs the host a number of seconds (`0.05/4`: 0.05 s of
    each of 4 workers).

    Workers behave like torch's: each has two batches to make, and gets the next when one is taken.
    """

    def __init__(self, value: str, simulation: Simulation) -> None:
        self.count = 0
        seconds, _, workers = value.partition("/")
        self._ns, self._workers = round(float(seconds) * 1e9), int(workers or 0)
        self._simulation = simulation
        around(BaseDataLoaderIter, "__next__", self._taking)

    def _taking(self, original: Callable[..., Any], iterator: Any) -> Any:
        began = self._simulation.cpu_ns()
        batch = original(iterator)
        self._simulation.accelerator.timeline.cpu = self._ready(iterator, began)
        self.count += 1
        return batch

    def _ready(self, iterator: Any, now: int) -> int:
        """Return when the CPU gets the batch that it requests at `now`, in nanoseconds of the timeline."""
        if not self._workers:
            return now + self._ns
        state = iterator.__dict__.setdefault("_sim_ready", _WorkerTimes(self._workers, self._ns, now))
        return state.take(now)


class _WorkerTimes:
    """The times at which workers' batches are ready, in nanoseconds of the timeline."""

    def __init__(self, workers: int, each_ns: int, now: int) -> None:
        # Like workers that have run for long: their batches come one by one, not all together.
        self._each = each_ns
        self._free = [now - each_ns * (workers - 1 - index) // workers for index in range(workers)]
        self._made: list[int] = []
        self._taken = 0
        for _ in range(2 * workers):
            self._order(now)

    def _order(self, now: int) -> None:
        worker = len(self._made) % len(self._free)
        self._free[worker] = max(self._free[worker], now) + self._each
        self._made.append(self._free[worker])

    def take(self, now: int) -> int:
        """Return when the next batch is ready; one more is requested then."""
        ready = max(now, self._made[self._taken])
        self._taken += 1
        self._order(ready)
        return ready
