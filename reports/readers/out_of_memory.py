"""The messages of torch's allocators when memory runs out, of torch 1.0 to 2.14.

    until 1.3   as until 2.0, with `C cached)`, what is reserved and not allocated
    until 2.0   Tried to allocate A (GPU 0; T total capacity; U already allocated; F free; R reserved in
    total by PyTorch)
    since 2.1   Tried to allocate A. GPU 0 has a total capacity of T of which F is free. Including
                non-PyTorch memory, this process has P memory in use. Of the allocated memory U is allocated
                by PyTorch, and C is reserved by PyTorch but unallocated.

Variants: `capacty` (2.1), a limit (`L allowed`), other processes (`Process 7 has X memory in use`), private
pools of CUDA graphs, HIP and XPU instead of CUDA. Other forms tell less: MPS, the CPU's allocator, and the
driver's own "CUDA error: out of memory", which NCCL and libraries meet too; the kernel's or Slurm's that it
ended a process since host memory was used up; a loader's, of shared memory.
Source: c10/cuda/CUDACachingAllocator.cpp, c10/core/impl/alloc_cpu.cpp, aten/src/ATen/mps/MPSAllocator.mm
of these releases."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, fields
from typing import Any

from fsdpbench.base.numbers import LARGEST_INTEGER, whole_number, with_unit

_UNITS = {"bytes": 1}
_UNITS |= {f"{letter}{b}": 1 << 10 * power for power, letter in enumerate("kmgtpe", 1) for b in ("ib", "b")}
_SIZE = r"(?<![\d.])([\d.]++ (?:bytes|[KMGTPE]i?B))"
"""One scan a run of digits: without the look behind, each of its digits would begin another."""
_START = re.compile(
    r"\b(CUDA|HIP|XPU) out of memory\. Tried to allocate (?:more than 1EB memory|" + _SIZE + ")"
)
_OLD = re.compile(rf"\(GPU (\d+); {_SIZE} total capacity; {_SIZE} already allocated; {_SIZE} free; ")
_OLD_RESERVED = re.compile(rf"{_SIZE} reserved in total by PyTorch\)")
_OLD_CACHED = re.compile(rf"{_SIZE} cached\)")
_CAPACITY = re.compile(rf"GPU (\d+) has a total capac(?:i)?ty of {_SIZE}(?: of which {_SIZE} is free)?")
_IN_USE = re.compile(rf"this process has {_SIZE} memory in use")
_OTHERS = re.compile(rf"Process (\d+) has {_SIZE} memory in use")
_ALLOCATED = re.compile(rf"Of the allocated memory {_SIZE} is allocated by PyTorch")
_UNALLOCATED = re.compile(rf"{_SIZE} is reserved by PyTorch but unallocated")
_POOLS = re.compile(rf"with {_SIZE} allocated in private pools")
_ALLOWED = re.compile(rf"{_SIZE} allowed;")
_MPS = re.compile(
    rf"MPS backend out of memory \(MPS allocated: {_SIZE}, other allocations: {_SIZE}, "
    rf"max allowed: {_SIZE}\)\."
    rf" Tried to allocate {_SIZE}"
)
_CPU = re.compile(
    r"DefaultCPUAllocator: (?:can't allocate memory: you tried to allocate|not enough memory: you "
    r"tried to allocate)"
    r" (\d+) bytes|unable to mmap (\d+) bytes from file <[^>]{0,4096}+>: Cannot allocate memory"
)
_KILLED = re.compile(
    r"Out of memory: Kill(?:ed)? process \d+|Memory cgroup out of memory: Kill(?:ed)? process \d+"
    r"|Detected \d+ oom[_-]kill event|have been OOM Killed"
    r"|worker \(pid[^)]{0,200}+\) is killed by signal: Killed"
)
"""The host had no memory left, and its kernel ended a process."""
_SHARED = re.compile(
    r"workers are out of shared memory|insufficient shared memory \(shm\)"
    r"|creating shared memory segment (?=\S*nccl)\S*+ \(size (\d+)\)"
)
"""`/dev/shm` was full: what loaders hand over batches in, and NCCL's ranks of one machine talk through."""
_DRIVER = re.compile(
    r"(?:CUDA|HIP)(?: driver)? error: out of memory"
    r"|(?:Cuda|CUDA|HIP|Hip) failure:? (?:\d+ )?'?out of memory'?"
    r"|CUDA_ERROR_OUT_OF_MEMORY|cudaErrorMemoryAllocation|hipErrorOutOfMemory|hipErrorMemoryAllocation"
    r"|(?:CUBLAS|CUSOLVER|CUSPARSE|CUDNN|HIPBLAS)_STATUS_ALLOC_FAILED|rocblas_status_memory_error"
    r"|miopenStatusAllocFailed|Triton Error \[(?:CUDA|HIP)\]: out of memory"
    r"|Failed to (?:CUDA|HIP) (?:calloc|malloc|host alloc)(?: async)? (?P<asked>\d+) bytes"
)
_LAUNCHERS_MARK = re.compile(r"^[ \t]*+\[(?:rank|default)\d+\]:", re.MULTILINE)
"""What torch and its launcher put before each line, also inside of a message that was folded."""
_LONGEST = 2000


@dataclass(frozen=True)
class OomMessage:
    """One message. Bytes; None is what it does not tell.

    source: `CUDA`, `HIP`, `XPU`, `MPS`, `CPU`, `driver` where not torch's allocator ran out, `killed` where
    the host's kernel ended a process, `shm` where shared memory was full. process: what this process holds
    in all, others: what each other process holds (in number of `others_seen`, summed). allowed: the limit of
    `set_per_process_memory_fraction`. private_pools: of CUDA graphs, part of allocated. position: where it
    begins in the text.
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
    private_pools: int | None = None
    position: int = 0

    @property
    def reserved(self) -> int | None:
        """Return the bytes that torch's allocator took from the device."""
        if self.allocated is None or self.unallocated is None:
            return None
        return self.allocated + self.unallocated

    @property
    def outside(self) -> int | None:
        """Return the bytes in use outside the allocator: context, NCCL, libraries; in old messages also other
        processes."""
        if self.reserved is None:
            return None
        used = self.process
        if used is None and self.total is not None and self.free is not None and not self.others:
            used = self.total - self.free
        return None if used is None else max(used - self.reserved, 0)

    @property
    def short(self) -> int | None:
        """Return by how many bytes the free memory misses the request."""
        if self.asked is None or self.free is None:
            return None
        return max(self.asked - self.free, 0)

    def to_dict(self) -> dict[str, Any]:
        """Return all figures, the derived ones too."""
        values = {each.name: getattr(self, each.name) for each in fields(self) if each.name != "position"}
        return values | {"reserved": self.reserved, "outside": self.outside, "short": self.short}


def find_messages(text: str) -> list[OomMessage]:
    """Return every message in a text, in its order; a message that several ranks log counts each time."""
    joined = re.sub(r"\s+", " ", _LAUNCHERS_MARK.sub(" ", text))
    starts = list(_START.finditer(joined))
    found = []
    for index, start in enumerate(starts):
        end = starts[index + 1].start() if index + 1 < len(starts) else len(joined)
        found.append(_of_allocator(start, joined[start.start() : min(end, start.start() + _LONGEST)]))
    for match in _MPS.finditer(joined):
        ours, others, allowed, asked = (_bytes(group) for group in match.groups())
        found.append(
            OomMessage("MPS", asked, others=others, allocated=ours, allowed=allowed, position=match.start())
        )
    found += [OomMessage("CPU", _whole(m[1] or m[2]), position=m.start()) for m in _CPU.finditer(joined)]
    found += [OomMessage("driver", _whole(m["asked"]), position=m.start()) for m in _DRIVER.finditer(joined)]
    found += [OomMessage("killed", position=m.start()) for m in _KILLED.finditer(joined)]
    found += [OomMessage("shm", _whole(m[1]), position=m.start()) for m in _SHARED.finditer(joined)]
    return sorted(found, key=lambda message: message.position)


def _of_allocator(start: re.Match[str], text: str) -> OomMessage:
    asked = None if start[2] is None else _bytes(start[2])
    old = _OLD.search(text)
    allowed = _one(_ALLOWED, text)
    if old:
        allocated, reserved = _bytes(old[3]), _one(_OLD_RESERVED, text)
        cached = _one(_OLD_CACHED, text)
        return OomMessage(
            start[1],
            asked,
            _whole(old[1]),
            total=_bytes(old[2]),
            free=_bytes(old[4]),
            allowed=allowed,
            allocated=allocated,
            unallocated=cached if reserved is None or allocated is None else max(reserved - allocated, 0),
            position=start.start(),
        )
    capacity = _CAPACITY.search(text)
    others = [size for _, held_text in _OTHERS.findall(text) if (size := _bytes(held_text)) is not None]
    total = _bytes(capacity[2]) if capacity else None
    held, unallocated = _one(_ALLOCATED, text), _one(_UNALLOCATED, text)
    process = _one(_IN_USE, text)
    if process is None and total is not None and held is not None:
        process = _this_process(others, total, held + (unallocated or 0))
    return OomMessage(
        start[1],
        asked,
        gpu=_whole(capacity[1]) if capacity else None,
        total=total,
        free=_bytes(capacity[3]) if capacity and capacity[3] else None,
        process=process,
        others=sum(others) if others else None,
        others_seen=len(others),
        allowed=allowed,
        allocated=held,
        unallocated=unallocated,
        private_pools=_one(_POOLS, text),
        position=start.start(),
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


def _whole(text: str | None) -> int | None:
    try:
        return None if text is None else whole_number(text, 0)
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


# Of a log with an out-of-memory error: the message, the rank, and by the traceback phase and script's line.

_FRAME = re.compile(r'File "(?P<file>[^"\n]+)", line (?P<line>[0-9]{1,9}), in (?P<name>[^\n]+)')
_RANK = re.compile(r"^\s*(?:\[(?:default|rank)(?P<rank>[0-9]{1,9})\]\s*:?)")
_NEW_TRACEBACK = "Traceback (most recent call last)"
_INSTALLED = ("site-packages", "dist-packages", "/lib/python", "<frozen", "<string>")
_PHASES = (
    ("optimizer", re.compile(r"/torch/optim/|in step\b")),
    (
        "backward",
        re.compile(r"/torch/autograd/(?:__init__|graph)\.py|/torch/_tensor\.py|in backward\b|post_backward"),
    ),
    ("checkpoint loading", re.compile(r"in (load_state_dict|_load_state_dict|load)\b")),
    ("moving the model to the GPU", re.compile(r"in (to|cuda|_apply|convert)\b")),
    ("forward", re.compile(r"in (forward|_call_impl)\b")),
)
_MODULE_FILES = re.compile(r"/torch/nn/modules/(\w+)\.py")


@dataclass(frozen=True)
class Frame:
    """One line of a traceback."""

    file: str
    line: int
    name: str

    @property
    def is_own(self) -> bool:
        """Return whether the line is the user's, not an installed package's."""
        return not any(part in self.file for part in _INSTALLED)

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.name}"


@dataclass(frozen=True)
class OomReport:
    """The content of a text about an out-of-memory error; None where the text does not say.

    ranks: those whose log holds such a message. where: the innermost line of the user's own program.
    operator: the innermost frame of all.
    """

    message: OomMessage
    count: int
    ranks: tuple[int, ...]
    phase: str | None
    where: Frame | None
    operator: Frame | None

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain values."""
        return {
            "message": self.message.to_dict(),
            "messages": self.count,
            "ranks": list(self.ranks),
            "phase": self.phase,
            "line": None if self.where is None else str(self.where),
            "innermost": None if self.operator is None else str(self.operator),
        }


def read_log(text: str) -> OomReport | None:
    """Return the first of a text's out-of-memory errors that say most; None if there is none."""
    messages = find_messages(text)
    if not messages:
        return None
    message = max(messages, key=lambda each: (each.asked is not None, each.total is not None))
    lines = text.splitlines()
    place = next((i for i, line in enumerate(lines) if _says(line, lines, i)), len(lines))
    frames = _frames_before(lines, place)
    return OomReport(
        message,
        len(messages),
        _ranks(lines),
        _phase(frames, lines[max(0, place - 1) : place + 1]),
        next((frame for frame in reversed(frames) if frame.is_own), None),
        frames[-1] if frames else None,
    )


def _says(line: str, lines: list[str], index: int) -> bool:
    low = line.lower()
    mentioned = any(word in low for word in ("memory", "alloc", "oom", "kill"))
    return mentioned and bool(find_messages(" ".join(lines[index : index + 2])))


def _frames_before(lines: list[str], place: int) -> list[Frame]:
    """Return the frames of the traceback that ends at a line, outermost first; one rank's where ranks mix."""
    marked = _RANK.match(lines[place]) if place < len(lines) else None
    rank = marked["rank"] if marked else None
    frames: list[Frame] = []
    for line in reversed(lines[:place]):
        found = _RANK.match(line)
        if rank is not None and (found is None or found["rank"] != rank):
            continue
        if _NEW_TRACEBACK in line:
            break
        if frame := _FRAME.search(line):
            frames.append(Frame(frame["file"], int(frame["line"]), frame["name"].strip()))
    return frames[::-1]


def _phase(frames: list[Frame], around: list[str]) -> str | None:
    """Return the phase of the innermost frame that names one; backward runs forwards again."""
    words = [f"{frame.file} in {frame.name}" for frame in frames]
    for phase in ("optimizer", "backward"):
        pattern = dict(_PHASES)[phase]
        if any(pattern.search(word) for word in words):
            return phase
    for word in reversed(words):
        for phase, pattern in _PHASES[2:]:
            if pattern.search(word) or (phase == "forward" and _MODULE_FILES.search(word)):
                return phase
    return None


def _ranks(lines: list[str]) -> tuple[int, ...]:
    found: Counter[int] = Counter()
    for index, line in enumerate(lines):
        rank = _RANK.match(line)
        if rank and _says(line, lines, index):
            found[int(rank["rank"])] += 1
    return tuple(sorted(found))
