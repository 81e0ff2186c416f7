"""What switches the reduction of gradients off, and whether it was off in the last call of backward."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed.fsdp as fsdp
from torch import nn

from fsdpbench.script.observed.exchange import Exchange
from fsdpbench.script.observed.wrappers import Place, Wrapped

_SWITCHES = ("set_requires_gradient_sync", "set_requires_all_reduce")
_Off = dict[tuple[str, int], tuple[weakref.ref[nn.Module], Place]]


class Syncs:
    """Notes the switches. `place` is of the script's line that runs; `exchange` counts calls of backward."""

    def __init__(self, place: Callable[[], Place], exchange: Exchange) -> None:
        self._place, self._exchange = place, exchange
        self._off: _Off = {}
        self.last_off: _Off = {}
        """What was off in the last call of backward: by switch and module, with the line of the switch."""
        for name in _SWITCHES:
            self._around_switch(name)
        for kind in (fsdp.FullyShardedDataParallel, nn.parallel.DistributedDataParallel):
            self._around_no_sync(kind)
        self._around_backward()

    def off(self, parameter: Any, wrapped: Wrapped | None) -> Place | None:
        """Where the reduction of a parameter's gradient was switched off, in the last call of backward."""
        module = None if wrapped is None else wrapped.module()
        for (name, _), (switched, place) in self.last_off.items():
            found = switched()
            if found is not None and (found is module or (name == "no_sync" and holds(found, parameter))):
                return {**place, "switch": name}
        return None

    def _around_switch(self, name: str) -> None:
        kind: Any = fsdp.FSDPModule
        original = getattr(kind, name)

        @functools.wraps(original)
        def switch(module: Any, wanted: bool, *args: Any, recurse: bool = True, **kwargs: Any) -> None:
            original(module, wanted, *args, recurse=recurse, **kwargs)
            for each in module.modules() if recurse else [module]:
                self._off.pop((name, id(each)), None)
                if not wanted and isinstance(each, kind):
                    self._off[name, id(each)] = weakref.ref(each), self._place()

        setattr(kind, name, switch)

    def _around_no_sync(self, kind: Any) -> None:
        original = kind.no_sync

        @contextlib.contextmanager
        def no_sync(model: Any, place: Place) -> Iterator[None]:
            key = "no_sync", id(model)
            before = self._off.get(key)
            self._off[key] = weakref.ref(model), place
            try:
                with original(model):
                    yield
            finally:
                self._off.pop(key)
                if before is not None:
                    self._off[key] = before

        kind.no_sync = functools.wraps(original)(lambda model: no_sync(model, self._place()))

    def _around_backward(self) -> None:
        original = torch.autograd.backward

        @functools.wraps(original)
        def backward(*args: Any, **kwargs: Any) -> Any:
            self._exchange.backwards += 1
            self.last_off = dict(self._off)
            return original(*args, **kwargs)

        torch.autograd.backward = backward


def holds(module: nn.Module | None, parameter: Any) -> bool:
    """Whether a parameter is one of a module's."""
    return module is not None and any(each is parameter for each in module.parameters())
