"""Backward's prefetch, put off to a stage's first gradient where memory is short until then.

While gradients of the stage before are copied: they are copied by then, and the gather takes their place. And
in the first stage: the loss and its gradient, often the peak of the step, are not there any more. On a device
this is no later, as long as the CPU runs ahead.

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

from .gradients.lent import LentMemory
from .stage import Stage


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


class LatePrefetch:
    """Puts off the prefetch of one stage at a time.

    Args:
        prefetch: issues what a stage prefetches.
    """

    def __init__(self, lent: LentMemory, prefetch: Callable[[Stage], None]) -> None:
        self._lent = lent
        self._prefetch = prefetch
        self._stage: Stage | None = None
        """The stage that prefetches at its first gradient, until it does."""
        self._first_gradients: dict[Stage, FirstGradient] = {}
        self._never: set[Stage] = set()
        self._starts = lent.lends_inputs
        """Whether backward has no gradient yet, and memory is handed over such that it depends on this."""

    def enter_backward(self, stage: Stage) -> None:
        """Another stage's backward starts."""
        late = self._stage
        if late is not None and stage.backward_position < late.backward_position:
            # It comes before that one's first gradient: it is inside, and there may be more.
            self._never.add(late)
            self._prefetch_now(late)

    def puts_off(self, stage: Stage) -> bool:
        """Whether ``stage`` should prefetch later: then ``put_off``."""
        # Where another stage is awaited, this one is around it and gathers nothing new.
        if self._stage is not None or stage in self._never:
            return False
        return self._starts or self._lent.is_copying(_stages_held(stage))

    def put_off(self, stage: Stage) -> None:
        """``stage``, whose parameters are there, prefetches at its first gradient."""
        self._stage = stage
        first = self._first_gradients.get(stage)
        if first is None:
            first = self._first_gradients[stage] = FirstGradient(self._arrived)
        first.expect(parameter for unit in stage.units for parameter in unit.unsharded)

    def after_gradients(self, stage: Stage) -> None:
        """All of the gradients of ``stage`` are there, if it has any."""
        self._starts = False
        if self._stage is stage:
            self._prefetch_now(stage)

    def end_backward(self) -> None:
        """The next backward starts with its loss."""
        self._starts = self._lent.lends_inputs

    def reset(self) -> None:
        """The iteration failed."""
        self.end_backward()
        if self._stage is not None:
            self._first_gradients[self._stage].miss()
            self._stage = None

    def _arrived(self) -> None:
        stage, self._stage = self._stage, None
        self._starts = False
        assert stage is not None
        self._lent.take_back_copied(_stages_held(stage))
        self._prefetch(stage)

    def _prefetch_now(self, stage: Stage) -> None:
        self._first_gradients[stage].miss()
        self._stage = None
        self._prefetch(stage)


def _stages_held(stage: Stage) -> int:
    """How many stages' gradients may stay kept while this one is in backward."""
    return max(unit.gradients.held for unit in stage.units) - 1
