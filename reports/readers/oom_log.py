"""A pasted log with an out-of-memory error: the message, the ranks, and the traceback's phase and line.

A pasted log may be quoted by mail, contain marks of launchers, time stamps and colors, consist of lines of
JSON, or be folded by a terminal. `_Text` removes all of that first.

Out-of-memory messages come from torch's allocators, drivers, launchers and kernels:

    until 1.3   as until 2.0, but with `C cached)`: reserved and not allocated
    until 2.0   Tried to allocate A (GPU 0; T total capacity; U already allocated; F free; R reserved in
    total by PyTorch)
    since 2.1   Tried to allocate A. GPU 0 has a total capacity of T of which F is free. Including
                non-PyTorch memory, this process has P memory in use. Of the allocated memory U is allocated
                by PyTorch, and C is reserved by PyTorch but unallocated.

Variants: `capacty` (2.1), a limit (`L allowed`), other processes (`Process 7 has X memory in use`), private
pools of CUDA graphs, other backends (HIP, XPU, NPU) instead of CUDA. Other forms have fewer figures
(`_FORMS`). Source: c10/cuda/CUDACachingAllocator.cpp, c10/cuda/CUDAMallocAsyncAllocator.cpp,
c10/core/impl/alloc_cpu.cpp, aten/src/ATen/mps/MPSAllocator.mm of these releases.
"""

import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from fsdpbench.base.files.documents import table_beside
from fsdpbench.base.numbers import LARGEST_INTEGER, whole_number, with_unit
from fsdpbench.base.reading import UnreadableError, parse_json, read_rows

_COLOURS = re.compile(r"\x1b(?:\[[0-9;?]{0,40}[ -/]?[@-~]|\][^\x07\x1b]{0,200}(?:\x07|\x1b\\))")
_SHAPES = table_beside(__file__, "oom_log.toml")
_MARK = re.compile(rf"[ \t]*+(?:{'|'.join(_SHAPES['marks'])})[ ]?")
_LINES_AROUND, _MOST_LINES = (400, 40), 10_000
_READ_WHOLE = _LARGEST_JSON_LINE = 1 << 20
_FRAME = re.compile(
    r'File "(?P<file>[^"\n]{1,4096})", line (?P<line>[0-9]{1,9}), in (?P<name>[^\s(]{1,200})'
    r"|(?:\bFile|│|^) ?(?P<file2>[^\s\":,│]{1,4096}\.py):(?P<line2>[0-9]{1,9}),? in (?P<name2>[^\s(]{1,200})",
    re.MULTILINE,
)
"""Frames in the formats of Python, IPython and rich."""
_NEW_TRACEBACK = "Traceback (most recent call last)"
_LINES_BEFORE, _MOST_TRIED, _MOST_MARKS, _FOLDED_FROM = 2000, 100, 6, 40
_INSTALLED = ("site-packages", "dist-packages", "/lib/python", "<frozen", "<string>")
_TABLE = Path(__file__).parents[1] / "oom_phases.csv"
_PHASES = tuple((row["phase"], re.compile(row["pattern"])) for row in read_rows(_TABLE))
"""The first pattern that fits a frame counts. Names alone (`step`, `load`) do not: programs use them too."""
_RECOMPUTES = re.compile(r"/torch/autograd/(?:__init__|graph)\.py|/torch/_tensor\.py")
_PINNED = re.compile(r"pin_memory|(?:cuda|hip)Host(?:Alloc|Register|Malloc)|HostAllocator")
_UNITS = {"bytes": 1}

_UNITS |= {f"{letter}{b}": 1 << 10 * power for power, letter in enumerate("kmgtpe", 1) for b in ("ib", "b")}
_NUMBER = r"[\d.]++ (?:bytes|[KMGTPE]i?B)"
_SIZE = rf"(?<![\d.])({_NUMBER})"  # one scan per run of digits; without the lookbehind, one per digit
_PARTS = {name: re.compile(text.replace("<size>", _SIZE)) for name, text in _SHAPES["parts"].items()}
"""Patterns for the parts of a message from torch."""


def _forms() -> dict[str, re.Pattern[str]]:
    """Read the table: alternatives for each source; `<asked>` is a size, in a group of that name."""
    kinds: dict[str, list[str]] = {}
    number = _NUMBER.replace("\\", r"\\")  # escaped for a replacement
    for row in read_rows(Path(__file__).parents[1] / "oom_forms.csv"):
        kinds.setdefault(row["source"], []).append(
            re.sub(r"(?<!P)<(\w+)>", rf"(?<![\\d.])(?P<\1>{number})", row["pattern"])
        )
    return {source: re.compile("|".join(parts)) for source, parts in kinds.items()}


_FORMS = _forms()
"""Forms with a few figures at most, in groups named like a message's fields. cudaMallocAsync: torch's other
allocator. vLLM: its own memory budget does not fit. pinned: page-locked host memory. driver: a bare error,
also from NCCL and libraries. killed: the host's kernel killed a process for its memory. SIGKILL: something
killed it, for an unknown reason. shm: `/dev/shm`, where loaders and NCCL exchange data."""
_RENAMED = {"mapped": "asked", "array": "asked", "task": "rank"}
_LONGEST = 2000


@dataclass(frozen=True)
class OomMessage:
    """One message, in bytes; None if the message does not say, or contradicts itself.

    source: the backend (`CUDA`, `HIP`, `XPU`, ...) of torch's caching allocator, or a key of `_FORMS`.
    process: all that this process holds; others: the sum that other processes hold (`others_seen` of them).
    allowed: the limit of `set_per_process_memory_fraction`. private_pools: those of CUDA graphs, part of
    allocated. rank: if the message itself names it. old: in the form until torch 2.0.
    variable: the environment variable that the message proposes. position: where it begins in the text.
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
        driver does not list, if it does not say how much this one holds."""
        if self.reserved is None:
            return None
        used = self.process
        if used is None and self.total is not None and self.free is not None:
            used = self.total - self.free - (self.others or 0)
        return None if used is None else max(used - self.reserved, 0)

    @property
    def short(self) -> int | None:
        """Return how many bytes of free memory are missing for the request."""
        if self.asked is None or self.free is None:
            return None
        return max(self.asked - self.free, 0)

    @property
    def weight(self) -> tuple[bool, bool, bool]:
        """Return a sort key: messages with more information are greater."""
        return self.asked is not None, self.total is not None, self.source not in ("SIGKILL", "driver")

    def to_dict(self) -> dict[str, object]:
        """Return all figures, including derived ones."""
        hidden = ("position", "rank", "old", "variable")
        values = {each.name: getattr(self, each.name) for each in fields(self) if each.name not in hidden}
        return values | {"outside": self.outside, "short": self.short}


def find_messages(text: str) -> list[OomMessage]:
    """Return every message in a text, in order; a message that several ranks log counts each time. All white
    space in the text must be single spaces."""
    starts = list(_PARTS["start"].finditer(text))
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
    old, variable = _PARTS["old"].search(text), _PARTS["variable"].search(text)
    message = OomMessage(start[1], asked=asked, allowed=_one("allowed", text), position=start.start())
    if old:
        allocated, reserved, cached = (_bytes(old[3]), _one("old_reserved", text), _one("old_cached", text))
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
    capacity = _PARTS["capacity"].search(text)
    others = [size for _, held in _PARTS["others"].findall(text) if (size := _bytes(held)) is not None]
    total = _bytes(capacity[2]) if capacity else None
    held, unallocated = _one("allocated", text), _one("unallocated", text)
    process, least = _one("in_use", text), (held or 0) + (unallocated or 0)
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
        private_pools=_one("pools", text),
        variable=variable[1] if variable else None,
    )


def _this_process(others: list[int], total: int, reserved: int) -> int | None:
    """Remove this process from `others` and return its bytes; None if it is not among them. In a container
    the driver lists it under another number; then the sum of all processes exceeds the GPU's memory."""
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


def _one(part: str, text: str) -> int | None:
    found = _PARTS[part].search(text)
    return _bytes(found[1]) if found else None


def _bytes(text: str) -> int | None:
    """Return the size in bytes; None if the text is not a size (`1.2.3 GiB`), or the size exceeds 2^63."""
    try:
        size = with_unit(text, _UNITS)
    except ValueError:
        return None
    return size if size <= LARGEST_INTEGER else None


@dataclass(frozen=True)
class Frame:
    """One line of a traceback."""

    file: str
    line: int
    name: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.name}"


@dataclass(frozen=True)
class OomReport:
    """The findings in a text about an out-of-memory error; None if the text does not say.

    ranks: the ranks whose log has such a message. where: the innermost line of the user's own program.
    operator: the innermost frame of all. also: the sources of other messages in the text.
    """

    message: OomMessage
    count: int
    ranks: tuple[int, ...]
    phase: str | None
    where: Frame | None
    operator: Frame | None
    also: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, object]:
        """Return the report as plain values."""
        return {
            "message": self.message.to_dict(),
            "messages": self.count,
            "ranks": list(self.ranks),
            "phase": self.phase,
            "line": None if self.where is None else str(self.where),
            "innermost": None if self.operator is None else str(self.operator),
            "also": list(self.also),
        }


@dataclass(frozen=True)
class _Text:
    """A text without its marks. rows: rank and words of each line. joined: the words of all lines, separated
    by single spaces; starts: the position of each row in it."""

    rows: list[tuple[int | None, str]]
    joined: str
    starts: list[int]

    @classmethod
    def of(cls, text: str, width: int | None) -> "_Text":
        """Read a text; a line of `width` characters continues in the next one, perhaps within a word."""
        rows: list[tuple[int | None, str]] = []
        goes_on = False
        for raw in text.splitlines():
            for rank, words in _without_marks(raw):
                if goes_on:
                    rows[-1] = (rows[-1][0], rows[-1][1] + words)
                else:
                    rows.append((rank, words))
                goes_on = len(raw) == width
        starts, parts, position = [], [], 0
        for _, words in rows:
            plain = " ".join(words.split())
            starts.append(position)
            parts.append(plain)
            position += len(plain) + bool(plain)
        return cls(rows, " ".join(filter(None, parts)), starts)

    def row_of(self, message: OomMessage) -> int:
        """Return the row in which a message begins."""
        return bisect_right(self.starts, message.position) - 1

    def before(self, message: OomMessage) -> str:
        """Return the traceback that ends at a message, with the message's own line; of its rank only."""
        place = self.row_of(message)
        rank = self.rows[place][0]
        rows = self.rows[max(0, place - _LINES_BEFORE) : place + 1]
        text = "\n".join(words for at, words in rows if rank is None or at == rank)
        return text[max(0, text.rfind(_NEW_TRACEBACK)) :]


def _without_marks(raw: str) -> Iterator[tuple[int | None, str]]:
    """Yield the lines in one line of a log (JSON may hold several), each with the rank in its marks."""
    line = raw.strip()
    if line.startswith("{") and line.endswith("}") and len(line) < _LARGEST_JSON_LINE:
        try:
            content = parse_json(line, "line")
        except UnreadableError:
            content = None
        if isinstance(content, dict):
            stated = next(
                (content[name] for name in _SHAPES["ranks"] if isinstance(content.get(name), int)), None
            )
            for each in _texts(content):
                for part in each.splitlines():
                    rank, words = _unmarked(part)
                    yield stated if rank is None else rank, words
            return
    if _NEW_TRACEBACK + ":\\n" in raw:
        yield from (_unmarked(part) for part in raw.replace('\\"', '"').split("\\n"))
        return
    yield _unmarked(raw)


def _texts(content: dict[str, object]) -> Iterator[str]:
    """Yield the texts of a log record: tracebacks first, because they end with the message."""
    for name in _SHAPES["texts"]:
        value = content.get(name)
        if isinstance(value, str):
            yield value
        elif isinstance(value, dict):
            yield from _texts(value)
        elif isinstance(value, list):
            yield from (each for each in value if isinstance(each, str))


def _unmarked(line: str) -> tuple[int | None, str]:
    rank = None
    for _ in range(_MOST_MARKS):
        mark = _MARK.match(line)
        if mark is None:
            break
        number = mark["rank"] or mark["mpi"] or mark["named"]
        rank = rank if number is None else int(number)
        line = line[mark.end() :]
    return rank, line


def read_log(text: str) -> OomReport | None:
    """Return the first of the most informative out-of-memory errors in a text; None if there is none."""
    plain = _COLOURS.sub("", text if len(text) < _READ_WHOLE else _around_hints(text))
    tried = [_Text.of(plain, None)]
    if (width := _width(plain)) is not None:
        tried.append(_Text.of(plain, width))
    read = [(each, find_messages(each.joined)) for each in tried]
    content, messages = max(
        read, key=lambda each: sum(1 + sum(x is not None for x in one.to_dict().values()) for one in each[1])
    )
    if not messages:
        return None
    best = max(message.weight for message in messages)
    alike = [message for message in messages if message.weight == best]
    message = next((each for each in alike[:_MOST_TRIED] if _frames(content.before(each))), alike[0])
    above = content.before(message)
    frames = _frames(above)
    own = [frame for frame in frames if not any(part in frame.file for part in _INSTALLED)]
    marked = {
        message.rank if message.rank is not None else content.rows[content.row_of(message)][0]
        for message in messages
    }
    if message.source == "driver" and _names_pinned(above, frames, content.joined[message.position :][:400]):
        message = replace(message, source="pinned")
    return OomReport(
        message,
        len(messages),
        tuple(sorted(rank for rank in marked if rank is not None)),
        _phase(frames),
        own[-1] if own else None,
        frames[-1] if frames else None,
        tuple(sorted({each.source for each in messages} - {message.source, "driver", "SIGKILL"})),
    )


def _around_hints(text: str) -> str:
    """Return the lines around possible messages in a long log; if there are too many, the first and last."""
    lines, kept, end = text.splitlines(), [], 0
    before, after = _LINES_AROUND
    for index, line in enumerate(text.lower().splitlines()):
        if any(hint in line for hint in _SHAPES["hints"]):
            kept += lines[max(end, index - before) : index + after]
            end = max(end, min(index + after, len(lines)))
    half = _MOST_LINES // 2
    return "\n".join(kept if len(kept) <= _MOST_LINES else kept[:half] + kept[-half:])


def _width(text: str) -> int | None:
    """Return the width at which a terminal may have folded the lines; None if no line is long."""
    lengths = Counter(len(line) for line in text.splitlines() if len(line) >= _FOLDED_FROM)
    return max(lengths, key=lambda length: (lengths[length], length)) if lengths else None


def _frames(text: str) -> list[Frame]:
    """Return the frames of a traceback, outermost first."""
    joined = re.sub(r"\s+", " ", text)
    return [
        Frame(
            found["file"] or found["file2"],
            int(found["line"] or found["line2"]),
            (found["name"] or found["name2"]).strip(),
        )
        for found in _FRAME.finditer(joined)
    ]


def _phase(frames: list[Frame]) -> str | None:
    """Return the phase of the innermost frame that shows one; backward may run forwards again."""
    words = [f"{frame.file} in {frame.name}" for frame in frames]
    for depth in reversed(range(len(words))):
        phase = next((phase for phase, pattern in _PHASES if pattern.search(words[depth])), None)
        if phase == "forward":
            for outer in reversed(words[:depth]):
                if _PHASES[0][1].search(outer):
                    break  # a closure that the optimizer runs
                if _RECOMPUTES.search(outer):
                    return "backward"
        if phase is not None:
            return phase
    return None


def _names_pinned(above: str, frames: list[Frame], after: str) -> bool:
    """Return whether a driver's error is about page-locked host memory, by innermost call or C++ stack."""
    innermost = above[above.rfind("in " + frames[-1].name) :] if frames else above
    return bool(
        _PINNED.search(innermost) or _PINNED.search(after) or (frames and _PINNED.search(frames[-1].file))
    )
