"""Whether all ranks are about to do the same, asked before each collective where that is switched on.

A collective that the ranks do not issue alike hangs, or mixes up gradients: one rank took another branch,
used other parameters, or ran a module more often. With ``check_ranks`` each rank first writes what it does
next into the store; the group's first rank compares, and writes what all then read::

    rank 0   "reduction of unit 'b'"                         --+
    rank 1   "reduction of unit 'b' without 'up.weight'"     --+--> verdict: the two differ, on both ranks

So every rank raises before the collective is issued, and a rank that does not come is named by the others
after a while. No collective is used for it, and no device is waited for; the CPU waits for the slowest rank
each time, which is why this is for the first iterations or for finding a fault.
"""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed import ProcessGroup

from ..shared.torch_internals import get_default_store

_AGREED = "agreed"
_MOST_NAMES = 5

_positions: MutableMapping[ProcessGroup, int] = WeakKeyDictionary()
"""How many times the ranks of a group have compared: the next comparison's number, alike on all of them."""


class RankCheck:
    """The comparisons of one tree of units.

    Args:
        iterations: how many iterations are checked; ``None`` for all.
    """

    def __init__(self, iterations: int | None) -> None:
        self._left = iterations
        self.timeout_s = 120.0
        """How long a rank waits for the others."""

    def end_iteration(self) -> None:
        """Count an iteration."""
        if self._left is not None:
            self._left -= 1

    def agree(self, group: ProcessGroup | None, what: str) -> None:
        """Return when all ranks of ``group`` are about to do ``what``.

        Raises:
            RuntimeError: on every rank, if they are not; it says who is about to do what.
        """
        if group is None or (self._left is not None and self._left <= 0):
            return
        ranks = tuple(dist.get_process_group_ranks(group))
        position = _positions[group] = _positions.get(group, 0) + 1
        store: Any = dist.PrefixStore("fsdp_rank_check", get_default_store())
        where = f"{group.group_name}/{position}"
        store.set(f"{where}/{group.rank()}", what)
        verdict = f"{where}/verdict"
        if group.rank() == 0:
            found = self._compare(store, where, ranks)
            store.set(verdict, found)
        else:
            found = self._await_verdict(store, verdict, ranks[0], what)
        if found != _AGREED:
            raise RuntimeError(found)
        if group.rank() == 0 and position > 1:
            _forget(store, f"{group.group_name}/{position - 1}", len(ranks))

    def _compare(self, store: Any, where: str, ranks: Sequence[int]) -> str:
        keys = [f"{where}/{index}" for index in range(len(ranks))]
        try:
            store.wait(keys, timedelta(seconds=self.timeout_s))
        except Exception:
            came = {
                rank: store.get(key).decode()
                for rank, key in zip(ranks, keys, strict=True)
                if store.check([key])
            }
            missing = [rank for rank in ranks if rank not in came]
            return (
                f"rank {_list(missing)} did not come to a collective of FSDP within {self.timeout_s:g} s; "
                f"rank {_list(list(came))} waited there: {_describe(came)}. Do all ranks run the same?"
            )
        said = {rank: store.get(key).decode() for rank, key in zip(ranks, keys, strict=True)}
        if len(set(said.values())) == 1:
            return _AGREED
        return (
            f"the ranks are not about to do the same: {_describe(said)}. All ranks have to use the same "
            "modules and parameters; where they cannot, call set_reduce_scatter_unused_params(True), and let "
            "every rank run every module"
        )

    def _await_verdict(self, store: Any, verdict: str, first: int, what: str) -> str:
        try:
            # The first rank waits as long for others, and began later perhaps.
            store.wait([verdict], timedelta(seconds=2 * self.timeout_s + 5))
        except Exception:
            return (
                f"rank {first} did not come to a collective of FSDP, where others wait: {what}. Do all ranks "
                "run the same modules?"
            )
        return store.get(verdict).decode()


def _describe(said: dict[int, str]) -> str:
    """Who says what, ranks that say the same together."""
    by_text: dict[str, list[int]] = {}
    for rank, text in said.items():
        by_text.setdefault(text, []).append(rank)
    return "; ".join(f"rank {_list(ranks)}: {text}" for text, ranks in by_text.items())


def _list(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:_MOST_NAMES]))
    return shown if len(ranks) <= _MOST_NAMES else f"{shown} and {len(ranks) - _MOST_NAMES} more"


def _forget(store: Any, where: str, count: int) -> None:
    """All ranks have read it: they came to the comparison after it."""
    for key in ("verdict", *map(str, range(count))):
        store.delete_key(f"{where}/{key}")


def without(names: Sequence[str]) -> str:
    """The part of a description that names the parameters without a gradient."""
    if not names:
        return ""
    shown = ", ".join(f"'{name}'" for name in names[:_MOST_NAMES])
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return f" without a gradient for {shown}{more}"
