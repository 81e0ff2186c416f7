"""Which of torch's calls a script makes, with their lines and the arguments that matter."""

from __future__ import annotations

import argparse
import functools
import inspect
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed.fsdp as fsdp
import torch.utils.checkpoint as torch_checkpoint
from torch import nn

from fsdpbench.script.interposing.arguments import batch_argument
from fsdpbench.script.interposing.blocks import blocks_of
from fsdpbench.script.interposing.calls import around_init, around_loader, replace_fully_shard
from fsdpbench.script.interposing.checkpoints import replace_checkpoint
from fsdpbench.script.observed.wrappers import Wrapped, Wrappers
from fsdpbench.script.own_files import OwnFiles
from fsdpbench.torch_internals import checkpoint_wrappers as wrappers

_SHARDING = (
    "reshard_after_forward", "backward_prefetch", "forward_prefetch", "limit_all_gathers",
    "sharding_strategy",
    "use_orig_params",
)  # fmt: skip


class Calls:
    """Notes them. Made before the script starts."""

    def __init__(self, own_files: OwnFiles) -> None:
        self.sharding: list[dict[str, Any]] = []
        self.optimizers: list[dict[str, Any]] = []
        self.loaders: list[dict[str, Any]] = []
        self.checkpointing: dict[str, Any] | None = None
        self.batch: dict[str, Any] | None = None
        self.prefetching: dict[str, Any] | None = None
        self.blocks: dict[str, Any] | None = None
        """Of the last module that was wrapped and has blocks: their path, class and count."""
        self._own_files = own_files
        self.wrappers = Wrappers(self.place)
        replace_fully_shard(self._fully_shard)
        self._around_fsdp1()
        around_loader(self._loader)
        around_init(torch.optim.Optimizer, self._optimizer)
        self._around_checkpointing()
        self._around_parser()
        self._around_prefetching()

    def place(self) -> dict[str, Any]:
        """Of the script's own call that runs, as `OwnFiles.place` says it."""
        return self._own_files.place(self._own_files.innermost())

    def _fully_shard(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def fully_shard(module: Any, *args: Any, **kwargs: Any) -> Any:
            self._note_sharding("fully_shard", module, kwargs)
            return original(module, *args, **kwargs)

        return fully_shard

    def _around_fsdp1(self) -> None:
        kind: Any = fsdp.FullyShardedDataParallel
        original = kind.__init__
        names = list(inspect.signature(original).parameters)[2:]
        inside = False

        @functools.wraps(original)
        def init(made: Any, module: Any, *args: Any, **kwargs: Any) -> None:
            nonlocal inside
            if not inside:
                named = kwargs | dict(zip(names, args, strict=False))
                self._note_sharding("FullyShardedDataParallel", module, named).module = weakref.ref(made)
            before, inside = inside, True
            try:
                original(made, module, *args, **kwargs)
            finally:
                inside = before

        kind.__init__ = init

    def _note_sharding(self, api: str, module: Any, kwargs: dict[str, Any]) -> Wrapped:
        place = self.place()
        wrapped = self.wrappers.note(api, module, kwargs, place)
        together = len(module) if isinstance(module, list | tuple) else 1
        # Now, since what FSDP1 wraps has other sizes.
        if isinstance(module, nn.Module) and (found := blocks_of(module)) is not None:
            self.blocks = {"path": found.path, "class": found.class_name, "count": len(found.modules)}
        where = {name: place.get(name) for name in ("file", "line", "span")}
        for call in self.sharding:
            if where.items() <= call.items():
                call["count"] += 1
                call["together"] = max(call["together"], together)
                return wrapped
        arguments = _told(kwargs)
        self.sharding.append(
            {"api": api, **where, **place, "count": 1, "together": together, "arguments": arguments}
        )
        return wrapped

    def _loader(self, dataset: Any, kwargs: dict[str, Any]) -> None:
        told = {name: kwargs.get(name) for name in ("batch_size", "num_workers", "pin_memory")}
        size = told["batch_size"]
        told["batch_size"] = size if type(size) is int else None
        workers, pinned = int(told["num_workers"] or 0), bool(told["pin_memory"])
        self.loaders.append({**self.place(), **told, "num_workers": workers, "pin_memory": pinned})

    def _optimizer(self, parameters: Any, kwargs: dict[str, Any]) -> None:
        defaults = kwargs.get("defaults") or {}
        self.optimizers.append(
            {**self.place(), "has_fused": "fused" in defaults, "fused": bool(defaults.get("fused"))}
        )

    def _around_checkpointing(self) -> None:
        replace_checkpoint(self._checkpointing(torch_checkpoint.checkpoint))
        for module, names in (
            (torch_checkpoint, ("checkpoint_sequential",)),
            (wrappers, ("checkpoint_wrapper", "apply_activation_checkpointing")),
        ):
            for name in names:
                setattr(module, name, self._checkpointing(getattr(module, name)))

    def _checkpointing(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            if not torch.compiler.is_compiling() and self.checkpointing is None:
                self.checkpointing = self.place()
            return original(*args, **kwargs)

        return call

    def _around_parser(self) -> None:
        original = argparse.ArgumentParser.parse_known_args

        @functools.wraps(original)
        def parse_known_args(parser: Any, *args: Any, **kwargs: Any) -> Any:
            found, rest = original(parser, *args, **kwargs)
            name = batch_argument(found)
            if name is not None:
                options = [action.option_strings for action in parser._actions if action.dest == name]
                flags = [flag for flag in options[0] if flag.startswith("--")] if options else []
                self.batch = {"option": flags[0] if flags else name, "value": getattr(found, name)}
            return found, rest

        argparse.ArgumentParser.parse_known_args = parse_known_args  # type: ignore[method-assign,assignment]

    def _around_prefetching(self) -> None:
        kind: Any = fsdp.FSDPModule
        original = kind.set_modules_to_forward_prefetch

        @functools.wraps(original)
        def noted(module: Any, modules: Any) -> None:
            self.prefetching = self.prefetching or self.place()
            original(module, modules)

        kind.set_modules_to_forward_prefetch = noted


def _told(kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments that variations change, as plain values."""
    found: dict[str, Any] = {}
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
