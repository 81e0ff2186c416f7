"""Whose trace a file is: rank and world size, as the file and its name tell."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_IN_NAME = re.compile(r"rank[-_]?(\d+)", re.IGNORECASE)
_MOST_RANKS = 2**31


@dataclass(frozen=True)
class Identity:
    """None where the file does not tell, or tells what cannot be."""

    rank: int | None
    world_size: int | None
    problems: tuple[str, ...]
    remarks: tuple[str, ...]


def identify(name: str, distributed: Mapping[str, Any]) -> Identity:
    """From the file's name and its "distributedInfo"."""
    problems: list[str] = []
    remarks: list[str] = []
    rank = _number(distributed, "rank", 0, problems)
    world_size = _number(distributed, "world_size", 1, problems)
    if rank is not None and world_size is not None and rank >= world_size:
        problems.append(f"the file says that it is of rank {rank} of {world_size} ranks")
    found = _IN_NAME.search(name)
    named = int(found[1]) if found and len(found[1]) < 10 else None
    if rank is None:
        rank = named
    elif named is not None and named != rank:
        remarks.append(f"the file's name says rank {named}, its content rank {rank}, which counts")
    return Identity(rank, world_size, tuple(problems), tuple(remarks))


def _number(distributed: Mapping[str, Any], key: str, least: int, problems: list[str]) -> int | None:
    value = distributed.get(key)
    if value is None:
        return None
    if type(value) is int and least <= value < _MOST_RANKS:
        return value
    problems.append(f"the file's {key} is {str(value)[:40]!r}, which cannot be")
    return None
