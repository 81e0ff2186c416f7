"""Variations of what a script keeps from step to step: tensors with their graphs, tensors on the device."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Iterator

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

_FIRST = 2
"""The step whose end shows what is there always (shards, constants); later ones show what a loop adds."""


class NotKept:
    """What is alive at the end of a step is detached from its graph; with `host`, what is alive at the end of
    the next one too is moved to the host."""

    def __init__(self, *, host: bool) -> None:
        self.count = 0
        self._host = host
        self._steps = 0
        self._seen: dict[int, weakref.ref[torch.Tensor]] = {}
        """By identity: at the end of the last step, and `_always` at the end of the second one."""
        self._always: dict[int, weakref.ref[torch.Tensor]] = {}
        register_optimizer_step_post_hook(lambda optimizer, args, kwargs: self._step_ended())

    def _step_ended(self) -> None:
        self._steps += 1
        seen = {}
        for each in _kept():
            if each.grad_fn is not None:
                with contextlib.suppress(RuntimeError):  # a view cannot be
                    each.detach_()
                    self.count += 1
            if self._host and _holds(self._seen, each) and not _holds(self._always, each):
                # Without memory of this machine, and without the copy's time.
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
    """Tensors of the device that are neither parameters nor gradients."""
    found = [each for each in gc.get_objects() if type(each) is torch.Tensor]
    for each in found:
        if not each.is_cpu and not (each.is_leaf and each.requires_grad):
            yield each
