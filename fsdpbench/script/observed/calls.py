"""The calls of torch that a script makes, with their lines and the arguments that matter."""

import argparse
import functools
import inspect
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
import torch.distributed as dist
import torch.distributed.fsdp as fsdp
import torch.utils.checkpoint as torch_checkpoint
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from fsdpbench.base import result_sections
from fsdpbench.base.torch_internals import checkpoint_wrappers as wrappers
from fsdpbench.script import interposing
from fsdpbench.script.model_blocks import blocks_of
from fsdpbench.script.own_files import OwnFiles
from fsdpbench.sim.torch_device.patches.dynamo import passing_to

_SHARDING = (
    "reshard_after_forward", "backward_prefetch", "forward_prefetch", "limit_all_gathers",
    "sharding_strategy",
    "use_orig_params",
)  # fmt: skip
_IGNORED = ("ignored_modules", "ignored_states", "ignored_params")


class Calls:
    """A record of the calls, created before the script starts."""

    def __init__(self, own_files: OwnFiles) -> None:
        self.sharding: dict[result_sections.Place, result_sections.ShardingCall] = {}
        self.optimizers: list[result_sections.OptimizerCall] = []
        self.loaders: list[result_sections.LoaderCall] = []
        self.first_loader: result_sections.Place | None = None
        self.checkpointing: result_sections.Place | None = None
        self.saved_on_host: result_sections.Place | None = None
        self.batch: result_sections.BatchOption | None = None
        self.prefetching: result_sections.Place | None = None
        self.blocks: result_sections.RepeatedBlocks | None = None
        """The blocks of the last wrapped module that has blocks."""
        self._own_files = own_files
        self._inside = False
        self.wrappers = Wrappers(self.place)
        interposing.replace_fully_shard(passing_to(self._fully_shard))
        interposing.around(fsdp.FullyShardedDataParallel, "__init__", self._fsdp1)
        interposing.around_init(DataLoader, self._loader)
        interposing.around_init(torch.optim.Optimizer, self._optimizer)
        self._around_checkpointing()
        interposing.around(torch.autograd.graph.save_on_cpu, "__init__", self._noting("saved_on_host"))
        interposing.after_parsing(self._parsed)
        interposing.around(fsdp.FSDPModule, "set_modules_to_forward_prefetch", self._prefetching)

    def place(self) -> result_sections.Place:
        """Return the place of the script's own call that is running."""
        return self._own_files.place(self._own_files.innermost())

    def _fully_shard(self, original: Callable[..., Any], module: Any, *args: Any, **kwargs: Any) -> Any:
        self._note_sharding("fully_shard", module, kwargs)
        return original(module, *args, **kwargs)

    def _fsdp1(self, original: Any, made: Any, module: Any, *args: Any, **kwargs: Any) -> None:
        if not self._inside:
            named = kwargs | dict(zip(_names(original), args, strict=False))
            self._note_sharding("FullyShardedDataParallel", module, named).module = weakref.ref(made)
        before, self._inside = self._inside, True
        try:
            original(made, module, *args, **kwargs)
        finally:
            self._inside = before

    def _note_sharding(self, api: str, module: Any, kwargs: Mapping[str, Any]) -> "Wrapped":
        place = self.place()
        wrapped = self.wrappers.note(api, module, kwargs, place)
        together = len(module) if isinstance(module, list | tuple) else 1
        # Read now, since FSDP1 changes the sizes of what it wraps.
        if isinstance(module, nn.Module) and (found := blocks_of(module)) is not None:
            self.blocks = found.reported()
        known = self.sharding.get(place) or result_sections.ShardingCall.at(
            place, api=api, arguments=_plain_arguments(kwargs), count=0
        )
        self.sharding[place] = msgspec.structs.replace(
            known, count=known.count + 1, together=max(known.together, together)
        )
        return wrapped

    def _loader(self, dataset: Any, kwargs: Mapping[str, Any]) -> None:
        size, place = kwargs.get("batch_size"), self.place()
        self.first_loader = self.first_loader or place
        self.loaders.append(
            result_sections.LoaderCall.at(
                place,
                batch_size=size if type(size) is int else None,
                num_workers=int(kwargs.get("num_workers") or 0),
                pin_memory=bool(kwargs.get("pin_memory")),
            )
        )

    def _optimizer(self, parameters: Any, kwargs: Mapping[str, Any]) -> None:
        defaults = kwargs.get("defaults") or {}
        fused = {"has_fused": "fused" in defaults, "fused": bool(defaults.get("fused"))}
        self.optimizers.append(result_sections.OptimizerCall.at(self.place(), **fused))

    def _around_checkpointing(self) -> None:
        original, noting = torch_checkpoint.checkpoint, self._noting("checkpointing")
        interposing.replace_checkpoint(passing_to(noting)(original))
        interposing.around(torch_checkpoint, "checkpoint_sequential", noting)
        for name in ("checkpoint_wrapper", "apply_activation_checkpointing"):
            interposing.around(wrappers, name, noting)

    def _noting(self, name: str) -> Callable[..., Any]:
        def noting(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            if not torch.compiler.is_compiling() and getattr(self, name) is None:
                setattr(self, name, self.place())
            return original(*args, **kwargs)

        return noting

    def _parsed(self, parser: argparse.ArgumentParser, found: argparse.Namespace, name: str) -> None:
        options = [action.option_strings for action in parser._actions if action.dest == name]
        flags = [flag for flag in options[0] if flag.startswith("--")] if options else []
        self.batch = result_sections.BatchOption(flags[0] if flags else name, getattr(found, name))

    def _prefetching(self, original: Callable[..., Any], module: Any, modules: Any) -> None:
        self.prefetching = self.prefetching or self.place()
        original(module, modules)


def _plain_arguments(kwargs: Mapping[str, Any]) -> dict[str, result_sections.Argument]:
    """Return the arguments that variations change, as plain values."""
    found: dict[str, result_sections.Argument] = {}
    for name in _SHARDING:
        if name in kwargs:
            value = kwargs[name]
            found[name] = (
                value if isinstance(value, bool | int | type(None)) else getattr(value, "name", str(value))
            )
    for name in ("mp_policy", "mixed_precision"):
        if kwargs.get(name) is not None:
            found["param_dtype"] = str(kwargs[name].param_dtype)
    found["offload"] = isinstance(kwargs.get("offload_policy"), fsdp.CPUOffloadPolicy) or bool(
        getattr(kwargs.get("cpu_offload"), "offload_params", False)
    )
    mesh = kwargs.get("mesh", kwargs.get("device_mesh"))
    found["mesh"] = None if mesh is None else mesh.ndim
    return found


@dataclass
class Wrapped:
    """A module that `fully_shard`, FSDP1 or DDP wraps.

    Fields: `shape`: of its mesh, or the size of its group; `ignored`: the `id`s of parameters that FSDP1
    ignores; `ignored_by`: the argument that names them; `hook`: the place where a communication hook was
    registered.
    """

    module: weakref.ref[nn.Module]
    api: str
    place: result_sections.Place
    shape: tuple[int, ...]
    mesh: Any
    ignored: frozenset[int]
    ignored_by: str = ""
    hook: result_sections.Place | None = None

    def groups(self) -> set[tuple[int, ...]]:
        """Return the ranks of the group in each dimension of its mesh."""
        groups = [None] if self.mesh is None else self.mesh.get_all_groups()
        return {tuple(dist.get_process_group_ranks(group)) for group in groups}

    def parameters(self) -> Iterator[tuple[Any, bool]]:
        """Yield the parameters of its module, each with whether the wrapper manages it."""
        module: Any = self.module()
        names = getattr(getattr(module, "module", None), "_ddp_params_and_buffers_to_ignore", ())
        for name, each in () if module is None else module.named_parameters():
            ignores = name.removeprefix("module.") in names or id(each) in self.ignored
            yield each, not ignores and (self.api != "fully_shard" or isinstance(each, DTensor))


class Wrappers:
    """The modules that a script wraps, with their ranks and communication hooks.

    `place()` returns the place of the script's line that is running.
    """

    def __init__(self, place: Callable[[], result_sections.Place]) -> None:
        self.made: list[Wrapped] = []
        self.wrapped_at: dict[int, result_sections.Place] = {}
        """The place where a parameter was wrapped, by its `id` at that time."""
        self._looked = -1, 0
        self._place = place
        self._owners: dict[int, Wrapped] = {}
        self._ignoring: dict[int, Wrapped] = {}
        for kind, name in (
            (fsdp.FullyShardedDataParallel, "register_comm_hook"),
            (nn.parallel.DistributedDataParallel, "register_comm_hook"),
            (fsdp.FSDPModule, "set_custom_reduce_scatter"),
        ):
            if hasattr(kind, name):
                interposing.around(kind, name, self._registering)
        interposing.around(nn.parallel.DistributedDataParallel, "__init__", self._ddp)

    def note(
        self, api: str, module: Any, arguments: Mapping[str, Any], place: result_sections.Place
    ) -> "Wrapped":
        """Record that `module` (or several) is about to be wrapped; return the record of the last one."""
        mesh, group = arguments.get("mesh", arguments.get("device_mesh")), arguments.get("process_group")
        if mesh is None and isinstance(group, tuple):
            shape = tuple(dist.get_world_size(each) for each in reversed(group))
        else:
            size = dist.get_world_size(group) if dist.is_initialized() else 1
            shape = (size,) if mesh is None else tuple(mesh.shape)
        by = next((name for name in _IGNORED if arguments.get(name)), "")
        ignored = frozenset(map(id, _parameters(arguments.get(by))))
        for each in module if isinstance(module, list | tuple) else [module]:
            self.made.append(Wrapped(weakref.ref(each), api, place, shape, mesh, ignored, by))
            self.wrapped_at |= {id(parameter): place for parameter in each.parameters()}
        return self.made[-1]

    def look(self, when: int) -> None:
        """Find the innermost wrapper that manages each parameter, once for each `when`."""
        if (when, len(self.made)) == self._looked:
            return
        self._looked = when, len(self.made)
        self._owners.clear()
        self._ignoring.clear()
        sized = [[*wrapped.parameters()] for wrapped in self.made]
        for wrapped, held in sorted(zip(self.made, sized, strict=True), key=lambda each: -len(each[1])):
            for parameter, owned in held:
                (self._owners if owned else self._ignoring)[id(parameter)] = wrapped

    def of(self, identity: int) -> "Wrapped | None":
        """Return the wrapper that manages the parameter with this `id`."""
        return self._owners.get(identity)

    def ignoring(self, identity: int) -> "Wrapped | None":
        """Return the wrapper around that parameter that ignores it."""
        return self._ignoring.get(identity)

    def _registering(self, original: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        inside = {id(each) for each in module.modules()}
        for wrapped in self.made:
            if id(wrapped.module()) in inside:
                wrapped.hook = self._place()
        return original(module, *args, **kwargs)

    def _ddp(self, original: Any, made: nn.Module, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        original(made, module, *args, **kwargs)
        named = kwargs | dict(zip(_names(original), args, strict=False))
        self.note(nn.parallel.DistributedDataParallel.__name__, made, named, self._place())


@functools.cache
def _names(constructor: Any) -> list[str]:
    """Return the names of a constructor's parameters after the module that it wraps."""
    return list(inspect.signature(constructor).parameters)[2:]


def _parameters(ignored: Any) -> Iterator[Any]:
    for each in ignored or ():
        yield from each.parameters() if isinstance(each, nn.Module) else [each]
