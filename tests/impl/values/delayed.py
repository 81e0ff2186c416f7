"""Collectives whose result is not there before they are waited for, the same on every run.

What is gathered or reduced into shows NaN until ``wait`` returns, and memory that is taken is filled with
NaN: whatever reads one of them too early computes NaN, where gloo would mostly have been quick enough.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from fsdpbench.impl.collectives import comm
from fsdpbench.impl.runtime.buffer import FlatBuffer

NAN = float("nan")


class LateWork(dist.Work):
    """Gives ``targets`` what is in ``sources`` when it is waited for."""

    def __init__(self, work: Any, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._work, self._pairs = work, list(zip(targets, sources, strict=True))
        for target in targets:
            _spoil(target)

    def wait(self, *timeout: Any) -> bool:
        self._work.wait(*timeout)
        with torch.no_grad():
            for target, source in self._pairs:
                target.copy_(source)
        self._pairs.clear()
        return True


def _spoil(tensor: torch.Tensor) -> None:
    if tensor.is_floating_point():
        tensor.detach().fill_(NAN)


def _late(function: Any) -> Any:
    """A collective of (output, input, ...) or (outputs, inputs, ...) that arrives late."""

    def call(output: Any, source: Any, *arguments: Any, **named: Any) -> Any:
        outputs = output if isinstance(output, list) else [output]
        sources = source if isinstance(source, list) else [source]
        made = [torch.empty_like(each) for each in outputs]
        given = [each.clone() for each in sources]  # a part of the output may be the input
        lists = isinstance(output, list)
        work = function(made if lists else made[0], given if lists else given[0], *arguments, **named)
        if work is None:
            for target, value in zip(outputs, made, strict=True):
                target.copy_(value)
            return None
        return LateWork(work, outputs, made)

    return call


def _late_broadcasts(parts: Sequence[torch.Tensor], group: Any) -> Any:
    mine = group.rank()
    made = [part if rank == mine else torch.empty_like(part) for rank, part in enumerate(parts)]
    sent = [part.clone() if rank == mine else part for rank, part in enumerate(made)]
    works = [dist.broadcast(p, group=group, group_src=r, async_op=True) for r, p in enumerate(sent)]
    others = [rank for rank in range(len(parts)) if rank != mine]
    return LateWork(comm.Works(works), [parts[rank] for rank in others], [made[rank] for rank in others])


def _taken_spoilt(take: Any) -> Any:
    def call(self: FlatBuffer) -> None:
        new = self.tensor.untyped_storage().size() == 0
        take(self)
        if new:
            _spoil(self.tensor)

    return call


@contextmanager
def late_collectives() -> Iterator[None]:
    """Inside, collectives of FSDP arrive when they are waited for."""
    with ExitStack() as stack:
        for name in ("all_gather", "reduce_scatter", "all_gather_grouped", "reduce_scatter_grouped"):
            stack.enter_context(patch.object(comm, name, _late(getattr(comm, name))))
        stack.enter_context(patch.object(comm, "gather_by_broadcasts", _late_broadcasts))
        stack.enter_context(patch.object(FlatBuffer, "take", _taken_spoilt(FlatBuffer.take)))
        yield
