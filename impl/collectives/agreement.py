"""Do all ranks do the same? Two checks, each before something that would hang or mix up values otherwise.

``RankCheck``, before each collective where ``check_ranks`` asks for it: one rank may take another branch, use
other parameters, or run a module more often. Each rank first writes what it does next into the store; the
group's first rank compares, and writes what all then read::

    rank 0   "reduction of unit 'b'"                         --+
    rank 1   "reduction of unit 'b' without 'up.weight'"     --+--> verdict: the two differ, on both ranks

So every rank raises before the collective is issued, and a rank that does not come is named by the others
after a while. No collective is used for it, and no device is waited for; the CPU waits for the slowest rank
each time, which is why this is for the first iterations or for finding a fault.

``OrderCheck``, with ``TORCH_DISTRIBUTED_DEBUG=DETAIL``: up to the end of the first backward the ranks of a
shard group compare so which unit each of them enters, and at the end of forward that all of them are done::

    rank 0    root   blocks.0   blocks.1   end
    rank 1    root   blocks.1              <- all ranks raise, naming both

Afterwards each rank compares its own order with that of its first iteration, and warns once: prefetch and its
memory go by the recorded order.
"""

import logging
from collections.abc import MutableMapping, Sequence
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from ..shared import error_text
from ..shared.torch_internals import get_default_store

_log = logging.getLogger(__name__)


# -- before each collective ----------------------------------------------------------------------------------

_AGREED = "agreed"
_MOST_NAMES = 5

# How many times the ranks of a group have compared: the next comparison's number, alike on all of them.
positions: MutableMapping[ProcessGroup, int] = WeakKeyDictionary()


class RankCheck:
    """The comparisons of one tree of units.

    Args:
        iterations: how many iterations are checked; ``None`` for all.
    """

    def __init__(self, iterations: int | None) -> None:
        self._left = iterations
        # How long a rank waits for the others.
        self.timeout_s = 120.0

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
        position = positions[group] = positions.get(group, 0) + 1
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
        # All ranks read the verdict before, or they would not have come to this one: it can go.
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
            return error_text(
                "agreement.late", some(missing), self.timeout_s, some(list(came)), _describe(came)
            )
        said = {rank: store.get(key).decode() for rank, key in zip(ranks, keys, strict=True)}
        if len(set(said.values())) == 1:
            return _AGREED
        return error_text("agreement.unlike", _describe(said))

    def _await_verdict(self, store: Any, verdict: str, first: int, what: str) -> str:
        try:
            # The first rank waits as long for others, and began later perhaps.
            store.wait([verdict], timedelta(seconds=2 * self.timeout_s + 5))
        except Exception:
            return error_text("agreement.missing", first, what)
        return store.get(verdict).decode()


def _describe(said: dict[int, str]) -> str:
    """Return who says what, ranks that say the same together."""
    by_text: dict[str, list[int]] = {}
    for rank, text in said.items():
        by_text.setdefault(text, []).append(rank)
    return "; ".join(f"rank {some(ranks)}: {text}" for text, ranks in by_text.items())


def some(items: Sequence[object]) -> str:
    """Return the first of ``items`` as text, and how many more there are."""
    shown = ", ".join(map(str, items[:_MOST_NAMES]))
    return shown if len(items) <= _MOST_NAMES else f"{shown} and {len(items) - _MOST_NAMES} more"


def _forget(store: Any, where: str, count: int) -> None:
    """Delete a comparison that all ranks have read: they came to the one after it."""
    for key in ("verdict", *map(str, range(count))):
        store.delete_key(f"{where}/{key}")


def without(names: Sequence[str]) -> str:
    """Return the part of a description that names the parameters without a gradient."""
    quoted = [f"'{name}'" for name in names]
    return f" without a gradient for {some(quoted)}" if quoted else ""


# -- in which order units run --------------------------------------------------------------------------------


class OrderCheck:
    """The comparison of the order in which the units of one tree run."""

    def __init__(self) -> None:
        self._check = RankCheck(iterations=1)
        self._expected: list[str] | None = None
        self._order: list[str] = []
        self._warned = False
        self._group: ProcessGroup | None = None

    @staticmethod
    def is_asked_for() -> bool:
        """Return whether the user asks torch for such checks."""
        return dist.is_initialized() and dist.get_debug_level() == dist.DebugLevel.DETAIL

    def enter(self, name: str, group: ProcessGroup | None) -> None:
        """Note that the forward of unit ``name`` starts. Raises RuntimeError if other ranks are elsewhere."""
        self._group = group or self._group
        if torch.is_grad_enabled():  # forwards without one have no backward that would end the iteration
            self._order.append(name)
        self._check.agree(self._group, f"forward of unit '{name}'")

    def leave(self) -> None:
        """Note that the outermost forward is done. Raises ``RuntimeError`` if other ranks are not done."""
        self._check.agree(self._group, "end of forward")

    def end_iteration(self) -> None:
        """Compare with the order of the first iteration, where this was another one."""
        self._check.end_iteration()
        if self._expected is None:
            self._expected = self._order
        elif self._order != self._expected and not self._warned:
            self._warned = True
            _log.warning(
                "the order of units changed: %s in this iteration, %s in the first one",
                self._order,
                self._expected,
            )
        self._order = []
