"""The moment in backward when a stage's first gradient is there.

Where backward begins in a stage is not known beforehand, and a hook on each parameter would be a call each.
So all parameters are asked once, and later the one alone that was first::

    first backward     w1  w2  w3  norm      all have a hook; norm is first
    later              norm                  until it does not come: then all are asked again
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle


class FirstGradient:
    """Calls ``arrived`` at the first gradient after ``expect``, once."""

    def __init__(self, arrived: Callable[[], None]) -> None:
        self._arrived = arrived
        self._hooks: dict[torch.Tensor, RemovableHandle] = {}
        self.expected = False

    def expect(self, parameters: Iterable[nn.Parameter]) -> None:
        """A backward starts that may give these ``parameters`` gradients."""
        self.expected = True
        if not self._hooks:
            for parameter in parameters:
                if parameter.requires_grad:
                    hook = parameter.register_post_accumulate_grad_hook(self._accumulated)
                    self._hooks[parameter] = hook

    def _accumulated(self, parameter: torch.Tensor) -> None:
        if not self.expected:
            return
        self.expected = False
        if len(self._hooks) > 1:
            own = self._hooks.pop(parameter)
            self.forget()
            self._hooks[parameter] = own
        self._arrived()

    def miss(self) -> None:
        """None came: the parameter that is asked is no longer the first, or none is trained."""
        self.expected = False
        self.forget()

    def forget(self) -> None:
        """Ask no parameter any more."""
        for hook in self._hooks.values():
            hook.remove()
        self._hooks.clear()
