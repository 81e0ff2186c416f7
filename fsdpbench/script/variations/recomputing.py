"""Activation checkpointing, put in and taken out."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch.utils.checkpoint as torch_checkpoint
from torch import nn

from fsdpbench.script.interposing.blocks import has_units
from fsdpbench.script.interposing.calls import around_fsdp1, around_fully_shard
from fsdpbench.script.interposing.checkpoints import replace_checkpoint
from fsdpbench.torch_internals import checkpoint_wrappers as wrappers

_checkpoint = torch_checkpoint.checkpoint


class Checkpointed:
    """Every unit that is wrapped (`fully_shard`, FSDP1's wrapper) and holds none recomputes its forward."""

    def __init__(self) -> None:
        self.count = 0
        around_fully_shard(self._unit)
        around_fsdp1(self._fsdp1_unit)

    def _fsdp1_unit(self, module: Any, kwargs: dict[str, Any]) -> None:
        if kwargs.get("auto_wrap_policy") is None:
            self._unit(module, kwargs)

    def _unit(self, module: Any, kwargs: dict[str, Any]) -> None:
        modules: Sequence[nn.Module] = module if isinstance(module, list | tuple) else [module]
        for each in modules:
            if not has_units(each) and not hasattr(each, "_checkpoint_wrapped_module"):
                forward = each.forward
                each.forward = functools.partial(_checkpoint, forward, use_reentrant=False)
                self.count += 1


class NotCheckpointed:
    """Of what `checkpoint`, its wrappers and `apply_activation_checkpointing` would recompute, every first
    (all) or second one is not."""

    def __init__(self, every: int) -> None:
        self.count = 0
        self._every = every
        self._seen = 0
        self._checkpoint = torch_checkpoint.checkpoint
        self._wrapper: Any = wrappers.checkpoint_wrapper
        self._apply: Any = wrappers.apply_activation_checkpointing
        for module, name, function in (
            (torch_checkpoint, "checkpoint_sequential", self._sequence),
            (wrappers, "checkpoint_wrapper", self._wrapped),
            (wrappers, "apply_activation_checkpointing", self._applied),
        ):
            setattr(module, name, function)
        replace_checkpoint(self._function)

    def _leaves_out(self) -> bool:
        self._seen += 1
        left_out = self._seen % self._every == 0
        self.count += left_out
        return left_out

    def _function(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        if not self._leaves_out():
            return self._checkpoint(function, *args, **kwargs)
        return function(
            *args, **{name: value for name, value in kwargs.items() if name not in _OF_CHECKPOINT}
        )

    def _sequence(self, functions: Any, segments: int, input: Any, **kwargs: Any) -> Any:
        for function in functions:
            input = self._function(function, input, **kwargs)
        return input

    def _wrapped(self, module: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        made: nn.Module = module if self._leaves_out() else self._wrapper(module, *args, **kwargs)
        return made

    def _applied(self, model: nn.Module, *args: Any, **kwargs: Any) -> None:
        if self._every == 1:
            self.count += 1
            return
        check = kwargs.get("check_fn", lambda module: True)
        kwargs["check_fn"] = lambda module: check(module) and not self._leaves_out()
        self._apply(model, *args, **kwargs)


_OF_CHECKPOINT = (
    "use_reentrant", "context_fn", "determinism_check", "debug", "early_stop", "preserve_rng_state",
)  # fmt: skip
