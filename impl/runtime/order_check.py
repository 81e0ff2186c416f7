"""Do all ranks run the same units in the same order? Checked on demand: asking costs a collective a unit.

Ranks that enter different units issue different collectives, and hang until the process group's timeout.
With ``TORCH_DISTRIBUTED_DEBUG=DETAIL`` the ranks of a shard group compare, up to the end of the first
backward, which unit each of them enters, and at the end of forward that all of them are done::

    rank 0    root   blocks.0   blocks.1   end
    rank 1    root   blocks.1              <- all ranks raise, naming both

Afterwards each rank compares its own order with that of its first iteration, and warns once: prefetch and its
memory go by the recorded order.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from .stage import Stage

_log = logging.getLogger(__name__)
_END = -1


def order_check(stages: Sequence[Stage]) -> OrderCheck | None:
    """The check of a tree of stages, ``None`` where it was not asked for."""
    if not dist.is_initialized() or dist.get_debug_level() != dist.DebugLevel.DETAIL:
        return None
    return OrderCheck(stages)


class OrderCheck:
    """See the head of this file."""

    def __init__(self, stages: Sequence[Stage]) -> None:
        self._stages = stages
        self._numbers = {stage: number for number, stage in enumerate(stages)}
        self._compares = True
        self._expected: list[int] = []
        self._order: list[int] = []
        self._warned = False
        self._group: ProcessGroup | None = None

    def enter(self, stage: Stage) -> None:
        """A stage's forward starts; raises ``RuntimeError`` if other ranks are at another one."""
        if stage.units:
            self._group = stage.units[0].groups.shard or self._group
            self._compare(self._numbers[stage], stage.device)

    def leave(self) -> None:
        """The outermost forward is done; raises ``RuntimeError`` if other ranks are not done."""
        self._compare(_END, self._stages[0].device)

    def end_iteration(self) -> None:
        """Backward is done."""
        if self._compares:
            self._compares = False
            self._expected = self._order
        elif self._order != self._expected and not self._warned:
            self._warned = True
            _log.warning(
                "the order of units changed: %s in this iteration, %s in the first one",
                self._titles(self._order),
                self._titles(self._expected),
            )
        self._order = []

    def _compare(self, number: int, device: torch.device) -> None:
        if torch.is_grad_enabled():  # forwards without one have no backward that would end the iteration
            self._order.append(number)
        if not self._compares or self._group is None:
            return
        mine = torch.tensor([number], dtype=torch.int64, device=device)
        everyone = [torch.empty_like(mine) for _ in range(self._group.size())]
        dist.all_gather(everyone, mine, group=self._group)
        numbers = [int(each) for each in everyone]
        if len(set(numbers)) > 1:
            ranks = dist.get_process_group_ranks(self._group)
            at = ", ".join(f"rank {r} {self._title(n)}" for r, n in zip(ranks, numbers, strict=True))
            raise RuntimeError(f"ranks do not run the same units in the same order: {at}")

    def _title(self, number: int) -> str:
        return "ended its forward" if number == _END else f"is at unit '{self._stages[number].units[0].name}'"

    def _titles(self, numbers: Sequence[int]) -> list[str]:
        return [self._stages[number].units[0].name for number in numbers if number != _END]
