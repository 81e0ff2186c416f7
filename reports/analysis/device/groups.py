"""Which ranks a collective is among, from the profiler's metadata of its process group.

torch writes the list of ranks as text, `[0, 1, 2, 3]`, of large groups only a part: `[0, 8, 16, ..., 504]`.
"""

from __future__ import annotations

from functools import lru_cache

from fsdpbench.reports.trace import CollectiveInfo

MOST_RANKS = 1 << 16
"""More ranks than this are not listed: a shortened list of few characters may stand for any number."""


def group_ranks(info: CollectiveInfo) -> tuple[int, ...] | None:
    """The ranks of the group; None where the trace does not tell all of them.

    A shortened list is completed if it is evenly spaced and then has as many ranks as the group.
    """
    return _listed(info.group_ranks or "", info.group_size)


@lru_cache(maxsize=16)
def _listed(text: str, size: int | None) -> tuple[int, ...] | None:
    words = text.strip().strip("[]").replace(" ", "").split(",")
    numbers = [int(word) for word in words if word.isdecimal() and len(word) < 10]
    if "..." not in words:
        return tuple(numbers) if len(numbers) == len(words) <= MOST_RANKS else None
    if len(numbers) < 3 or len(numbers) != len(words) - 1 or numbers[1] <= numbers[0]:
        return None
    completed = range(numbers[0], numbers[-1] + 1, numbers[1] - numbers[0])
    if len(completed) != size or size > MOST_RANKS or not all(number in completed for number in numbers):
        return None
    return tuple(completed)


def group_key(info: CollectiveInfo | None) -> str:
    """A text that is the same on all ranks of one group, as far as the trace tells; "" where it does not."""
    if info is None:
        return ""
    ranks = group_ranks(info)
    if ranks is not None:
        return f"ranks {','.join(map(str, ranks))}"
    return f"group {info.group_name}" if info.group_name else ""
