"""Whether gradients are reduced over the ranks: what switches that off, and whether a step ever has it on.
Whether the optimizer has any gradient as it steps."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed.fsdp as fsdp
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

Place = dict[str, Any]
_SWITCHES = ("set_requires_gradient_sync", "set_requires_all_reduce")


class Syncs:
    """Notes them. `place` tells the script's line that runs."""

    def __init__(self, place: Callable[[], Place]) -> None:
        self._place = place
        self._off: dict[str, Place] = {}
        """Where each switch that is off was switched."""
        self._last_off: Place | None = None
        self._reduced = self._alone = 0
        """Calls of backward whose gradients were reduced, and others."""
        self._stepped: Place | None = None
        self._trained = False
        for name in _SWITCHES:
            self._around_switch(name)
        for kind in (fsdp.FullyShardedDataParallel, nn.parallel.DistributedDataParallel):
            self._around_no_sync(kind)
        self._around_backward()
        register_optimizer_step_post_hook(self._after_step)

    def _around_switch(self, name: str) -> None:
        kind: Any = fsdp.FSDPModule
        original = getattr(kind, name)

        @functools.wraps(original)
        def switch(module: Any, wanted: bool, *args: Any, **kwargs: Any) -> None:
            original(module, wanted, *args, **kwargs)
            if wanted:
                self._off.pop(name, None)
            else:
                self._off[name] = self._place()

        setattr(kind, name, switch)

    def _around_no_sync(self, kind: Any) -> None:
        original = kind.no_sync

        @contextlib.contextmanager
        def no_sync(model: Any) -> Iterator[None]:
            before = self._off.get("no_sync")
            self._off["no_sync"] = self._place()
            try:
                with original(model):
                    yield
            finally:
                self._off.pop("no_sync")
                if before is not None:
                    self._off["no_sync"] = before

        kind.no_sync = functools.wraps(original)(no_sync)

    def _around_backward(self) -> None:
        original = torch.autograd.backward

        @functools.wraps(original)
        def backward(*args: Any, **kwargs: Any) -> Any:
            if self._off:
                self._alone += 1
                self._last_off = next(iter(self._off.values()))
            else:
                self._reduced += 1
            return original(*args, **kwargs)

        torch.autograd.backward = backward

    def _after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self._trained:
            return
        parameters = [each for group in optimizer.param_groups for each in group["params"]]
        self._trained = not parameters or any(each.grad is not None for each in parameters)
        self._stepped = self._place()

    def to_dict(self, steps: int) -> dict[str, Any]:
        """`never_reduced`: where it was switched off; `without_gradients`: where an optimizer steps and has
        none; `backwards`: how many a step, all of them reduced."""
        never = self._last_off if self._alone and not self._reduced else None
        return {
            "never_reduced": never,
            "without_gradients": None if self._trained else self._stepped,
            "backwards": self._reduced / steps if steps and not self._alone else None,
        }
