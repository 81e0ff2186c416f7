"""The messages that say memory ran out: of torch's allocators, drivers, launchers and kernels.

    until 1.3   as until 2.0, with `C cached)`, what is reserved and not allocated
    until 2.0   Tried to allocate A (GPU 0; T total capacity; U already allocated; F free; R reserved in
    total by PyTorch)
    since 2.1   Tried to allocate A. GPU 0 has a total capacity of T of which F is free. Including
                non-PyTorch memory, this process has P memory in use. Of the allocated memory U is allocated
                by PyTorch, and C is reserved by PyTorch but unallocated.

Variants: `capacty` (2.1), a limit (`L allowed`), other processes (`Process 7 has X memory in use`), private
pools of CUDA graphs, other back ends (HIP, XPU, NPU) instead of CUDA. Other forms say less (`_FORMS`).
Source: c10/cuda/CUDACachingAllocator.cpp, c10/cuda/CUDAMallocAsyncAllocator.cpp, c10/core/impl/alloc_cpu.cpp,
aten/src/ATen/mps/MPSAllocator.mm of these releases."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from fsdpbench.base.numbers import LARGEST_INTEGER, whole_number, with_unit
from fsdpbench.base.reading import read_rows

_UNITS = {"bytes": 1}
_UNITS |= {f"{letter}{b}": 1 << 10 * power for power, letter in enumerate("kmgtpe", 1) for b in ("ib", "b")}
_NUMBER = r"[\d.]++ (?:bytes|[KMGTPE]i?B)"
_SIZE = rf"(?<![\d.])({_NUMBER})"  # one scan a run of digits: without the look behind one each digit
_START = re.compile(
    r"\b([A-Z]{3,5}) out of memory\. Tried to allocate (?:more than 1EB memory|" + _SIZE + ")"
)
_OLD = re.compile(rf"\(GPU +(\d+); {_SIZE} total capacity; {_SIZE} already allocated;(?: {_SIZE} free;)?")
_OLD_RESERVED = re.compile(rf"; {_SIZE} reserved in total by PyTorch\)")
_OLD_CACHED = re.compile(rf"; {_SIZE} cached\)")
_CAPACITY = re.compile(rf"GPU (\d+) has a total capac(?:i)?ty of {_SIZE}(?: of which {_SIZE} is free)?")
_IN_USE = re.compile(rf"this process has {_SIZE} memory in use")
_OTHERS = re.compile(rf"Process (\d+) has {_SIZE} memory in use")
_ALLOCATED = re.compile(rf"Of the allocated memory {_SIZE} is allocated by PyTorch")
_UNALLOCATED = re.compile(rf"and {_SIZE} is reserved by PyTorch but unallocated")
_POOLS = re.compile(rf"with {_SIZE} allocated in private pools")
_ALLOWED = re.compile(rf"[.;] {_SIZE} allowed;")
_VARIABLE = re.compile(r"try setting (PYTORCH_(?:[A-Z]{2,5}_)?ALLOC_CONF)=")


def _forms() -> dict[str, re.Pattern[str]]:
    """Read the table: alternatives of each source; `<asked>` is a size, a group of that name."""
    kinds: dict[str, list[str]] = {}
    number = _NUMBER.replace("\\", r"\\")  # of a replacement
    for row in read_rows(Path(__file__).parents[1] / "oom_forms.csv"):
        kinds.setdefault(row["source"], []).append(
            re.sub(r"(?<!P)<(\w+)>", rf"(?<![\\d.])(?P<\1>{number})", row["pattern"])
        )
    return {source: re.compile("|".join(parts)) for source, parts in kinds.items()}


_FORMS = _forms()
"""Forms with at most a few figures, in groups of the names of a message's fields. cudaMallocAsync: torch's
other allocator. vLLM: its own budget, in which torch found memory. pinned: page-locked host memory. driver: a
bare error, also of NCCL's and of libraries. killed: the host's kernel ended a process for its memory.
SIGKILL: something ended it, and does not say why. shm: `/dev/shm`, where loaders and NCCL exchange data."""
_RENAMED = {"mapped": "asked", "array": "asked", "task": "rank"}
_LONGEST = 2000


@dataclass(frozen=True)
class OomMessage:
    """One message. Bytes; None is what it does not say, or what contradicts itself.

    source: the back end (`CUDA`, `HIP`, `XPU`, ...) of torch's caching allocator, or a key of `_FORMS`.
    process: what this process holds in all, others: what each other process holds (in number of
    `others_seen`, summed). allowed: the limit of `set_per_process_memory_fraction`. private_pools: of CUDA
    graphs, part of allocated. rank: where the message itself names it. old: in the form until torch 2.0.
    variable: the one that the message proposes. position: where it begins in the text.
    """

    source: str
    asked: int | None = None
    gpu: int | None = None
    total: int | None = None
    free: int | None = None
    process: int | None = None
    others: int | None = None
    others_seen: int = 0
    allowed: int | None = None
    allocated: int | None = None
    unallocated: int | None = None
    reserved: int | None = None
    private_pools: int | None = None
    rank: int | None = None
    old: bool = False
    variable: str | None = None
    position: int = 0

    @property
    def outside(self) -> int | None:
        """Return the bytes in use outside the allocator: context, NCCL, libraries; also of processes that the
        driver does not list, where it does not say what this one holds."""
        if self.reserved is None:
            return None
        used = self.process
        if used is None and self.total is not None and self.free is not None:
            used = self.total - self.free - (self.others or 0)
        return None if used is None else max(used - self.reserved, 0)

    @property
    def short(self) -> int | None:
        """Return by how many bytes the free memory misses the request."""
        if self.asked is None or self.free is None:
            return None
        return max(self.asked - self.free, 0)

    @property
    def weight(self) -> tuple[bool, bool, bool]:
        """Return what orders messages by what they say, the least first."""
        return self.asked is not None, self.total is not None, self.source not in ("SIGKILL", "driver")

    def to_dict(self) -> dict[str, object]:
        """Return all figures, the derived ones too."""
        hidden = ("position", "rank", "old", "variable")
        values = {each.name: getattr(self, each.name) for each in fields(self) if each.name not in hidden}
        return values | {"outside": self.outside, "short": self.short}


def find_messages(text: str) -> list[OomMessage]:
    """Return every message in a text, in its order; a message that several ranks log counts each time. White
    space in the text has to be single spaces."""
    starts = list(_START.finditer(text))
    found = []
    for index, start in enumerate(starts):
        end = starts[index + 1].start() if index + 1 < len(starts) else len(text)
        found.append(_of_allocator(start, text[start.start() : min(end, start.start() + _LONGEST)]))
    for source, form in _FORMS.items():
        found += [_of_form(source, match) for match in form.finditer(text)]
    return sorted(found, key=lambda message: message.position)


def _of_form(source: str, match: re.Match[str]) -> OomMessage:
    named = {_RENAMED.get(name, name): text for name, text in match.groupdict().items() if text is not None}
    figures = {name: _whole(text) if text.isdigit() else _bytes(text) for name, text in named.items()}
    if source == "vLLM" and "free" in named:
        figures["free"] = _bytes(f"{named['free']} GiB")
    process = _sum(figures.get("reserved"), figures.pop("beside", None))
    known: Mapping[str, Any] = {**figures, "process": process, "position": match.start()}
    return OomMessage(source, **known)


def _of_allocator(start: re.Match[str], text: str) -> OomMessage:
    asked = None if start[2] is None else _bytes(start[2])
    old, variable = _OLD.search(text), _VARIABLE.search(text)
    message = OomMessage(start[1], asked=asked, allowed=_one(_ALLOWED, text), position=start.start())
    if old:
        allocated, reserved, cached = _bytes(old[3]), _one(_OLD_RESERVED, text), _one(_OLD_CACHED, text)
        unallocated = cached
        if reserved is not None and allocated is not None:
            unallocated = max(reserved - allocated, 0)
        return replace(
            message,
            gpu=_whole(old[1]),
            total=_bytes(old[2]),
            free=_bytes(old[4]) if old[4] else None,
            allocated=allocated,
            unallocated=unallocated,
            reserved=_sum(allocated, unallocated),
            old=True,
        )
    capacity = _CAPACITY.search(text)
    others = [size for _, held_text in _OTHERS.findall(text) if (size := _bytes(held_text)) is not None]
    total = _bytes(capacity[2]) if capacity else None
    held, unallocated = _one(_ALLOCATED, text), _one(_UNALLOCATED, text)
    process, least = _one(_IN_USE, text), (held or 0) + (unallocated or 0)
    if process is not None and (process < 0.99 * least or process > (total or process)):
        process = None  # in a container the driver does not find the process, and reports 0 bytes
    if process is None and total is not None and held is not None:
        process = _this_process(others, total, least)
    return replace(
        message,
        gpu=_whole(capacity[1]) if capacity else None,
        total=total,
        free=_bytes(capacity[3]) if capacity and capacity[3] else None,
        process=process,
        others=sum(others) if others else None,
        others_seen=len(others),
        allocated=held,
        unallocated=unallocated,
        reserved=_sum(held, unallocated),
        private_pools=_one(_POOLS, text),
        variable=variable[1] if variable else None,
    )


def _this_process(others: list[int], total: int, reserved: int) -> int | None:
    """Take this process out of `others` and return its bytes; None where it is not among them. In a container
    the driver knows it by another number; all processes then hold more than the GPU has."""
    if sum(others) + reserved <= total:
        return None
    holders = [size for size in others if size >= reserved]
    if not holders:
        return None
    ours = min(holders)
    others.remove(ours)
    return ours


def _sum(first: int | None, second: int | None) -> int | None:
    return None if first is None or second is None else first + second


def _whole(text: str) -> int | None:
    try:
        return whole_number(text, 0)
    except ValueError:
        return None


def _one(pattern: re.Pattern[str], text: str) -> int | None:
    found = pattern.search(text)
    return _bytes(found[1]) if found else None


def _bytes(text: str) -> int | None:
    """Return the size in bytes; None where the text is not a size (`1.2.3 GiB`), or beyond 2^63."""
    try:
        size = with_unit(text, _UNITS)
    except ValueError:
        return None
    return size if size <= LARGEST_INTEGER else None
