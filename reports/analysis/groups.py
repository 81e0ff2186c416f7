"""Which ranks a collective is among, from the profiler's metadata of its process group.

torch writes the list of ranks as text, `[0, 1, 2, 3]`, of large groups only a part: `[0, 8, 16, ..., 504]`.
"""

from __future__ import annotations

from reports.trace import CollectiveInfo


def group_ranks(info: CollectiveInfo) -> tuple[int, ...] | None:
    """The ranks of the group; None where the trace does not tell all of them.

    A shortened list is completed if it is evenly spaced and then has as many ranks as the group.
    """
    words = (info.group_ranks or "").strip().strip("[]").replace(" ", "").split(",")
    if "..." not in words:
        return tuple(map(int, words)) if all(word.isdigit() for word in words) else None
    numbers = [int(word) for word in words if word.isdigit()]
    if len(numbers) < 3 or len(numbers) != len(words) - 1 or numbers[1] <= numbers[0]:
        return None
    completed = tuple(range(numbers[0], numbers[-1] + 1, numbers[1] - numbers[0]))
    return completed if len(completed) == info.group_size and set(numbers) <= set(completed) else None


def group_key(info: CollectiveInfo | None) -> str:
    """A text that is the same on all ranks of one group, as far as the trace tells; "" where it does not."""
    if info is None:
        return ""
    ranks = group_ranks(info)
    if ranks is not None:
        return f"ranks {','.join(map(str, ranks))}"
    return f"group {info.group_name}" if info.group_name else ""
