"""Two checks that all ranks do the same, before a mismatch would hang or mix up values.

``RankCheck`` runs before each collective if ``check_ranks`` is set. A rank may take another branch, use other
parameters, or run a module more often. Each rank first writes its next operation to the store. The first rank
of the group compares them and writes a verdict, which all ranks read::

    rank 0   "reduction of unit 'b'"                         --+
    rank 1   "reduction of unit 'b' without 'up.weight'"     --+--> verdict: the two differ, on both ranks

So every rank raises before the collective is issued. If a rank does not arrive, the others name it after a
timeout. The check uses no collective and does not synchronise with the device, but the CPU waits for the
slowest rank each time. So use it for the first iterations or for debugging.

``OrderCheck`` is on with ``TORCH_DISTRIBUTED_DEBUG=DETAIL``. Until the first backward ends, the ranks of a
shard group compare in this way which unit they enter, and at the end of forward that all of them are done::

    rank 0    root   blocks.0   blocks.1   end
    rank 1    root   blocks.1              <- all ranks raise, naming both

Later, each rank compares its order of units with that of its first iteration and warns once if it changed,
because prefetch and its memory depend on the recorded order.
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

# Number of comparisons in each group; it numbers the next comparison and is equal on all ranks.
positions: MutableMapping[ProcessGroup, int] = WeakKeyDictionary()


class RankCheck:
    """The comparisons of one tree of units.

    Args:
        iterations: number of iterations to check; ``None`` for all.
    """

    def __init__(self, iterations: int | None) -> None:
        self._left = iterations
        # Seconds that a rank waits for the others.
        self.timeout_s = 120.0

    def end_iteration(self) -> None:
        """Count an iteration."""
        if self._left is not None:
            self._left -= 1

    def agree(self, group: ProcessGroup | None, what: str) -> None:
        """Block until all ranks of ``group`` are about to do ``what``.

        Raises:
            RuntimeError: on every rank if they differ; the message has the operation of each rank.
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
        # All ranks have read the previous verdict, or they would not be here: its keys can be deleted.
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
            # The first rank waits ``timeout_s`` for the others and may have started later.
            store.wait([verdict], timedelta(seconds=2 * self.timeout_s + 5))
        except Exception:
            return error_text("agreement.missing", first, what)
        return store.get(verdict).decode()


def _describe(said: dict[int, str]) -> str:
    """Format the operation of each rank; ranks with the same one are grouped."""
    by_text: dict[str, list[int]] = {}
    for rank, text in said.items():
        by_text.setdefault(text, []).append(rank)
    return "; ".join(f"rank {some(ranks)}: {text}" for text, ranks in by_text.items())


def some(items: Sequence[object]) -> str:
    """Format the first few ``items`` and the number of the remaining ones."""
    shown = ", ".join(map(str, items[:_MOST_NAMES]))
    return shown if len(items) <= _MOST_NAMES else f"{shown} and {len(items) - _MOST_NAMES} more"


def _forget(store: Any, where: str, count: int) -> None:
    """Delete the keys of a comparison that all ranks have read."""
    for key in ("verdict", *map(str, range(count))):
        store.delete_key(f"{where}/{key}")


def without(names: Sequence[str]) -> str:
    """Return the suffix of a description that lists the parameters without a gradient."""
    quoted = [f"'{name}'" for name in names]
    return f" without a gradient for {some(quoted)}" if quoted else ""


# -- the order of units --------------------------------------------------------------------------------------


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
        """Return whether the user enabled torch's detailed debug checks."""
        return dist.is_initialized() and dist.get_debug_level() == dist.DebugLevel.DETAIL

    def enter(self, name: str, group: ProcessGroup | None) -> None:
        """Record that the forward of unit ``name`` starts. Raises RuntimeError if other ranks differ."""
        self._group = group or self._group
        if torch.is_grad_enabled():  # a forward without grad has no backward that would end the iteration
            self._order.append(name)
        self._check.agree(self._group, f"forward of unit '{name}'")

    def leave(self) -> None:
        """Record that the outermost forward is done. Raises ``RuntimeError`` if other ranks are not done."""
        self._check.agree(self._group, "end of forward")

    def end_iteration(self) -> None:
        """Save the order of the first iteration; compare later ones with it and warn once."""
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
