"""Do all ranks of a group mean the same? Asked before collectives that would hang or mix values otherwise."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup


def check_agreement(
    group: ProcessGroup | None, device: torch.device, items: Sequence[str], what: str
) -> None:
    """Compare ``items``, as a set, over the ranks of ``group``: a small all-reduce, a gather if they differ.

    Raises:
        RuntimeError: on all ranks alike if they differ; it names what some have and others have not.
    """
    if group is None:
        return
    ordered = sorted(items)
    digest = hashlib.blake2b("\0".join(ordered).encode(), digest_size=7).digest()
    number = int.from_bytes(digest, "little")
    extremes = torch.tensor([number, -number], dtype=torch.int64, device=device)
    dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=group)
    highest, lowest = extremes.tolist()
    if highest == -lowest:
        return
    gathered: list[list[str]] = [[] for _ in range(group.size())]
    dist.all_gather_object(gathered, ordered, group=group)
    everywhere = set.intersection(*map(set, gathered))
    lines = [f"ranks do not agree on {what}:"]
    for rank, theirs in enumerate(gathered):
        own = [item for item in theirs if item not in everywhere]
        if own:
            some = ", ".join(own[:5]) + (f" and {len(own) - 5} more" if len(own) > 5 else "")
            lines.append(f"  not on all ranks, but on rank {rank} of the group: {some}")
    raise RuntimeError("\n".join(lines))
